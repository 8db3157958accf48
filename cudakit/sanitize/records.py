"""Bring the records of a trace in the order of their calls, and decode them column by column."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise, repeat
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.sanitize.ordering import Call
from cudakit.sanitize.races import LaunchPrecision
from cudakit.trace.kinds import EventKind, Precision
from cudakit.trace.names import OpenRanges, RangeTracker
from cudakit.trace.trace_file import (
    RECORD,
    RECORD_BYTES,
    Records,
    concatenate_records,
    layout,
    take_records,
    view,
)

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
        kinds = records["kind"]
        belongs_to_previous = (kinds == EventKind.ACCESS) | (kinds == EventKind.ACCESSED)
        # Accesses do not belong to the call before them if their own call is missing.
        seqs = np.append(records["seq"], np.uint64(last_seq))
        call_indices = np.where(belongs_to_previous, -1, np.arange(len(records)))
        previous_call_indices = np.maximum.accumulate(call_indices)
        is_stray = belongs_to_previous & (seqs[:-1] != seqs[previous_call_indices])
        is_handled = _IS_HANDLED[kinds] & ~is_stray
        self.stray_access_count = int(np.count_nonzero(kinds[~is_handled] == EventKind.ACCESS))
        if not is_handled.all():
            records = take_records(records, is_handled)
            belongs_to_previous = belongs_to_previous[is_handled]
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
        # An empty list of indices is refused by reduceat.
        precision_by_call = (
            np.maximum.reduceat(launch_precisions, call_indices)
            if len(call_indices)
            else call_indices
        )
        is_launch = kinds[call_indices] == EventKind.LAUNCH
        self.launch_precisions: list[int] = precision_by_call[is_launch].tolist()
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


# --- Reorder records by their calls, because the exact accesses of a launch are recorded late ------
#
# The recorder reads the accesses of a kernel back after the host has waited for the kernel. Until then the
# launch is *pending*, and no later record can be analyzed. A launch that the recorder delays is pending, too.

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


class _SortedRecords(NamedTuple):
    """Records sorted by call, and the numbers of their calls as a contiguous array for binary search."""

    records: Records
    seqs: _CallNumbers

    def count_before(self, seq: int | None) -> int:
        """Return the number of records before a call, or of all records without a call."""
        return len(self.seqs) if seq is None else int(np.searchsorted(self.seqs, np.uint64(seq)))


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
        # All launches before this call were given up, or are complete.
        self._given_up_before_seq = 0
        # Sorted runs of held records, in order of arrival.
        self._sorted_runs: list[_SortedRecords] = []

    @property
    def held_count(self) -> int:
        """The number of records in the buffer."""
        return sum(len(sorted_run.seqs) for sorted_run in self._sorted_runs)

    def feed(self, records: Records) -> Records:
        """Add the next records of the trace; return all held records before the first pending launch."""
        kinds = records["kind"]
        is_end = kinds == EventKind.ACCESSED
        is_delay = kinds == EventKind.LAUNCH_DELAYED
        is_end[is_delay] = ~view(records[is_delay], EventKind.LAUNCH_DELAYED)["pending"]
        has_pending = False
        for kind in _PENDING_KINDS:
            missing_counts = view(records, kind)["pending"]
            indices = np.flatnonzero((kinds == kind) & (missing_counts != 0))
            if len(indices):
                has_pending = True
                self._pending.add(records["seq"][indices], missing_counts[indices].astype(np.int64))
        if not (self._sorted_runs or has_pending or is_end.any()):
            return self._drop_late_accesses(records)
        self._pending.subtract(records["seq"][is_end])
        self._hold_records(self._drop_late_accesses(records))
        first_call = self._pending.first_call
        if first_call is not None:
            waiting_count = self.held_count - sum(
                sorted_run.count_before(first_call) for sorted_run in self._sorted_runs
            )
            if waiting_count > self._max_held:
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
        complete_records: list[Records] = []
        remaining_runs: list[_SortedRecords] = []
        for sorted_run in self._sorted_runs:
            records, seqs = sorted_run
            end = sorted_run.count_before(first_call)
            if end:
                complete_records.append(records[:end])
            if end < len(seqs):
                remaining_runs.append(_SortedRecords(records[end:], seqs[end:]))
        self._sorted_runs = remaining_runs
        if not complete_records:
            return np.zeros(0, RECORD)
        ordered_records = sorted_by_call(concatenate_records(complete_records))
        is_delay = ordered_records["kind"] == EventKind.LAUNCH_DELAYED
        if is_delay.any():
            ordered_records = take_records(ordered_records, ~is_delay)
        return _drop_superseded_accesses(ordered_records)


def reorder_records(records: Records) -> tuple[Records, int]:
    """Return the records of a trace in order of their calls, and the number of launches without accesses."""
    buffer = ReorderBuffer(max_held=len(records))
    ordered_records = concatenate_records([buffer.feed(records), buffer.flush()])
    return ordered_records, buffer.never_read_count


def _sorted_run(records: Records) -> _SortedRecords:
    ordered_records = sorted_by_call(records)
    return _SortedRecords(ordered_records, np.ascontiguousarray(ordered_records["seq"]))


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
