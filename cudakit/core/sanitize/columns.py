"""Batches of records, read column by column: an iterator of calls for each kind, and one of accesses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.core.sanitize.calls import Call
from cudakit.trace.kinds import Kind, Known
from cudakit.trace.layout import Records, view

# The kinds that the engine knows, and which of their own fields it takes, in its order.
FIELDS: Final[dict[Kind, tuple[str, ...]]] = {
    Kind.ALLOC: ("address", "size_bytes", "how", "layer"),
    Kind.FREE: ("address", "size_bytes", "how", "layer"),
    Kind.LAUNCH: (),
    Kind.COPY: (
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
    Kind.FILL: ("address", "size_bytes", "rows", "pitch_bytes", "asynchronous"),
    Kind.STREAM_CREATE: ("flag",),
    Kind.STREAM_DESTROY: (),
    Kind.EVENT_RECORD: ("event",),
    Kind.STREAM_WAIT: ("event",),
    Kind.EVENT_SYNC: ("event",),
    Kind.EVENT_QUERY_OK: ("event",),
    Kind.STREAM_SYNC: (),
    Kind.STREAM_QUERY_OK: (),
    Kind.CONTEXT_SYNC: (),
    Kind.HOST_CALL: ("phase",),
    Kind.CAPTURE_BEGIN: ("graph",),
    Kind.CAPTURE_END: ("graph",),
    Kind.GRAPH_NODE: ("graph", "node", "work"),
    Kind.GRAPH_EDGE: ("graph", "before", "after"),
    Kind.GRAPH_LAUNCH: ("graph", "executable"),
    Kind.MEMOP: ("address", "flag"),
    Kind.GAP: ("what", "count"),
}
AccessRow: TypeAlias = tuple[int, int, int, int, int, int, int]
_ACCESS: Final = ("lo", "hi", "mode", "known", "stride_bytes", "count", "node")
_WHERE: Final = ("stream", "context", "device", "thread", "site")
_IS_KNOWN: Final = np.isin(np.arange(1 << 16), (Kind.ACCESS, *FIELDS))


class Batch:
    """Some records, which are in order; ``last_seq`` is the call before the first of them.

    ``kinds`` are those of the records that are no accesses, ``following`` how many accesses come behind
    each of them, ``leading`` how many before the first. ``strays`` is how many belong to no call before
    them, ``bare_launches`` of how many launches none was seen.
    """

    def __init__(self, records: Records, last_seq: int) -> None:
        known = _IS_KNOWN[records["kind"]] & ~_strays(records, last_seq)
        self.strays = 0
        if not known.all():
            self.strays = int(np.count_nonzero(records["kind"][~known] == Kind.ACCESS))
            records = records[known]
        kinds = records["kind"]
        is_access = kinds == Kind.ACCESS
        calls = np.flatnonzero(~is_access)
        ends = np.append(calls, len(records))
        self.leading = int(ends[0])
        following = np.diff(ends) - 1
        launches = kinds[calls] == Kind.LAUNCH
        self.launches = int(np.count_nonzero(launches))
        self.bare_launches = int(np.count_nonzero(launches & (following == 0)))
        self.kinds: list[int] = kinds[calls].tolist()
        self.following: list[int] = following.tolist()
        self.rows: dict[int, Iterator[tuple[Any, ...]]] = {
            kind: _calls(view(records[kinds == kind], kind), kind)
            for kind in map(Kind, set(self.kinds))
        }
        accesses = view(records[is_access], Kind.ACCESS)
        self.known = np.bincount(accesses["known"], minlength=max(Known) + 1).tolist()
        self.accesses: Iterator[AccessRow] = zip(*_lists(accesses, _ACCESS), strict=False)


def in_order(records: Records) -> Records:
    """Sort what several threads wrote: an access stands behind its call, and before later ones."""
    seqs = records["seq"]
    if np.all(seqs[1:] >= seqs[:-1]):
        return records
    return records[np.argsort(seqs, kind="stable")]


def _strays(records: Records, last_seq: int) -> npt.NDArray[np.bool_]:
    """Mark the accesses that are not of the same call as what is before them."""
    seqs = np.append(records["seq"], np.uint64(last_seq))
    is_access = records["kind"] == Kind.ACCESS
    before = np.maximum.accumulate(np.where(is_access, -1, np.arange(len(records))))
    strays: npt.NDArray[np.bool_] = is_access & (seqs[:-1] != seqs[before])
    return strays


def _calls(records: Records, kind: Kind) -> Iterator[tuple[Any, ...]]:
    """Yield the call of each record, and its own fields behind."""
    named = kind in (Kind.LAUNCH, Kind.GRAPH_NODE)
    names = records["name"].tolist() if named else repeat(0)
    calls = map(Call, records["seq"].tolist(), repeat(int(kind)), names, *_lists(records, _WHERE))
    return zip(calls, *_lists(records, FIELDS[kind]), strict=False)


def _lists(records: Records, names: tuple[str, ...]) -> list[Iterable[Any]]:
    """Return columns as plain numbers; one of nothing but zeros without an end, as that costs nothing."""
    columns = [records[name] for name in names]
    return [column.tolist() if column.any() else repeat(0) for column in columns]
