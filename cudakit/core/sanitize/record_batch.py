"""Decode a batch of records by column: an iterator of calls for each kind, and one of all accesses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.core.sanitize.clocks import Call
from cudakit.core.sanitize.races import Grade
from cudakit.trace.kinds import EventKind, Precision
from cudakit.trace.layout import Records, view
from cudakit.trace.ranges import OpenRanges, RangeTracker

# The kinds that the engine handles, and the fields that its handlers take, in order. Other kinds are skipped.
FIELDS: Final[dict[EventKind, tuple[str, ...]]] = {
    EventKind.ALLOC: ("address", "size_bytes", "how", "layer"),
    EventKind.FREE: ("address", "size_bytes", "how", "layer"),
    EventKind.LAUNCH: (),
    EventKind.COPY: (
        "destination",
        "source",
        "size_bytes",
        "rows",
        "destination_pitch_bytes",
        "source_pitch_bytes",
        "direction",
        "host",
        "asynchronous",
    ),
    EventKind.FILL: ("address", "size_bytes", "rows", "pitch_bytes", "asynchronous"),
    EventKind.STREAM_CREATE: ("flag",),
    EventKind.STREAM_DESTROY: (),
    EventKind.EVENT_RECORD: ("event",),
    EventKind.STREAM_WAIT: ("event",),
    EventKind.EVENT_SYNC: ("event",),
    EventKind.EVENT_QUERY_OK: ("event",),
    EventKind.STREAM_SYNC: (),
    EventKind.STREAM_QUERY_OK: (),
    EventKind.CONTEXT_SYNC: (),
    EventKind.HOST_CALL: ("phase",),
    EventKind.CAPTURE_BEGIN: ("graph",),
    EventKind.CAPTURE_END: ("graph",),
    EventKind.GRAPH_NODE: ("graph", "node", "work"),
    EventKind.GRAPH_EDGE: ("graph", "before", "after"),
    EventKind.GRAPH_LAUNCH: ("graph", "executable"),
    EventKind.MEMOP: ("address", "flag"),
    EventKind.GAP: ("what", "count"),
    EventKind.ACCESSED: ("node", "exact"),
    EventKind.ARENAS: ("size_bytes",),
}
AccessRow: TypeAlias = tuple[int, int, int, int, int, int, int]
_Mask: TypeAlias = npt.NDArray[np.bool_]
ACCESS_FIELDS: Final = ("lo", "hi", "mode", "known", "stride_bytes", "count", "node")
_CALL_FIELDS: Final = ("stream", "context", "device", "thread", "site")
_IS_HANDLED: Final = np.isin(np.arange(1 << 16), (EventKind.ACCESS, *FIELDS))


class RecordBatch:
    """Consecutive records; ``last_seq`` is the call before the first of them.

    ``kinds`` lists the kinds of the calls, ``following`` the number of accesses after each call; ``leading``
    is the number of accesses before the first call. ``strays`` counts accesses whose call is missing.
    ``grades`` lists the precision of each launch; ``leading_grade`` is that of the accesses before the first
    call. ``launches_without_call_site`` counts launches whose call stack is unknown. ``ranges`` follows the
    NVTX ranges of the trace.
    """

    def __init__(self, records: Records, last_seq: int, ranges: RangeTracker) -> None:
        innermost = ranges.follow(records)
        is_more = _belongs_to_previous_call(records)
        handled = _IS_HANDLED[records["kind"]] & ~_strays(records, is_more, last_seq)
        self.strays = 0
        if not handled.all():
            self.strays = int(np.count_nonzero(records["kind"][~handled] == EventKind.ACCESS))
            records, is_more = records[handled], is_more[handled]
            innermost = None if innermost is None else innermost[handled]
        kinds = records["kind"]
        is_access = kinds == EventKind.ACCESS
        calls = np.flatnonzero(~is_more)
        first = int(calls[0]) if len(calls) else len(records)
        grades = _grades(records, is_access, is_more)
        self.leading = int(np.count_nonzero(is_access[:first]))
        self.leading_grade = Grade(grades[:first].max(initial=0))
        following = _by_call(np.add, is_access, calls)
        self.kinds: list[int] = kinds[calls].tolist()
        self.grades: list[int] = _by_call(np.maximum, grades, calls)[
            kinds[calls] == EventKind.LAUNCH
        ].tolist()
        no_stack = (kinds == EventKind.LAUNCH) & (records["site"] == 0)
        self.launches_without_call_site = int(np.count_nonzero(no_stack))
        self.following: list[int] = following.tolist()
        self.rows: dict[int, Iterator[tuple[Any, ...]]] = {
            kind: _calls(records, innermost, (kinds == kind) & ~is_more, kind)
            for kind in map(EventKind, set(self.kinds))
        }
        accesses = view(records[is_access], EventKind.ACCESS)
        self.known = np.bincount(accesses["known"], minlength=max(Precision) + 1).tolist()
        self.accesses: Iterator[AccessRow] = zip(*_lists(accesses, ACCESS_FIELDS), strict=False)


def sorted_by_call(records: Records) -> Records:
    """Sort records by call, because threads write in any order; each access follows its call."""
    seqs = records["seq"]
    if np.all(seqs[1:] >= seqs[:-1]):
        return records
    return records[np.argsort(seqs, kind="stable")]


def _belongs_to_previous_call(records: Records) -> _Mask:
    """Mark the records that belong to the call before them: accesses, and the ``Accessed`` of launches."""
    kinds = records["kind"]
    is_more: _Mask = kinds == EventKind.ACCESS
    if len(accessed := np.flatnonzero(kinds == EventKind.ACCESSED)):
        is_more[accessed] = view(records[accessed], EventKind.ACCESSED)["node"] == 0
    return is_more


def _strays(records: Records, is_more: _Mask, last_seq: int) -> _Mask:
    """Mark the accesses that do not belong to the call before them."""
    seqs = np.append(records["seq"], np.uint64(last_seq))
    before = np.maximum.accumulate(np.where(is_more, -1, np.arange(len(records))))
    strays: _Mask = is_more & (seqs[:-1] != seqs[before])
    return strays


def _grades(records: Records, is_access: _Mask, is_more: _Mask) -> npt.NDArray[np.uint8]:
    """Return for each record the precision that it gives its launch."""
    grades = np.where(is_access, Grade.EXACT, Grade.UNKNOWN).astype(np.uint8)
    known = view(records, EventKind.ACCESS)["known"]
    grades[is_access & (known == Precision.SUMMARY)] = Grade.WHOLE_TENSOR
    grades[is_access & (known >= Precision.ASSUMED)] = Grade.ASSUMED
    if len(accessed := np.flatnonzero(is_more & ~is_access)):
        exact = view(records[accessed], EventKind.ACCESSED)["exact"]
        grades[accessed] = np.where(exact, Grade.EXACT, Grade.ASSUMED)
    return grades


def _by_call(
    reduction: np.ufunc, values: npt.NDArray[Any], calls: npt.NDArray[np.intp]
) -> npt.NDArray[Any]:
    """Reduce the values of each call and of the records after it."""
    if not len(calls):
        return values[:0]
    return reduction.reduceat(values.view(np.uint8), calls, dtype=np.int64)


def _calls(
    records: Records, innermost: OpenRanges | None, is_kind: _Mask, kind: EventKind
) -> Iterator[tuple[Any, ...]]:
    """Yield the call of each marked record, all of one kind, followed by its own fields."""
    records = view(records[is_kind], kind)
    named = kind in (EventKind.LAUNCH, EventKind.GRAPH_NODE)
    names = records["name"].tolist() if named else repeat(0)
    ranges = repeat(None) if innermost is None else innermost[is_kind].tolist()
    numbers = _lists(records, _CALL_FIELDS)
    calls = map(Call, records["seq"].tolist(), repeat(int(kind)), names, *numbers, ranges)
    return zip(calls, *_lists(records, FIELDS[kind]), strict=False)


def _lists(records: Records, names: tuple[str, ...]) -> list[Iterable[Any]]:
    """Return columns as Python numbers; a column of zeros becomes an endless iterator, which is faster."""
    columns = [records[name] for name in names]
    return [column.tolist() if column.any() else repeat(0) for column in columns]
