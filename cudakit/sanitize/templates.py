"""Insert the accesses of launches that were not recorded because a template has them, and check them.

A template consists of the accesses of an earlier launch, which the recorder compared with those of other
launches: ``recorder/exact/templates.h``. If a later launch has other pointers, each access moves
with the nearest pointer at or below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.sanitize.conflicts import Conflict, GraphAccesses
from cudakit.sanitize.ordering import (
    ASSUMED,
    ATOMIC,
    EXACT,
    WRITE,
    Call,
    Clock,
    ClockPosition,
    MemoryAccess,
)
from cudakit.sanitize.races import Confidence, Coverage
from cudakit.sanitize.records import AccessRows, count_precisions, without_common_fields
from cudakit.sanitize.shadow import AllocationAt, Shadow, StridedRange, strided_range
from cudakit.trace.kinds import EventKind, Precision, TemplateCheck
from cudakit.trace.trace_file import (
    RECORD,
    RECORD_BYTES,
    Records,
    concatenate_records,
    layout,
    take_records,
    view,
)

# Number of elements at equal distances from which accesses count as those of an array. The indices of a small
# gather may have equal distances by chance.
_MIN_ARRAY_ELEMENTS: Final = 16
UNKNOWN_TEMPLATE: Final = "launch whose template was not recorded"
# The recorder writes this gap: recorder/exact/templates.c.
OUTDATED_TEMPLATE: Final = (
    "launches whose template became outdated, on memory that unordered work uses as well"
)

# Number of bytes at the begin of a record that the accesses of a launch have in common with the launch: the
# fields before ``kind``, such as ``seq`` and ``stream``.
_CALL_BYTES: Final[int] = RECORD.fields["kind"][1]  # type: ignore[index]
_Addresses: TypeAlias = npt.NDArray[np.uint64]
_NO_POINTERS: Final = np.zeros(0, np.uint64)
_NO_RECORDS: Final = np.zeros(0, RECORD)


@dataclass(frozen=True)
class _Template:
    """The accesses of a launch, and its pointers in the order of the arguments.

    ``accesses`` has Access records, then Accessed records. No access contains a pointer behind its
    first byte. ``pointer_indices`` has the nearest pointer at or below each access. ``possible_modes`` has
    the index of each pointer through which another launch may access other bytes, and the mode of the access.
    The template of a graph launch has its records in ``graph_rows``, with 0 in their common fields, and no
    ``accesses``; other templates have None there.
    """

    accesses: Records
    pointers: _Addresses
    pointer_indices: npt.NDArray[np.intp]
    possible_modes: tuple[tuple[int, int], ...]
    graph_rows: bytes | None = None

    @cached_property
    def precision_counts(self) -> list[int]:
        """The number of accesses of each precision of the template of a graph launch."""
        return count_precisions(np.frombuffer(self.graph_rows or b"", RECORD))


class _Insertion(NamedTuple):
    """The accesses that replace the other records of the call of a launch."""

    launch_index: int  # index of the record of the launch
    call_end: int  # index after the last record of the call
    accesses: Records  # those of a template
    # Distance by which each access moves; None if the launch has the pointers of the template.
    distances: _Addresses | None


class TemplateAccesses:
    """The templates of one trace."""

    def __init__(self) -> None:
        self.unknown_count = 0  # number of launches whose template is unknown
        # Accesses to other bytes that the launches of the last ``insert`` may have made, by call.
        self.possible_accesses: dict[int, list[PossibleAccess]] = {}
        # The records of the accesses of the graph launches of the last ``insert`` that have a template, by
        # call. They are not inserted, because launches with the same template share them.
        self.graph_rows: dict[int, bytes] = {}
        # Pointer arguments of the kernel nodes of graphs, by graph and node.
        self._node_pointers: dict[int, dict[int, list[int]]] = {}
        self._templates: dict[int, _Template] = {}

    def insert(self, records: Records, coverage: Coverage) -> Records:
        """Insert the accesses of kernel launches with a template after each launch, and count the launches.

        ``records`` are in the order of their calls, and have all records of each call.
        """
        kinds = records["kind"]
        self.possible_accesses, self.graph_rows = {}, {}
        self._add_node_pointers(records, kinds)
        template_ids = _launch_field(records, "template_id")
        template_positions = np.flatnonzero((template_ids != 0) | (kinds == EventKind.TEMPLATE))
        if not len(template_positions):
            return records
        seqs = np.ascontiguousarray(records["seq"])
        template_seqs = seqs[template_positions]
        call_begins = np.searchsorted(seqs, template_seqs)
        call_ends = np.searchsorted(seqs, template_seqs, side="right")
        pointer_positions = np.flatnonzero(kinds == EventKind.TEMPLATE_POINTERS)
        pointer_rows = records[pointer_positions]
        columns = (
            template_positions,
            template_ids[template_positions],
            template_seqs,
            call_begins,
            call_ends,
            np.searchsorted(pointer_positions, template_positions),
            np.searchsorted(pointer_positions, call_ends),
            # Whether the template was checked next to unordered work; whether the launch may be unordered.
            _launch_field(records[template_positions], "is_checked") != 0,
            _launch_field(records[template_positions], "is_unordered") != 0,
        )
        insertions: list[_Insertion] = []
        for row in zip(*(column.tolist() for column in columns), strict=True):
            position, template_id, seq, call_begin, call_end, *of_launch = row
            row_begin, row_end, is_checked, is_unordered = of_launch
            if not template_id:
                self._apply_template_record(
                    records[position], records[call_begin:call_end], coverage
                )
                continue
            template = self._templates.get(template_id)
            pointers = _pointers_of(pointer_rows[row_begin:row_end])
            if template is None or (len(pointers) and len(pointers) != len(template.pointers)):
                self.unknown_count += 1
                insertions.append(_Insertion(position, call_end, _NO_RECORDS, None))
                continue
            coverage.launches_from_template += 1
            if template.graph_rows is not None:
                self.graph_rows[seq] = template.graph_rows
                coverage.count_accesses(template.precision_counts)
            distances = None
            if len(pointers):  # modulo 2^64
                distances = (pointers - template.pointers)[template.pointer_indices]
            insertions.append(_Insertion(position, call_end, template.accesses, distances))
            if template.possible_modes and not is_checked:
                bases = pointers if len(pointers) else template.pointers
                self.possible_accesses[seq] = [
                    PossibleAccess(int(bases[index]), mode, is_unordered)
                    for index, mode in template.possible_modes
                ]
        return _insert_accesses(records, insertions)

    def forget_graphs(self, destroyed_graphs: Records) -> None:
        """Free the pointers of graphs that are not launched any more; takes the GraphDestroy records.

        Their templates stay, because later graphs with the same nodes use them.
        """
        for graph in destroyed_graphs["graph"].tolist():
            self._node_pointers.pop(graph, None)

    def _apply_template_record(
        self, record: np.void, call_records: Records, coverage: Coverage
    ) -> None:
        """Apply a Template record: keep the accesses of its call, or forget one template or all of them."""
        template = view(np.array([record], RECORD), EventKind.TEMPLATE)[0]
        check_result = TemplateCheck(int(template["check"]))
        template_id = int(template["template_id"])
        if check_result is not TemplateCheck.NONE:
            coverage.template_checks += 1
            coverage.template_differences += check_result is TemplateCheck.DIFFERENT
        if template_id and call_records["kind"][0] == EventKind.TEMPLATE:
            self._templates.pop(template_id, None)
        elif template_id:
            self._templates[template_id] = _template_of_call(call_records, self._node_pointers)
        elif check_result is TemplateCheck.NONE:
            self._templates.clear()

    def _add_node_pointers(self, records: Records, kinds: npt.NDArray[np.uint16]) -> None:
        """Store the pointer arguments of kernel nodes that are added to graphs."""
        node_positions = np.flatnonzero(kinds == EventKind.GRAPH_NODE)
        if not len(node_positions):
            return
        accesses = view(records, EventKind.ACCESS)
        is_pointer = (kinds == EventKind.ACCESS) & (accesses["precision"] >= Precision.ASSUMED)
        is_pointer[: node_positions[0]] = False
        pointer_positions = np.flatnonzero(is_pointer)
        pointers = accesses[pointer_positions]
        # For each pointer, the index of the last node before it.
        node_indices = np.searchsorted(node_positions, pointer_positions) - 1
        nodes = view(records[node_positions], EventKind.GRAPH_NODE)
        nodes_of_pointers = nodes[node_indices]
        is_of_node = (pointers["seq"] == nodes_of_pointers["seq"]) & (
            pointers["node"] == nodes_of_pointers["node"]
        )
        addresses, node_indices = pointers["lo"][is_of_node].tolist(), node_indices[is_of_node]
        node_begins = np.flatnonzero(np.diff(node_indices, prepend=-1)).tolist()
        for begin, end in pairwise((*node_begins, len(addresses))):
            node = nodes[node_indices[begin]]
            pointers_by_node = self._node_pointers.setdefault(int(node["graph"]), {})
            pointers_by_node[int(node["node"])] = addresses[begin:end]


def _launch_field(records: Records, name: str) -> npt.NDArray[np.uint32]:
    """Return a field of each launch, and 0 for other records."""
    values = np.zeros(len(records), np.uint32)
    for kind in (EventKind.LAUNCH, EventKind.GRAPH_LAUNCH):
        is_kind = records["kind"] == kind
        values[is_kind] = view(records[is_kind], kind)[name]
    return values


def _insert_accesses(records: Records, insertions: Sequence[_Insertion]) -> Records:
    """Insert accesses after launches, whose other records are dropped, and drop Template records."""
    launch_indices = np.array([insertion.launch_index for insertion in insertions], np.intp)
    call_ends = np.array([insertion.call_end for insertion in insertions], np.intp)
    replacing_counts = np.zeros(
        len(records) + 1, np.intp
    )  # number of insertions that replace a record
    np.add.at(replacing_counts, launch_indices + 1, 1)
    np.subtract.at(replacing_counts, call_ends, 1)
    is_kept = np.cumsum(replacing_counts[:-1]) == 0
    is_kept &= records["kind"] != EventKind.TEMPLATE
    is_kept[launch_indices] = True

    inserted_arrays = {id(insertion.accesses): insertion.accesses for insertion in insertions}
    all_records = concatenate_records([records, *inserted_arrays.values()])
    array_ends = len(records) + np.cumsum([len(array) for array in inserted_arrays.values()])
    array_end_by_id = dict(zip(inserted_arrays, array_ends.tolist(), strict=True))
    inserted_counts, array_begins = np.zeros((2, len(records)), np.intp)
    inserted_counts[launch_indices] = [len(insertion.accesses) for insertion in insertions]
    array_begins[launch_indices] = [
        array_end_by_id[id(insertion.accesses)] - len(insertion.accesses)
        for insertion in insertions
    ]
    # Each result record stems from a record of the trace: it is that record, or inserted after it.
    result_counts = is_kept + inserted_counts
    result_begins = np.cumsum(result_counts) - result_counts
    origins = np.repeat(np.arange(len(records)), result_counts)
    offsets = np.arange(len(origins)) - result_begins[origins]
    is_inserted = offsets > 0
    indices = np.where(is_inserted, array_begins[origins] + offsets - 1, origins)
    results = take_records(all_records, indices)
    result_bytes, record_bytes = (
        np.ascontiguousarray(array).view(np.uint8).reshape(-1, RECORD_BYTES)[:, :_CALL_BYTES]
        for array in (results, records)
    )
    result_bytes[is_inserted] = record_bytes[origins[is_inserted]]
    _move_accesses(results, result_begins + 1, insertions)
    return results


def _move_accesses(
    results: Records, access_begins: npt.NDArray[np.intp], insertions: Sequence[_Insertion]
) -> None:
    """Move inserted accesses in place.

    ``access_begins`` has the index of the first inserted access of each launch, by the index of the launch.
    """
    moved_parts = [
        (int(access_begins[insertion.launch_index]), insertion.distances)
        for insertion in insertions
        if insertion.distances is not None
    ]
    if not moved_parts:
        return
    part_sizes = np.array([len(distances) for _, distances in moved_parts])
    part_begins = np.array([begin for begin, _ in moved_parts])
    part_ends = np.cumsum(part_sizes)
    indices = np.arange(part_ends[-1]) + np.repeat(part_begins - part_ends + part_sizes, part_sizes)
    all_distances = np.concatenate([distances for _, distances in moved_parts])
    accesses = results.view(layout(EventKind.ACCESS))
    for field in ("lo", "hi"):
        accesses[field][indices] += all_distances


def _pointers_of(call_records: Records) -> _Addresses:
    """Return the pointers among the arguments of a launch, from its TemplatePointers records."""
    if not len(call_records):
        return _NO_POINTERS
    is_pointers = call_records["kind"] == EventKind.TEMPLATE_POINTERS
    rows = view(call_records[is_pointers], EventKind.TEMPLATE_POINTERS)["pointers"]
    pointers: _Addresses = rows[rows != 0]
    return pointers


def _template_of_call(
    call_records: Records, node_pointers: Mapping[int, Mapping[int, list[int]]]
) -> _Template:
    """Return the template that consists of the recorded accesses of a launch.

    ``node_pointers`` has the pointer arguments of kernel nodes, by graph and node.
    """
    kinds = call_records["kind"]
    rows = call_records[kinds == EventKind.ACCESS]
    rows = rows[view(rows, EventKind.ACCESS)["precision"] < Precision.ASSUMED]
    pointers = _pointers_of(call_records)
    accessed_records = call_records[kinds == EventKind.ACCESSED]
    if kinds[0] == EventKind.GRAPH_LAUNCH:
        return _graph_template(call_records, rows, accessed_records, node_pointers)
    if not len(pointers):
        empty_indices = np.zeros(0, np.intp)
        return _Template(np.concatenate([rows, accessed_records]), pointers, empty_indices, ())
    rows, indices = _assign_to_pointers(rows, pointers)
    possible_modes = tuple(_possible_modes(rows, indices, pointers))
    return _Template(np.concatenate([rows, accessed_records]), pointers, indices, possible_modes)


def _graph_template(
    call_records: Records,
    rows: Records,
    accessed_records: Records,
    node_pointers: Mapping[int, Mapping[int, list[int]]],
) -> _Template:
    """Return the template of a graph launch, with the pointers of all accesses that the launch may make."""
    graph = int(view(call_records[:1], EventKind.GRAPH_LAUNCH)["graph"][0])
    pointers_by_node = node_pointers.get(graph, {})
    access_nodes = view(rows, EventKind.ACCESS)["node"]
    mode_by_pointer: dict[int, int] = {}
    for node in np.unique(access_nodes).tolist():
        pointers = np.array(pointers_by_node.get(node, ()), np.uint64)
        if len(pointers):
            node_rows, indices = _assign_to_pointers(rows[access_nodes == node], pointers)
            for index, mode in _possible_modes(node_rows, indices, pointers):
                pointer = int(pointers[index])
                mode_by_pointer[pointer] = mode_by_pointer.get(pointer, 0) | mode
    return _Template(
        _NO_RECORDS,
        np.array(list(mode_by_pointer), np.uint64),
        np.zeros(0, np.intp),
        tuple(enumerate(mode_by_pointer.values())),
        without_common_fields(memoryview(np.concatenate([rows, accessed_records]).tobytes())),
    )


def _assign_to_pointers(
    rows: Records, pointers: _Addresses
) -> tuple[Records, npt.NDArray[np.intp]]:
    """Split accesses at the pointers; return them with the index of the nearest pointer at or below each."""
    pointer_order = np.argsort(pointers)
    sorted_pointers = pointers[pointer_order]
    rows = _split_at_pointers(rows, sorted_pointers)
    access_begins = view(rows, EventKind.ACCESS)["lo"]
    nearest_indices = np.searchsorted(sorted_pointers, access_begins, side="right") - 1
    return rows, pointer_order[nearest_indices]


def _possible_modes(
    rows: Records, pointer_indices: npt.NDArray[np.intp], pointers: _Addresses
) -> Iterator[tuple[int, int]]:
    """Yield the pointers through which a kernel may access other bytes in another launch, with the mode.

    A kernel that accesses the elements of an array, as ``_are_those_of_array`` decides, accesses the same
    bytes in each launch. A pointer that the kernel did not use is ignored: it often is an old value in an
    unused part of a structure.
    """
    accesses = view(rows, EventKind.ACCESS)
    addresses, first_indices = np.unique(pointers, return_index=True)  # arguments may be equal
    for address, index in zip(addresses.tolist(), first_indices.tolist(), strict=True):
        accesses_through_pointer = accesses[pointers[pointer_indices] == address]
        is_used = len(accesses_through_pointer) > 0
        if is_used and not _are_those_of_array(accesses_through_pointer, address):
            yield index, int(np.bitwise_or.reduce(accesses_through_pointer["mode"]))


def _are_those_of_array(accesses: Records, begin: int) -> bool:
    """Return whether accesses are contiguous from ``begin`` on, or have elements at equal distances."""
    is_regular = (accesses["count"] == 0) | (accesses["count"] >= _MIN_ARRAY_ELEMENTS)
    if (is_regular & (accesses["lo"] == begin)).all():
        return True
    address_order = np.argsort(accesses["lo"])
    lo, hi = accesses["lo"][address_order], np.maximum.accumulate(accesses["hi"][address_order])
    is_contiguous = lo[0] == begin and (lo[1:] <= hi[:-1]).all()
    return bool(is_contiguous) and not accesses["count"].any()


def _split_at_pointers(rows: Records, sorted_pointers: _Addresses) -> Records:
    """Split accesses at the pointers that they contain."""
    row_parts: list[Records] = []
    for i in range(len(rows)):
        row = rows[i : i + 1]
        access = view(row, EventKind.ACCESS)[0]
        lo, hi, stride, count = (
            int(access[name]) for name in ("lo", "hi", "stride_bytes", "count")
        )
        inner_pointers = sorted_pointers[(sorted_pointers > lo) & (sorted_pointers < hi)].tolist()
        if inner_pointers:
            pieces = strided_range(lo, hi, stride, count)
            parts = list(_parts_between(pieces, inner_pointers))
            row = np.repeat(row, len(parts))
            accesses = row.view(layout(EventKind.ACCESS))
            for name, column in zip(
                ("lo", "hi", "stride_bytes", "count"), zip(*parts, strict=True), strict=True
            ):
                accesses[name] = column
        row_parts.append(row)
    return np.concatenate(row_parts) if row_parts else rows


def _parts_between(
    pieces: StridedRange, limits: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """Split pieces at ascending addresses; yield lo, hi, stride and count of each part."""
    lo, count = pieces.lo, pieces.row_count
    while count:
        end = lo + pieces.row_bytes
        limit = next((limit for limit in limits if limit > lo), pieces.hi)
        if limit < end:  # the address is inside the first piece
            bounds = (lo, *(inner for inner in limits if lo < inner < end), end)
            yield from ((part_lo, part_hi, 0, 0) for part_lo, part_hi in pairwise(bounds))
            complete_count = 1
        else:
            complete_count = min(count, (limit - end) // pieces.stride + 1)
            hi = end + (complete_count - 1) * pieces.stride
            is_strided = complete_count > 1
            yield (lo, hi, *((pieces.stride, complete_count) if is_strided else (0, 0)))
        lo, count = lo + complete_count * pieces.stride, count - complete_count


# --- Find work that may race with an earlier launch that was not recorded --------------------------
#
# A template is right as long as its kernel accesses the same bytes in each launch. A kernel that chooses
# addresses by the content of memory, such as a gather, may access other bytes in one launch. Its accesses
# begin at its pointer arguments, so they are between a pointer and the end of the allocation. The recorder
# orders a launch with all earlier work on these allocations before it uses a template. So only work that is
# enqueued later, and that is not ordered after the launch, may race with such an access: CheckedShadow finds
# it. A launch that could not be recorded, but is not ordered after earlier work, is also compared with that
# work.


class PossibleAccess(NamedTuple):
    """An access that a launch may have made: to any bytes from a pointer to the end of its allocation."""

    pointer: int
    mode: int  # value of an AccessMode
    is_unordered: bool = False  # whether the launch may not be ordered after earlier work


# The possible accesses of launches that were not recorded, by the number of the call.
PossibleAccesses: TypeAlias = Mapping[int, Sequence[PossibleAccess]]


class CheckedShadow:
    """A shadow memory that also checks each access against launches that were not recorded.

    Only the last of these launches are kept, by the slot of their stream and the bytes they may access.
    """

    def __init__(self, stored: Shadow, on_conflict: Callable[[Conflict], None]) -> None:
        self.stored = stored
        self._on_conflict = on_conflict
        # By pointer and mode: an access that the last launch may have made to the bytes behind the pointer.
        self._possible_by_slot: dict[int, dict[tuple[int, int], MemoryAccess]] = {}
        self._last_tick_by_slot: dict[int, int] = {}  # tick of the last launch of each slot

    @property
    def possible_count(self) -> int:
        """The number of possible accesses that are kept."""
        return sum(map(len, self._possible_by_slot.values()))

    def add(
        self, access: MemoryAccess, clock: Clock, stride: int = 0, element_count: int = 0
    ) -> None:
        """Check an access for races, and store it. An access with several elements is strided."""
        if self._last_tick_by_slot:
            self._check(access, clock, stride, element_count)
        self.stored.add(access, clock, stride, element_count)

    def add_free(self, access: MemoryAccess, clock: Clock) -> None:
        """Check and store a stream-ordered free. Each later access to the bytes is a race."""
        self._check(access, clock)
        self.stored.add_free(access, clock)

    def add_all(self, rows: AccessRows, call: Call, position: ClockPosition) -> None:
        """Check and store the accesses of a launch."""
        if self._last_tick_by_slot:
            self._check_rows(rows, call, position)
        self.stored.add_all(rows, call, position)

    def add_graph_launch(
        self, accesses: GraphAccesses, launch: Call, position: ClockPosition
    ) -> None:
        """Check and store the accesses of a graph launch."""
        if any(tick > position.clock[slot] for slot, tick in self._last_tick_by_slot.items()):
            for call, rows in accesses.calls_in_launch(launch):
                self._check_rows(rows, call, position)
        self.stored.checker.node_order = accesses.order
        self.stored.add_graph_launch(accesses, launch, position)

    def add_unrecorded(
        self,
        call: Call,
        position: ClockPosition,
        accesses: Sequence[PossibleAccess],
        allocation_at: AllocationAt,
    ) -> None:
        """Add a launch that was not recorded; check it first if it may not be ordered after earlier work.

        ``allocation_at`` returns the allocation or pool block that contains an address.
        """
        for pointer, mode, is_unordered in accesses:
            if not (allocation := allocation_at(pointer)):
                continue
            slot, hi = position.slot, allocation.address + allocation.size_bytes
            possible = MemoryAccess(slot, position.tick, call, pointer, hi, mode, ASSUMED)
            if is_unordered:
                for earlier in self.stored.find_unordered(pointer, hi, mode, position.clock):
                    if earlier.precision < ASSUMED and earlier.call.seq != call.seq:
                        self._report(earlier, possible)
            self._possible_by_slot.setdefault(slot, {})[pointer, mode] = possible
            self._last_tick_by_slot[slot] = position.tick

    def clear(self, lo: int, hi: int) -> None:
        """Remove all accesses to the bytes from ``lo`` up to ``hi``, which were freed."""
        for accesses in self._possible_by_slot.values():
            for key in [key for key in accesses if lo <= key[0] < hi]:
                del accesses[key]
        self.stored.clear(lo, hi)

    def prune(self, past_clock: Clock) -> None:
        """Remove the accesses that all future work happens after."""
        self.stored.prune(past_clock)
        remaining_by_slot = {
            slot: {
                key: access for key, access in accesses.items() if access.tick > past_clock[slot]
            }
            for slot, accesses in self._possible_by_slot.items()
        }
        self._possible_by_slot = {
            slot: accesses for slot, accesses in remaining_by_slot.items() if accesses
        }
        self._last_tick_by_slot = {
            slot: self._last_tick_by_slot[slot] for slot in self._possible_by_slot
        }

    def _check(
        self, access: MemoryAccess, clock: Clock, stride: int = 0, element_count: int = 0
    ) -> None:
        unordered = self._unordered(clock)
        if unordered and access.precision < ASSUMED and access.lo < access.hi:
            rows = strided_range(access.lo, access.hi, stride, element_count)
            for possible in unordered:
                if _modes_conflict(access.mode, possible.mode) and rows.overlap_with_bounds(
                    possible.lo, possible.hi
                ):
                    self._report(possible, access)

    def _check_rows(self, rows: AccessRows, call: Call, position: ClockPosition) -> None:
        unordered = self._unordered(position.clock)
        if not unordered:
            return
        records = np.frombuffer(rows, RECORD)
        accesses = view(records[records["kind"] == EventKind.ACCESS], EventKind.ACCESS)
        accesses = accesses[(accesses["precision"] < ASSUMED) & (accesses["lo"] < accesses["hi"])]
        for possible in unordered:
            if (row := _first_conflict(accesses, possible)) is not None:
                lo, hi, mode = int(row["lo"]), int(row["hi"]), int(row["mode"])
                access = MemoryAccess(position.slot, position.tick, call, lo, hi, mode, EXACT)
                self._report(possible, access)

    def _unordered(self, clock: Clock) -> list[MemoryAccess]:
        """List the possible accesses of launches that do not happen before work with this clock."""
        return [
            possible
            for slot, last_tick in self._last_tick_by_slot.items()
            if last_tick > clock[slot]
            for possible in self._possible_by_slot[slot].values()
            if possible.tick > clock[slot]
        ]

    def _report(self, previous: MemoryAccess, current: MemoryAccess) -> None:
        lo, hi = max(previous.lo, current.lo), min(previous.hi, current.hi)
        self._on_conflict(Conflict(previous, current, lo, hi, Confidence.POSSIBLE, False))


def _modes_conflict(mode: int, other_mode: int) -> bool:
    """Return whether two accesses to the same bytes conflict: not two reads, and not two atomic accesses."""
    return bool((mode | other_mode) & WRITE) and not mode & other_mode & ATOMIC


def _first_conflict(accesses: npt.NDArray[np.void], possible: MemoryAccess) -> np.void | None:
    """Return the first of several accesses that shares bytes with a possible one, or None."""
    row: np.void
    for row in accesses[(accesses["lo"] < possible.hi) & (accesses["hi"] > possible.lo)]:
        lo, hi, stride, count, mode = (
            int(row[name]) for name in ("lo", "hi", "stride_bytes", "count", "mode")
        )
        if _modes_conflict(mode, possible.mode) and strided_range(
            lo, hi, stride, count
        ).overlap_with_bounds(possible.lo, possible.hi):
            return row
    return None
