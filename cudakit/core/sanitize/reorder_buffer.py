"""Reorder records by their calls, because the exact accesses of a launch are recorded late.

The recorder reads the accesses of a kernel back after the host has waited for the kernel. Until then the
launch is *pending*, and no later record can be analyzed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.core.sanitize.record_batch import sorted_by_call
from cudakit.trace.kinds import EventKind, Precision
from cudakit.trace.layout import RECORD, Records, view

# Records held back at most, 200 MB: bounds memory for programs that launch for long without waiting once.
MOST_HELD: Final = 1 << 21
NEVER_READ: Final = "launch whose accesses were never read back"

_Seqs: TypeAlias = npt.NDArray[np.uint64]
_Counts: TypeAlias = npt.NDArray[np.int64]
_NO_CALL: Final = np.uint64(0)  # calls are counted from 1
_PENDING: Final = (EventKind.LAUNCH, EventKind.GRAPH_LAUNCH)


@dataclass(frozen=True, slots=True)
class _SortedRecords:
    """Records sorted by call, and the numbers of their calls as a contiguous array for binary search."""

    records: Records
    seqs: _Seqs

    def count_before(self, seq: int) -> int:
        return int(np.searchsorted(self.seqs, np.uint64(seq)))

    def part(self, begin: int, end: int) -> _SortedRecords:
        return _SortedRecords(self.records[begin:end], self.seqs[begin:end])


class PendingLaunches:
    """The pending launches by call, each with the number of ``Accessed`` records that are missing."""

    def __init__(self) -> None:
        self._seqs: _Seqs = np.zeros(0, np.uint64)
        self._left: _Counts = np.zeros(0, np.int64)

    @property
    def first(self) -> int | None:
        """The oldest call, or None."""
        return int(self._seqs[0]) if len(self._seqs) else None

    @property
    def last(self) -> int | None:
        """The youngest call, or None; it may be complete."""
        return int(self._seqs[-1]) if len(self._seqs) else None

    def add(self, seqs: _Seqs, counts: _Counts) -> None:
        seqs, counts = np.append(self._seqs, seqs), np.append(self._left, counts)
        if np.any(seqs[1:] < seqs[:-1]):
            order = np.argsort(seqs)
            seqs, counts = seqs[order], counts[order]
        self._seqs, self._left = seqs, counts

    def settle(self, accessed: _Seqs) -> None:
        """Count the ``Accessed`` records, given by their calls."""
        seqs, counts = np.unique(accessed, return_counts=True)
        at = np.searchsorted(self._seqs, seqs)
        is_ours = np.append(self._seqs, _NO_CALL)[at] == seqs
        self._left[at[is_ours]] -= counts[is_ours]
        self._remove_first(0)

    def give_up(self, last: int) -> int:
        """Remove the calls up to ``last``; return the number of those that were pending."""
        end = int(np.searchsorted(self._seqs, np.uint64(last), side="right"))
        count = int(np.count_nonzero(self._left[:end] > 0))
        self._remove_first(end)
        return count

    def _remove_first(self, count: int) -> None:
        """Remove the first ``count`` calls, and the complete ones that follow them."""
        pending = self._left[count:] > 0
        begin = count + int(np.argmax(pending)) if pending.any() else len(self._left)
        self._seqs, self._left = self._seqs[begin:], self._left[begin:]


class ReorderBuffer:
    """Returns the records of one trace in the order of their calls, each launch with its accesses.

    The assumed accesses of a launch are dropped once its exact ones are recorded. For graph launches, which
    mix both by node, all accesses and ``Accessed`` records are returned. If more than ``most_held`` records
    would be held, the oldest pending launches are given up: they keep their assumed accesses, and their late
    exact ones are dropped.
    """

    def __init__(self, *, most_held: int = MOST_HELD) -> None:
        self.never_read = 0  # launches that were given up
        self._most_held = most_held
        self._pending = PendingLaunches()
        self._given_up_before = 0  # all launches before this call were given up, or are complete
        self._runs: list[_SortedRecords] = []  # held back, in order of arrival

    @property
    def held(self) -> int:
        """The number of records held back."""
        return sum(len(run.seqs) for run in self._runs)

    def feed(self, records: Records) -> Records:
        """Add the next records of the trace; return all held records before the first pending launch."""
        kinds = records["kind"]
        by_kind = [_pending(records, kinds, kind) for kind in _PENDING]
        pending = [(seqs, counts) for seqs, counts in by_kind if len(seqs)]
        is_accessed = kinds == EventKind.ACCESSED
        if not (self._runs or pending or is_accessed.any()):
            return self._without_late_accesses(records)
        for seqs, counts in pending:
            self._pending.add(seqs, counts)
        self._pending.settle(records["seq"][is_accessed])
        self._hold(self._without_late_accesses(records))
        if (first := self._pending.first) is not None and self._count_from(first) > self._most_held:
            self._give_up_oldest()
        return self._due()

    def flush(self) -> Records:
        """Give up all pending launches, and return all held records: the trace has ended."""
        if (last := self._pending.last) is not None:
            self._give_up(last)
        return self._due()

    def _without_late_accesses(self, records: Records) -> Records:
        """Drop late accesses of launches that were given up."""
        if not self._given_up_before or not len(records):
            return records
        if (seqs := records["seq"]).min() >= self._given_up_before:
            return records
        is_late = np.isin(records["kind"], (EventKind.ACCESS, EventKind.ACCESSED))
        return records[~(is_late & (seqs < np.uint64(self._given_up_before)))]

    def _give_up_oldest(self) -> None:
        """Give up the oldest pending launches, until the buffer is three quarters full."""
        seqs = np.concatenate([run.seqs for run in self._runs])
        excess = len(seqs) - self._most_held * 3 // 4
        self._give_up(int(np.partition(seqs, excess - 1)[excess - 1]))

    def _give_up(self, last: int) -> None:
        self.never_read += self._pending.give_up(last)
        self._given_up_before = last + 1

    def _hold(self, records: Records) -> None:
        """Hold records in sorted runs, merging runs of similar size: each record is copied O(log n) times."""
        runs = self._runs
        runs.append(_run(records))
        while len(runs) > 1 and len(runs[-2].seqs) < 2 * len(runs[-1].seqs):
            last = runs.pop()
            runs.append(_run(np.concatenate([runs.pop().records, last.records])))

    def _due(self) -> Records:
        """Return and release the records before the first pending call."""
        first = self._pending.first
        ends = [len(run.seqs) if first is None else run.count_before(first) for run in self._runs]
        due = [run.records[:end] for run, end in zip(self._runs, ends, strict=True) if end]
        rest = (run.part(end, len(run.seqs)) for run, end in zip(self._runs, ends, strict=True))
        self._runs = [run for run in rest if len(run.seqs)]
        if not due:
            return np.zeros(0, RECORD)
        return _without_superseded(sorted_by_call(np.concatenate(due)))

    def _count_from(self, seq: int) -> int:
        """Return the number of records at and after a call."""
        return sum(len(run.seqs) - run.count_before(seq) for run in self._runs)


def reordered(records: Records) -> tuple[Records, int]:
    """Return a whole trace in order of its calls, and the number of launches never read."""
    buffer = ReorderBuffer(most_held=len(records))
    whole = np.concatenate([buffer.feed(records), buffer.flush()])
    return whole, buffer.never_read


def _run(records: Records) -> _SortedRecords:
    ordered = sorted_by_call(records)
    return _SortedRecords(ordered, np.ascontiguousarray(ordered["seq"]))


def _pending(
    records: Records, kinds: npt.NDArray[np.uint16], kind: EventKind
) -> tuple[_Seqs, _Counts]:
    """Return the pending calls of a kind, and the number of ``Accessed`` records that each waits for."""
    counts = view(records, kind)["pending"]
    indices = np.flatnonzero((kinds == kind) & (counts != 0))
    return records["seq"][indices], counts[indices].astype(np.int64)


def _without_superseded(records: Records) -> Records:
    """Drop the assumed accesses of launches whose exact ones are recorded."""
    kinds = records["kind"]
    accessed = view(records[kinds == EventKind.ACCESSED], EventKind.ACCESSED)
    exact = accessed["seq"][accessed["exact"] & (accessed["node"] == 0)]
    if not len(exact):
        return records
    is_assumed = (kinds == EventKind.ACCESS) & (
        view(records, EventKind.ACCESS)["known"] >= Precision.ASSUMED
    )
    kept: Records = records[~(is_assumed & np.isin(records["seq"], exact))]
    return kept
