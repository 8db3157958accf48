"""Follow the named ranges of NVTX through a trace: which are open at each record.

Ranges of a thread nest, in each domain apart. Ranges of the process have numbers, may be ended by any
thread, and are open for all threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.trace.kinds import EventKind
from cudakit.trace.layout import Records, view

# Ranges that are open at once, in each thread and in the process; more are ignored. A bound for programs
# that never end their ranges.
_MOST_OPEN: Final = 1024


@dataclass(frozen=True, slots=True)
class OpenRange:
    """An open range, and the ranges around it."""

    name: int  # index of the string table
    domain: int  # index of the string table; 0: NVTX's default domain
    outer: OpenRange | None = None

    def __iter__(self) -> Iterator[OpenRange]:
        """Yield this range and the ranges around it, innermost first."""
        at: OpenRange | None = self
        while at:
            yield at
            at = at.outer


# The innermost open range of each record.
OpenRanges: TypeAlias = npt.NDArray[np.object_]


class _Range(NamedTuple):
    name: int
    domain: int


class RangeTracker:
    """The open ranges of one trace, whose records are passed in the order of their calls."""

    def __init__(self) -> None:
        self._process: dict[int, _Range] = {}  # by number, in the order in which they began
        self._threads: dict[int, list[_Range]] = {}  # outermost first
        self._innermost: dict[int, OpenRange | None] = {}  # by thread; computed on demand

    def follow(self, records: Records) -> OpenRanges | None:
        """Return the innermost range that is open at each record; None if none is open at any."""
        kinds = records["kind"]
        changes = np.flatnonzero((kinds == EventKind.RANGE_PUSH) | (kinds == EventKind.RANGE_POP))
        if not len(changes) and not self._process and not self._threads:
            return None
        threads = records["thread"].tolist()
        innermost: list[OpenRange | None] = []
        rows = zip(changes.tolist(), _rows(records[changes]), strict=True)
        for at, (kind, name, domain, number) in rows:
            self._append_innermost(innermost, islice(threads, len(innermost), at))
            if kind == EventKind.RANGE_PUSH:
                self._push(threads[at], _Range(name, domain), number)
            else:
                self._pop(threads[at], domain, number)
        self._append_innermost(innermost, islice(threads, len(innermost), None))
        column = np.empty(len(records), np.object_)
        column[:] = innermost
        return column

    def _append_innermost(self, innermost: list[OpenRange | None], threads: Iterator[int]) -> None:
        known = self._innermost
        for thread in threads:
            if thread not in known:
                known[thread] = self._nested(thread)
            innermost.append(known[thread])

    def _nested(self, thread: int) -> OpenRange | None:
        nested: OpenRange | None = None
        for one in (*self._process.values(), *self._threads.get(thread, ())):
            nested = OpenRange(one.name, one.domain, nested)
        return nested

    def _push(self, thread: int, pushed: _Range, number: int) -> None:
        if number:
            if len(self._process) < _MOST_OPEN:
                self._process[number] = pushed
            self._innermost.clear()
            return
        own = self._threads.setdefault(thread, [])
        if len(own) < _MOST_OPEN:
            own.append(pushed)
        self._innermost.pop(thread, None)

    def _pop(self, thread: int, domain: int, number: int) -> None:
        if number:
            self._process.pop(number, None)
            self._innermost.clear()
            return
        own = self._threads.get(thread, [])
        for at in reversed(range(len(own))):
            if own[at].domain == domain:
                del own[at]
                break
        if not own:
            self._threads.pop(thread, None)
        self._innermost.pop(thread, None)


def _rows(changes: Records) -> Iterator[tuple[Any, ...]]:
    """Yield kind, name, domain and number of the begins and ends of ranges; an end has no name."""
    kinds = changes["kind"]
    pushes, pops = view(changes, EventKind.RANGE_PUSH), view(changes, EventKind.RANGE_POP)
    is_push = kinds == EventKind.RANGE_PUSH
    names = np.where(is_push, pushes["name"], 0)
    domains = np.where(is_push, pushes["domain"], pops["domain"])
    numbers = np.where(is_push, pushes["number"], pops["number"])
    return zip(kinds.tolist(), names.tolist(), domains.tolist(), numbers.tolist(), strict=True)
