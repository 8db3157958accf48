"""Reorder records by their calls, because the exact accesses of a launch are recorded late.

The recorder reads the accesses of a kernel back after the host has waited for the kernel. Until then the
launch is *pending*, and no later record can be analyzed. A launch that the recorder delays is pending, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.sanitize.record_batch import sorted_by_call
from cudakit.trace.kinds import EventKind, Precision
from cudakit.trace.layout import RECORD, Records, concatenate_records, take_records, view

# Maximum number of records in the buffer (200 MB). It limits the memory for programs that launch for a long
# time without waiting for the GPU.
MAX_HELD_RECORDS: Final = 1 << 21
NEVER_READ: Final = "launch whose accesses were never read back"
GIVEN_UP: Final = (
    "launch given up before its accesses were read back: too many later records were held"
)

_CallNumbers: TypeAlias = npt.NDArray[np.uint64]
_Counts: TypeAlias = npt.NDArray[np.int64]
_NO_CALL: Final = np.uint64(0)  # no call has this number, because calls are counted from 1
_PENDING_KINDS: Final = (EventKind.LAUNCH, EventKind.GRAPH_LAUNCH, EventKind.LAUNCH_DELAYED)


@dataclass(frozen=True, slots=True)
class _SortedRecords:
    """Records sorted by call, and the numbers of their calls as a contiguous array for binary search."""

    records: Records
    seqs: _CallNumbers

    def count_before(self, seq: int) -> int:
        return int(np.searchsorted(self.seqs, np.uint64(seq)))

    def slice(self, begin_row: int, end_row: int) -> _SortedRecords:
        return _SortedRecords(self.records[begin_row:end_row], self.seqs[begin_row:end_row])


class PendingLaunches:
    """The pending launches in order, each with its count of missing records.

    These are ``Accessed`` records, and the ``LaunchDelayed`` record at the end of a delay.
    """

    def __init__(self) -> None:
        self._seqs: _CallNumbers = np.zeros(0, np.uint64)
        self._missing_counts: _Counts = np.zeros(0, np.int64)

    @property
    def first_call(self) -> int | None:
        """The sequence number of the first pending launch, or None."""
        return int(self._seqs[0]) if len(self._seqs) else None

    @property
    def last_call(self) -> int | None:
        """The sequence number of the last launch, which may be complete, or None."""
        return int(self._seqs[-1]) if len(self._seqs) else None

    def add(self, seqs: _CallNumbers, missing_counts: _Counts) -> None:
        """Add pending launches, each with its count of missing records. A launch may be added twice."""
        seqs, missing_counts = (
            np.append(self._seqs, seqs),
            np.append(self._missing_counts, missing_counts),
        )
        if np.any(seqs[1:] <= seqs[:-1]):
            seqs, launch_indices = np.unique(seqs, return_inverse=True)
            missing_counts, added_counts = np.zeros(len(seqs), np.int64), missing_counts
            np.add.at(missing_counts, launch_indices, added_counts)
        self._seqs, self._missing_counts = seqs, missing_counts

    def subtract(self, recorded_seqs: _CallNumbers) -> None:
        """Subtract the ``Accessed`` and ``LaunchDelayed`` records of these calls from the missing records."""
        seqs, recorded_counts = np.unique(recorded_seqs, return_counts=True)
        launch_indices = np.searchsorted(self._seqs, seqs)
        is_pending = np.append(self._seqs, _NO_CALL)[launch_indices] == seqs
        self._missing_counts[launch_indices[is_pending]] -= recorded_counts[is_pending]
        self._remove_first(0)

    def give_up(self, last_call: int) -> int:
        """Remove the launches up to ``last_call``. Return the number of incomplete launches among them."""
        end_index = int(np.searchsorted(self._seqs, np.uint64(last_call), side="right"))
        incomplete_count = int(np.count_nonzero(self._missing_counts[:end_index] > 0))
        self._remove_first(end_index)
        return incomplete_count

    def _remove_first(self, launch_count: int) -> None:
        """Remove the first ``launch_count`` launches, and the complete ones that follow them."""
        is_incomplete = self._missing_counts[launch_count:] > 0
        begin = (
            launch_count + int(np.argmax(is_incomplete))
            if is_incomplete.any()
            else len(self._missing_counts)
        )
        self._seqs, self._missing_counts = self._seqs[begin:], self._missing_counts[begin:]


class ReorderBuffer:
    """Returns the records of one trace in the order of their calls, each launch with its accesses.

    The assumed accesses of a launch are dropped after its exact accesses were recorded. The nodes of one
    graph launch may have either; so all accesses and ``Accessed`` records of graph launches are returned.
    When the buffer has more than ``max_held`` records, the oldest pending launches are given up: their
    assumed accesses are returned, and their exact accesses are dropped when they are recorded later.
    """

    def __init__(self, *, max_held: int = MAX_HELD_RECORDS) -> None:
        self.never_read_count = 0  # number of launches that were pending at the end of the trace
        self.given_up_count = 0  # number of launches that were given up before the end of the trace
        self._max_held = max_held
        self._pending = PendingLaunches()
        self._given_up_before_seq = (
            0  # all launches before this call were given up, or are complete
        )
        self._sorted_runs: list[
            _SortedRecords
        ] = []  # sorted runs of held records, in order of arrival

    @property
    def held_count(self) -> int:
        """The number of records in the buffer."""
        return sum(len(sorted_run.seqs) for sorted_run in self._sorted_runs)

    def feed(self, records: Records) -> Records:
        """Add the next records of the trace; return all held records before the first pending launch."""
        kinds = records["kind"]
        pending_by_kind = [_pending_launches(records, kinds, kind) for kind in _PENDING_KINDS]
        new_pending_launches = [
            (seqs, missing_counts) for seqs, missing_counts in pending_by_kind if len(seqs)
        ]
        is_end = (kinds == EventKind.ACCESSED) | _ends_delay(records, kinds)
        if not (self._sorted_runs or new_pending_launches or is_end.any()):
            return self._drop_late_accesses(records)
        for seqs, missing_counts in new_pending_launches:
            self._pending.add(seqs, missing_counts)
        self._pending.subtract(records["seq"][is_end])
        self._hold_records(self._drop_late_accesses(records))
        first_call = self._pending.first_call
        if first_call is not None and self._count_from(first_call) > self._max_held:
            self._give_up_oldest()
        return self._release_complete()

    def flush(self) -> Records:
        """Give up all pending launches, and return all held records. Call it at the end of the trace."""
        if (last_call := self._pending.last_call) is not None:
            self.never_read_count += self._give_up(last_call)
        return self._release_complete()

    def _drop_late_accesses(self, records: Records) -> Records:
        """Drop accesses that arrive after the analysis has given up waiting for their launch."""
        if not self._given_up_before_seq or not len(records):
            return records
        if (seqs := records["seq"]).min() >= self._given_up_before_seq:
            return records
        is_late = np.isin(records["kind"], (EventKind.ACCESS, EventKind.ACCESSED))
        return take_records(records, ~(is_late & (seqs < np.uint64(self._given_up_before_seq))))

    def _give_up_oldest(self) -> None:
        """Give up the oldest pending launches, until the buffer is three quarters full."""
        seqs = np.concatenate([sorted_run.seqs for sorted_run in self._sorted_runs])
        excess_count = len(seqs) - self._max_held * 3 // 4
        last_call = int(np.partition(seqs, excess_count - 1)[excess_count - 1])
        self.given_up_count += self._give_up(last_call)

    def _give_up(self, last_call: int) -> int:
        """Give up the launches up to ``last_call``. Return the number of incomplete launches among them."""
        self._given_up_before_seq = last_call + 1
        return self._pending.give_up(last_call)

    def _hold_records(self, records: Records) -> None:
        """Add records as a sorted run, and merge runs of similar size.

        Merging copies each record O(log n) times, since the run that contains it at least doubles in size.
        """
        runs = self._sorted_runs
        runs.append(_sorted_run(records))
        while len(runs) > 1 and len(runs[-2].seqs) < 2 * len(runs[-1].seqs):
            last_run = runs.pop()
            runs.append(_sorted_run(concatenate_records([runs.pop().records, last_run.records])))

    def _release_complete(self) -> Records:
        """Remove and return the records before the first pending launch."""
        first_call = self._pending.first_call
        end_indices = [
            len(sorted_run.seqs) if first_call is None else sorted_run.count_before(first_call)
            for sorted_run in self._sorted_runs
        ]
        complete_records = [
            sorted_run.records[:end]
            for sorted_run, end in zip(self._sorted_runs, end_indices, strict=True)
            if end
        ]
        held_runs = (
            sorted_run.slice(end, len(sorted_run.seqs))
            for sorted_run, end in zip(self._sorted_runs, end_indices, strict=True)
        )
        self._sorted_runs = [sorted_run for sorted_run in held_runs if len(sorted_run.seqs)]
        if not complete_records:
            return np.zeros(0, RECORD)
        ordered_records = sorted_by_call(concatenate_records(complete_records))
        is_delay = ordered_records["kind"] == EventKind.LAUNCH_DELAYED
        if is_delay.any():
            ordered_records = take_records(ordered_records, ~is_delay)
        return _drop_superseded_accesses(ordered_records)

    def _count_from(self, seq: int) -> int:
        """Return the number of records at and after a call."""
        return sum(
            len(sorted_run.seqs) - sorted_run.count_before(seq) for sorted_run in self._sorted_runs
        )


def reorder_records(records: Records) -> tuple[Records, int]:
    """Return the records of a trace in order of their calls, and the number of launches without accesses."""
    buffer = ReorderBuffer(max_held=len(records))
    ordered_records = concatenate_records([buffer.feed(records), buffer.flush()])
    return ordered_records, buffer.never_read_count


def _sorted_run(records: Records) -> _SortedRecords:
    ordered_records = sorted_by_call(records)
    return _SortedRecords(ordered_records, np.ascontiguousarray(ordered_records["seq"]))


def _pending_launches(
    records: Records, kinds: npt.NDArray[np.uint16], kind: EventKind
) -> tuple[_CallNumbers, _Counts]:
    """Return the sequence number of each pending launch, and its count of missing ``Accessed`` records."""
    missing_counts = view(records, kind)["pending"]
    indices = np.flatnonzero((kinds == kind) & (missing_counts != 0))
    return records["seq"][indices], missing_counts[indices].astype(np.int64)


def _ends_delay(records: Records, kinds: npt.NDArray[np.uint16]) -> npt.NDArray[np.bool_]:
    """Return for each record whether it ends the delay of a launch."""
    is_end: npt.NDArray[np.bool_] = kinds == EventKind.LAUNCH_DELAYED
    is_end[is_end] = ~view(records[is_end], EventKind.LAUNCH_DELAYED)["pending"]
    return is_end


def _drop_superseded_accesses(records: Records) -> Records:
    """Drop the assumed accesses of launches whose exact accesses were recorded."""
    kinds = records["kind"]
    accessed_records = view(records[kinds == EventKind.ACCESSED], EventKind.ACCESSED)
    exact_seqs = accessed_records["seq"][
        accessed_records["exact"] & (accessed_records["node"] == 0)
    ]
    if not len(exact_seqs):
        return records
    is_assumed = (kinds == EventKind.ACCESS) & (
        view(records, EventKind.ACCESS)["precision"] >= Precision.ASSUMED
    )
    assumed_indices = np.flatnonzero(is_assumed)
    superseded_indices = assumed_indices[np.isin(records["seq"][assumed_indices], exact_seqs)]
    if not len(superseded_indices):
        return records
    is_remaining = np.ones(len(records), np.bool_)
    is_remaining[superseded_indices] = False
    return take_records(records, is_remaining)
