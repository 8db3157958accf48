"""Accesses of launches that arrive late: later records are held back, and handed on in order of their calls.

The recorder reads what a kernel accessed once the host has waited for the kernel. Until then the launch is
*pending*, and nothing that was enqueued after it can be analysed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.core.sanitize.record_batch import in_order
from cudakit.trace.kinds import Kind, Known
from cudakit.trace.layout import RECORD, Records, view

# 200 MB. A program that launches for so long without waiting once is looked at all the same.
MOST_HELD: Final = 1 << 21
NEVER_READ: Final = "launch whose accesses were never read"

_Seqs: TypeAlias = npt.NDArray[np.uint64]
_Counts: TypeAlias = npt.NDArray[np.int64]
_NO_CALL: Final = np.uint64(0)  # calls are counted from 1
_PENDING: Final = (Kind.LAUNCH, Kind.GRAPH_LAUNCH)


@dataclass(frozen=True, slots=True)
class _Run:
    """Records in order, and apart their numbers, side by side to be searched."""

    records: Records
    seqs: _Seqs

    def count_before(self, seq: int) -> int:
        return int(np.searchsorted(self.seqs, np.uint64(seq)))

    def part(self, begin: int, end: int) -> _Run:
        return _Run(self.records[begin:end], self.seqs[begin:end])


class _Awaited:
    """The calls that are pending, in order, and how many Accessed are to come for each."""

    def __init__(self) -> None:
        self._seqs: _Seqs = np.zeros(0, np.uint64)
        self._left: _Counts = np.zeros(0, np.int64)

    @property
    def first(self) -> int | None:
        """The oldest of them."""
        return int(self._seqs[0]) if len(self._seqs) else None

    @property
    def last(self) -> int | None:
        """The youngest of them, or one that was pending."""
        return int(self._seqs[-1]) if len(self._seqs) else None

    def add(self, seqs: _Seqs, counts: _Counts) -> None:
        seqs, counts = np.append(self._seqs, seqs), np.append(self._left, counts)
        if np.any(seqs[1:] < seqs[:-1]):
            order = np.argsort(seqs)
            seqs, counts = seqs[order], counts[order]
        self._seqs, self._left = seqs, counts

    def settle(self, told: _Seqs) -> None:
        """Take what is told: each time that a call is named, one Accessed of it."""
        seqs, counts = np.unique(told, return_counts=True)
        at = np.searchsorted(self._seqs, seqs)
        is_ours = np.append(self._seqs, _NO_CALL)[at] == seqs
        self._left[at[is_ours]] -= counts[is_ours]
        self._forget(0)

    def give_up(self, last: int) -> int:
        """Forget the calls up to one; return how many of them were pending."""
        end = int(np.searchsorted(self._seqs, np.uint64(last), side="right"))
        count = int(np.count_nonzero(self._left[:end] > 0))
        self._forget(end)
        return count

    def _forget(self, count: int) -> None:
        """Forget so many, and those behind them that are settled."""
        pending = self._left[count:] > 0
        begin = count + int(np.argmax(pending)) if pending.any() else len(self._left)
        self._seqs, self._left = self._seqs[begin:], self._left[begin:]


class LateAccesses:
    """Hands on the records of one trace in the order of their calls, each launch with what it did.

    What was assumed of a launch is left out where it is told exactly. Of graph launches all is handed on,
    with the ``Accessed`` of their nodes. Where more than ``most_held`` records would be held, the oldest
    pending launches are given up: what is assumed of them stands, and what is told later is left out.
    """

    def __init__(self, *, most_held: int = MOST_HELD) -> None:
        self.never_read = 0  # launches that were given up
        self._most_held = most_held
        self._awaited = _Awaited()
        self._given_up_before = 0  # all calls that were pending before this one are over
        self._runs: list[_Run] = []  # what is held, in the order in which it came

    @property
    def held(self) -> int:
        """How many records are held back."""
        return sum(len(run.seqs) for run in self._runs)

    def feed(self, records: Records) -> Records:
        """Take the next records of the trace; return those whose turn has come."""
        kinds = records["kind"]
        pending = [found for kind in _PENDING if len((found := _pending(records, kinds, kind))[0])]
        is_told = kinds == Kind.ACCESSED
        if not (self._runs or pending or is_told.any()):
            return self._timely(records)
        for seqs, counts in pending:
            self._awaited.add(seqs, counts)
        self._awaited.settle(records["seq"][is_told])
        self._hold(self._timely(records))
        if (first := self._awaited.first) is not None and self._left_from(first) > self._most_held:
            self._make_room()
        return self._due()

    def rest(self) -> Records:
        """Give up what is pending, and return all that is held: no more is told."""
        if (last := self._awaited.last) is not None:
            self._give_up(last)
        return self._due()

    def _timely(self, records: Records) -> Records:
        """Leave out what is told of launches that were given up."""
        if not self._given_up_before or not len(records):
            return records
        if (seqs := records["seq"]).min() >= self._given_up_before:
            return records
        is_late = np.isin(records["kind"], (Kind.ACCESS, Kind.ACCESSED))
        return records[~(is_late & (seqs < np.uint64(self._given_up_before)))]

    def _make_room(self) -> None:
        """Give up the oldest pending launches, so that a quarter of what may be held is free again."""
        seqs = np.concatenate([run.seqs for run in self._runs])
        too_many = len(seqs) - self._most_held * 3 // 4
        self._give_up(int(np.partition(seqs, too_many - 1)[too_many - 1]))

    def _give_up(self, last: int) -> None:
        self.never_read += self._awaited.give_up(last)
        self._given_up_before = last + 1

    def _hold(self, records: Records) -> None:
        """Keep records; runs are joined so that there are few, and each record is moved few times."""
        runs = self._runs
        runs.append(_run(records))
        while len(runs) > 1 and len(runs[-2].seqs) < 2 * len(runs[-1].seqs):
            last = runs.pop()
            runs.append(_run(np.concatenate([runs.pop().records, last.records])))

    def _due(self) -> Records:
        """Return what comes before the first pending call, and hold it no more."""
        first = self._awaited.first
        ends = [len(run.seqs) if first is None else run.count_before(first) for run in self._runs]
        due = [run.records[:end] for run, end in zip(self._runs, ends, strict=True) if end]
        rest = (run.part(end, len(run.seqs)) for run, end in zip(self._runs, ends, strict=True))
        self._runs = [run for run in rest if len(run.seqs)]
        if not due:
            return np.zeros(0, RECORD)
        return _without_replaced(in_order(np.concatenate(due)))

    def _left_from(self, seq: int) -> int:
        """Count what would be held if all before a call were handed on."""
        return sum(len(run.seqs) - run.count_before(seq) for run in self._runs)


def in_turn(records: Records) -> tuple[Records, int]:
    """Return a whole trace as it would be if all had been told at once, and what was never read of it."""
    late = LateAccesses(most_held=len(records))
    whole = np.concatenate([late.feed(records), late.rest()])
    return whole, late.never_read


def _run(records: Records) -> _Run:
    ordered = in_order(records)
    return _Run(ordered, np.ascontiguousarray(ordered["seq"]))


def _pending(records: Records, kinds: npt.NDArray[np.uint16], kind: Kind) -> tuple[_Seqs, _Counts]:
    """Return the pending calls of a kind, and how many Accessed come for each."""
    counts = view(records, kind)["pending"]
    some = np.flatnonzero((kinds == kind) & (counts != 0))
    return records["seq"][some], counts[some].astype(np.int64)


def _without_replaced(records: Records) -> Records:
    """Leave out what was assumed of launches that are told exactly."""
    kinds = records["kind"]
    told = view(records[kinds == Kind.ACCESSED], Kind.ACCESSED)
    exact = told["seq"][told["exact"] & (told["node"] == 0)]
    if not len(exact):
        return records
    is_assumed = (kinds == Kind.ACCESS) & (view(records, Kind.ACCESS)["known"] >= Known.ASSUMED)
    kept: Records = records[~(is_assumed & np.isin(records["seq"], exact))]
    return kept
