"""Reorders records by their calls: those after a launch are held back until its accesses are recorded.

The recorder reads what a kernel accessed once the host has waited for the kernel. Until then the launch is
*pending*, and nothing that was enqueued after it can be analysed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.core.sanitize.record_batch import sorted_by_call
from cudakit.trace.kinds import Kind, Known
from cudakit.trace.layout import RECORD, Records, view

# 200 MB. Bounds memory for programs that launch for long without waiting once.
MOST_HELD: Final = 1 << 21
NEVER_READ: Final = "launch whose accesses were never read"

_Seqs: TypeAlias = npt.NDArray[np.uint64]
_Counts: TypeAlias = npt.NDArray[np.int64]
_NO_CALL: Final = np.uint64(0)  # calls are counted from 1
_PENDING: Final = (Kind.LAUNCH, Kind.GRAPH_LAUNCH)


@dataclass(frozen=True, slots=True)
class _SortedRecords:
    """Records in order of their calls, and the numbers of the calls, contiguous for binary search."""

    records: Records
    seqs: _Seqs

    def count_before(self, seq: int) -> int:
        return int(np.searchsorted(self.seqs, np.uint64(seq)))

    def part(self, begin: int, end: int) -> _SortedRecords:
        return _SortedRecords(self.records[begin:end], self.seqs[begin:end])


class PendingLaunches:
    """The pending launches, in order, each with the number of ``Accessed`` records still to come."""

    def __init__(self) -> None:
        self._seqs: _Seqs = np.zeros(0, np.uint64)
        self._left: _Counts = np.zeros(0, np.int64)

    @property
    def first(self) -> int | None:
        """The oldest call, or None."""
        return int(self._seqs[0]) if len(self._seqs) else None

    @property
    def last(self) -> int | None:
        """The youngest call, which may be complete already, or None."""
        return int(self._seqs[-1]) if len(self._seqs) else None

    def add(self, seqs: _Seqs, counts: _Counts) -> None:
        seqs, counts = np.append(self._seqs, seqs), np.append(self._left, counts)
        if np.any(seqs[1:] < seqs[:-1]):
            order = np.argsort(seqs)
            seqs, counts = seqs[order], counts[order]
        self._seqs, self._left = seqs, counts

    def settle(self, accessed: _Seqs) -> None:
        """Count one ``Accessed`` for each time that a call is named."""
        seqs, counts = np.unique(accessed, return_counts=True)
        at = np.searchsorted(self._seqs, seqs)
        is_ours = np.append(self._seqs, _NO_CALL)[at] == seqs
        self._left[at[is_ours]] -= counts[is_ours]
        self._forget(0)

    def give_up(self, last: int) -> int:
        """Remove the calls up to one; return how many of them were pending."""
        end = int(np.searchsorted(self._seqs, np.uint64(last), side="right"))
        count = int(np.count_nonzero(self._left[:end] > 0))
        self._forget(end)
        return count

    def _forget(self, count: int) -> None:
        """Remove ``count`` calls, and the complete ones that follow them."""
        pending = self._left[count:] > 0
        begin = count + int(np.argmax(pending)) if pending.any() else len(self._left)
        self._seqs, self._left = self._seqs[begin:], self._left[begin:]


class ReorderBuffer:
    """Returns the records of one trace in the order of their calls, each launch with its accesses.

    Assumed accesses of a launch are dropped if its exact ones are recorded. Of graph launches everything is
    returned, with the ``Accessed`` of their nodes. If more than ``most_held`` records would be held, the
    oldest pending launches are given up: their assumed accesses stay, and their late exact ones are dropped.
    """

    def __init__(self, *, most_held: int = MOST_HELD) -> None:
        self.never_read = 0  # launches that were given up
        self._most_held = most_held
        self._pending = PendingLaunches()
        self._given_up_before = 0  # no call before this one is pending any more
        self._runs: list[_SortedRecords] = []  # held back, in order of arrival

    @property
    def held(self) -> int:
        """The number of records held back."""
        return sum(len(run.seqs) for run in self._runs)

    def feed(self, records: Records) -> Records:
        """Add the next records of the trace; return those that no pending launch precedes."""
        kinds = records["kind"]
        pending = [found for kind in _PENDING if len((found := _pending(records, kinds, kind))[0])]
        is_told = kinds == Kind.ACCESSED
        if not (self._runs or pending or is_told.any()):
            return self._timely(records)
        for seqs, counts in pending:
            self._pending.add(seqs, counts)
        self._pending.settle(records["seq"][is_told])
        self._hold(self._timely(records))
        if (first := self._pending.first) is not None and self._left_from(first) > self._most_held:
            self._make_room()
        return self._due()

    def flush(self) -> Records:
        """Give up the pending launches, and return all records: no more will come."""
        if (last := self._pending.last) is not None:
            self._give_up(last)
        return self._due()

    def _timely(self, records: Records) -> Records:
        """Drop late accesses of launches that were given up."""
        if not self._given_up_before or not len(records):
            return records
        if (seqs := records["seq"]).min() >= self._given_up_before:
            return records
        is_late = np.isin(records["kind"], (Kind.ACCESS, Kind.ACCESSED))
        return records[~(is_late & (seqs < np.uint64(self._given_up_before)))]

    def _make_room(self) -> None:
        """Give up the oldest pending launches, until a quarter of the limit is free again."""
        seqs = np.concatenate([run.seqs for run in self._runs])
        too_many = len(seqs) - self._most_held * 3 // 4
        self._give_up(int(np.partition(seqs, too_many - 1)[too_many - 1]))

    def _give_up(self, last: int) -> None:
        self.never_read += self._pending.give_up(last)
        self._given_up_before = last + 1

    def _hold(self, records: Records) -> None:
        """Hold records; runs are joined by size, so that there are few and each record moves few times."""
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
        return _without_replaced(sorted_by_call(np.concatenate(due)))

    def _left_from(self, seq: int) -> int:
        """Count the records that would stay if all before a call were released."""
        return sum(len(run.seqs) - run.count_before(seq) for run in self._runs)


def reordered(records: Records) -> tuple[Records, int]:
    """Return a whole trace in order of its calls, and the number of launches never read."""
    buffer = ReorderBuffer(most_held=len(records))
    whole = np.concatenate([buffer.feed(records), buffer.flush()])
    return whole, buffer.never_read


def _run(records: Records) -> _SortedRecords:
    ordered = sorted_by_call(records)
    return _SortedRecords(ordered, np.ascontiguousarray(ordered["seq"]))


def _pending(records: Records, kinds: npt.NDArray[np.uint16], kind: Kind) -> tuple[_Seqs, _Counts]:
    """Return the pending calls of a kind, and the number of ``Accessed`` records to come for each."""
    counts = view(records, kind)["pending"]
    some = np.flatnonzero((kinds == kind) & (counts != 0))
    return records["seq"][some], counts[some].astype(np.int64)


def _without_replaced(records: Records) -> Records:
    """Drop the assumed accesses of launches whose exact ones are recorded."""
    kinds = records["kind"]
    told = view(records[kinds == Kind.ACCESSED], Kind.ACCESSED)
    exact = told["seq"][told["exact"] & (told["node"] == 0)]
    if not len(exact):
        return records
    is_assumed = (kinds == Kind.ACCESS) & (view(records, Kind.ACCESS)["known"] >= Known.ASSUMED)
    kept: Records = records[~(is_assumed & np.isin(records["seq"], exact))]
    return kept
