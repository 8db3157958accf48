"""Decode a batch of records column by column: the calls of each kind, and all accesses."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise, repeat
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.sanitize.clocks import Call
from cudakit.sanitize.races import LaunchPrecision
from cudakit.trace.kinds import EventKind, Precision
from cudakit.trace.layout import RECORD, RECORD_BYTES, Records, layout, take_records, view
from cudakit.trace.ranges import OpenRanges, RangeTracker

# For each event kind that the engine handles, the fields that its handler takes after the call, in order. The
# engine skips events of other kinds.
HANDLER_FIELDS: Final[dict[EventKind, tuple[str, ...]]] = {
    EventKind.ALLOC: ("address", "size_bytes", "allocation_kind", "layer"),
    EventKind.FREE: ("address", "size_bytes", "allocation_kind", "layer"),
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
    EventKind.HOST_CALL: ("phase", "event"),
    EventKind.CAPTURE_BEGIN: ("graph",),
    EventKind.CAPTURE_END: ("graph",),
    EventKind.GRAPH_NODE: ("graph", "node", "node_type"),
    EventKind.GRAPH_EDGE: ("graph", "before", "after"),
    EventKind.GRAPH_LAUNCH: ("graph", "executable"),
    EventKind.MEMOP: ("address", "flag"),
    EventKind.GAP: ("reason", "count"),
    EventKind.ARENAS: ("size_bytes",),
    EventKind.COMMUNICATOR: ("communicator", "rank", "rank_count", "hash"),
    EventKind.COLLECTIVE: (
        "send",
        "receive",
        "element_count",
        "communicator",
        "root",
        "graph",
        "node",
        "function",
        "datatype",
        "group",
    ),
}
# The bytes of consecutive records of one call. Records that are not accesses are skipped.
AccessRows: TypeAlias = memoryview
# The kind, lo, hi, mode, precision, stride_bytes, count and node in a record of an access.
_ACCESS_RECORD: Final = struct.Struct("<38xHQQBB6xqQI12x")
_Mask: TypeAlias = npt.NDArray[np.bool_]
_CALL_FIELDS: Final = ("stream", "context", "device", "thread", "site", "program_call")
_IS_HANDLED: Final = np.isin(
    np.arange(1 << 16), (EventKind.ACCESS, EventKind.ACCESSED, *HANDLER_FIELDS)
)
# Offset of the kind, with which the content begins that only records of a kind have.
_KIND_OFFSET: Final[int] = RECORD.fields["kind"][1]  # type: ignore[index]
_PRECISION_OFFSET: Final[int] = layout(EventKind.ACCESS).fields["precision"][1]  # type: ignore[index]


class RecordBatch:
    """Consecutive records of one trace, decoded.

    ``last_seq`` is the number of the call before the first record, to which the first accesses may belong.
    ``ranges`` follows the NVTX ranges of the trace.

    * ``kinds``: the event kind of each call.
    * ``leading_rows``, ``following_rows``: the access records before the first call, and after each call;
      None if there are none.
    * ``leading_precision``: the precision that the records before the first call give their launch.
    * ``stray_access_count``: the number of accesses whose call is missing.
    * ``launch_precisions``: the precision of each launch.
    * ``launches_without_call_site``: the number of launches whose call stack is unknown.
    * ``rows``: for each event kind, its calls, each followed by the fields of its body.
    * ``precision_counts``: the number of accesses of each precision.
    """

    def __init__(self, records: Records, last_seq: int, ranges: RangeTracker) -> None:
        innermost_ranges = ranges.follow(records)
        belongs_to_previous = (records["kind"] == EventKind.ACCESS) | (
            records["kind"] == EventKind.ACCESSED
        )
        is_stray = _find_stray_accesses(records, belongs_to_previous, last_seq)
        is_handled = _IS_HANDLED[records["kind"]] & ~is_stray
        self.stray_access_count = 0
        if not is_handled.all():
            self.stray_access_count = int(
                np.count_nonzero(records["kind"][~is_handled] == EventKind.ACCESS)
            )
            records, belongs_to_previous = (
                take_records(records, is_handled),
                belongs_to_previous[is_handled],
            )
            innermost_ranges = None if innermost_ranges is None else innermost_ranges[is_handled]
        kinds = records["kind"]
        is_access = kinds == EventKind.ACCESS
        call_indices = np.flatnonzero(~belongs_to_previous)
        first_call_index = int(call_indices[0]) if len(call_indices) else len(records)
        launch_precisions = _record_precisions(records, is_access, belongs_to_previous)
        self.leading_precision = LaunchPrecision(
            launch_precisions[:first_call_index].max(initial=0)
        )
        self.kinds: list[int] = kinds[call_indices].tolist()
        self.launch_precisions: list[int] = _reduce_by_call(
            np.maximum, launch_precisions, call_indices
        )[kinds[call_indices] == EventKind.LAUNCH].tolist()
        has_no_stack = (kinds == EventKind.LAUNCH) & (records["site"] == 0)
        self.launches_without_call_site = int(np.count_nonzero(has_no_stack))
        rows_of_calls = _access_rows(records, call_indices.tolist())
        self.leading_rows = next(rows_of_calls)
        self.following_rows = list(rows_of_calls)
        self.rows: dict[int, Iterator[tuple[Any, ...]]] = {
            kind: _calls(records, innermost_ranges, (kinds == kind) & ~belongs_to_previous, kind)
            for kind in map(EventKind, set(self.kinds))
        }
        self.precision_counts = count_precisions(records)


def access_fields(rows: AccessRows) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yield lo, hi, mode, precision, stride in bytes, and number of elements of each access."""
    for kind, *fields in _ACCESS_RECORD.iter_unpack(rows):
        if kind == EventKind.ACCESS:
            lo, hi, mode, precision, stride, element_count, _node = fields
            yield lo, hi, mode, precision, stride, element_count


def access_record(lo: int, hi: int, mode: int, precision: int, node: int) -> bytes:
    """Return the record of an access to contiguous bytes."""
    return _ACCESS_RECORD.pack(EventKind.ACCESS, lo, hi, mode, precision, 0, 0, node)


def without_common_fields(rows: AccessRows) -> bytes:
    """Return records with 0 in the fields that are common to all kinds, such as the number of the call."""
    record_bytes = np.array(rows, np.uint8).reshape(-1, RECORD_BYTES)
    record_bytes[:, :_KIND_OFFSET] = 0
    return record_bytes.tobytes()


def count_precisions(records: Records) -> list[int]:
    """Return the number of accesses of each precision."""
    precisions = view(records, EventKind.ACCESS)["precision"]
    precisions = precisions[records["kind"] == EventKind.ACCESS]
    counts: list[int] = np.bincount(precisions, minlength=max(Precision) + 1).tolist()
    return counts


def rows_by_node(rows: AccessRows) -> Iterator[tuple[int, bytes]]:
    """Yield each node of a graph that has accesses, with the records of its accesses in order."""
    records = np.frombuffer(rows, layout(EventKind.ACCESS))
    access_indices = np.flatnonzero(records["kind"] == EventKind.ACCESS)
    access_nodes = records["node"][access_indices]
    if len(access_nodes) == len(records) and (access_nodes == access_nodes[:1]).all():
        # The usual case for the accesses of a new node.
        yield from ((node, bytes(rows)) for node in access_nodes[:1].tolist())
        return
    node_order = np.argsort(access_nodes, kind="stable")
    sorted_bytes = take_records(records.view(RECORD), access_indices[node_order]).tobytes()
    sorted_nodes = access_nodes[node_order]
    node_begins = np.flatnonzero(np.diff(sorted_nodes, prepend=-1)).tolist()
    for begin, end in pairwise((*node_begins, len(sorted_nodes))):
        yield int(sorted_nodes[begin]), sorted_bytes[begin * RECORD_BYTES : end * RECORD_BYTES]


def exact_and_lost_nodes(rows: AccessRows) -> tuple[set[int], set[int]]:
    """Return the nodes whose accesses in a graph launch were all recorded, and those that lost some."""
    records = np.frombuffer(rows, RECORD)
    accessed = records.view(layout(EventKind.ACCESSED))[records["kind"] == EventKind.ACCESSED]
    is_exact = accessed["exact"] != 0
    return set(accessed["node"][is_exact].tolist()), set(accessed["node"][~is_exact].tolist())


def least_precise_access(rows: bytes) -> int:
    """Return the precision of the least precise of some accesses."""
    return max(rows[_PRECISION_OFFSET::RECORD_BYTES])


def _access_rows(records: Records, call_indices: list[int]) -> Iterator[AccessRows | None]:
    """Yield the records before the first call, then those between each call and the next call."""
    batch_bytes = np.ascontiguousarray(records).view(np.uint8).data
    row_begins = (0, *(index + 1 for index in call_indices))
    for begin, end in zip(row_begins, (*call_indices, len(records)), strict=True):
        if begin == end:
            yield None
        else:
            yield batch_bytes[begin * RECORD_BYTES : end * RECORD_BYTES]


def sorted_by_call(records: Records) -> Records:
    """Sort records by call, because threads write in any order; each access follows its call."""
    seqs = records["seq"]
    if np.all(seqs[1:] >= seqs[:-1]):
        return records
    return take_records(records, np.argsort(seqs, kind="stable"))


def _find_stray_accesses(records: Records, belongs_to_previous: _Mask, last_seq: int) -> _Mask:
    """Mark the accesses that do not belong to the call before them, because their own call is missing."""
    seqs = np.append(records["seq"], np.uint64(last_seq))
    call_indices = np.where(belongs_to_previous, -1, np.arange(len(records)))
    previous_call_indices = np.maximum.accumulate(call_indices)
    is_stray: _Mask = belongs_to_previous & (seqs[:-1] != seqs[previous_call_indices])
    return is_stray


def _record_precisions(
    records: Records, is_access: _Mask, belongs_to_previous: _Mask
) -> npt.NDArray[np.uint8]:
    """Return the precision of each record. The least precise record sets the precision of the launch."""
    launch_precisions = np.where(is_access, LaunchPrecision.EXACT, LaunchPrecision.UNKNOWN).astype(
        np.uint8
    )
    precisions = view(records, EventKind.ACCESS)["precision"]
    launch_precisions[is_access & (precisions == Precision.SUMMARY)] = LaunchPrecision.WHOLE_TENSOR
    launch_precisions[is_access & (precisions >= Precision.ASSUMED)] = LaunchPrecision.ASSUMED
    if len(accessed_indices := np.flatnonzero(belongs_to_previous & ~is_access)):
        accessed = view(records[accessed_indices], EventKind.ACCESSED)
        launch_precisions[accessed_indices] = np.select(
            [accessed["node"] != 0, accessed["exact"] != 0],
            [LaunchPrecision.UNKNOWN, LaunchPrecision.EXACT],
            LaunchPrecision.ASSUMED,
        )
    return launch_precisions


def _reduce_by_call(
    reduction: np.ufunc, record_values: npt.NDArray[Any], calls: npt.NDArray[np.intp]
) -> npt.NDArray[Any]:
    """Reduce the values of all records of a call to one value for each call."""
    if not len(calls):
        return record_values[:0]
    return reduction.reduceat(record_values.view(np.uint8), calls, dtype=np.int64)


def _calls(
    records: Records, innermost_ranges: OpenRanges | None, is_kind: _Mask, kind: EventKind
) -> Iterator[tuple[Any, ...]]:
    """Return the calls of one kind, each followed by the fields of its record's body."""
    records = view(records[is_kind], kind)
    has_kernel_name = kind in (EventKind.LAUNCH, EventKind.GRAPH_NODE, EventKind.COLLECTIVE)
    names = records["name"].tolist() if has_kernel_name else repeat(0)
    ranges = repeat(None) if innermost_ranges is None else innermost_ranges[is_kind].tolist()
    is_launch = kind in (EventKind.LAUNCH, EventKind.GRAPH_LAUNCH)
    template_ids = _columns(records, ("template_id",) if is_launch else ())
    call_columns = _columns(records, _CALL_FIELDS)
    seqs = records["seq"].tolist()
    calls = map(Call, seqs, repeat(int(kind)), names, *call_columns, ranges, *template_ids)
    return zip(calls, *_columns(records, HANDLER_FIELDS[kind]), strict=False)


def _columns(records: Records, names: tuple[str, ...]) -> list[Iterable[Any]]:
    """Return the fields as Python numbers; a column of zeros becomes an endless iterator, which is faster."""
    columns = [records[name] for name in names]
    return [column.tolist() if column.any() else repeat(0) for column in columns]
