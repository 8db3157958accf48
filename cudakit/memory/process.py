"""The memory of one process, computed from its trace: driver allocations, and the blocks of pools in them.

A segment is memory that was allocated from the driver. A block is a part of a segment that a pool, such as
CuPy's, returned to the program.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from cudakit.memory.snapshot import DRIVER, HOST, MANAGED
from cudakit.stacks import Stack
from cudakit.trace.kinds import LIBRARY_DOMAINS, AllocationKind, AllocationLayer, EventKind
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import Records, view

Action: TypeAlias = Literal[
    "oom", "segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"
]

# Sizes are rounded up to this multiple, as by CuPy (ALLOCATION_UNIT_SIZE) and PyTorch (kMinBlockSize).
_ROUNDING_BYTES = 512


class BlockInUse(NamedTuple):
    """A block of a pool that is in use."""

    size_bytes: int
    requested_bytes: int
    pool: str
    stack: Stack


@dataclass(slots=True, eq=False)
class Segment:
    """A driver allocation that exists from ``begin_ns`` until ``end_ns``, which is None while in use."""

    device: int
    address: int
    size_bytes: int
    requested_bytes: int
    stream: int
    stack: Stack
    begin_ns: int
    pool: str = DRIVER
    # Whether the driver allocation was recorded. False if only a block of a pool in this memory was recorded.
    is_recorded: bool = True
    end_ns: int | None = None
    blocks: dict[int, BlockInUse] = field(default_factory=dict)  # blocks in use by address

    @property
    def end(self) -> int:
        """The first address after the segment."""
        return self.address + self.size_bytes

    @property
    def is_undivided(self) -> bool:
        """Whether no pool divides the segment into blocks: the program uses all of it."""
        return self.pool in (DRIVER, MANAGED)


class Entry(NamedTuple):
    """One event of the trace of a snapshot."""

    action: Action
    address: int  # address of the memory; for "oom", the free bytes of the device
    size_bytes: int
    time_ns: int
    stack: Stack
    segment: Segment
    # Whether the event treats the segment as one block. Such an event is dropped if a pool later divides the
    # segment.
    is_segment_as_block: bool = False


class MemoryModel:
    """The segments and blocks of one process, and the last ``max_entries`` events of each device."""

    def __init__(self, *, max_entries: int) -> None:
        self.max_entries = max_entries
        self.entries: dict[int, deque[Entry]] = {}
        self.overflowed_devices: set[int] = set()  # devices whose oldest events were dropped
        self._segments: dict[int, Segment] = {}  # segments in use by address
        self._addresses: list[int] = []  # addresses of the segments in use, ascending

    @property
    def segments(self) -> Iterable[Segment]:
        """The segments in use, by address."""
        return (self._segments[address] for address in self._addresses)

    @property
    def is_empty(self) -> bool:
        """Whether no memory was ever allocated."""
        return not self.entries and not self._segments

    def forget_entries(self) -> None:
        """Drop all recorded events; the segments and blocks in use stay."""
        self.entries.clear()
        self.overflowed_devices.clear()

    # --- allocations from the driver

    def driver_alloc(
        self,
        *,
        device: int,
        address: int,
        size_bytes: int,
        kind: AllocationKind,
        pool: str,
        stream: int,
        stack: Stack,
        time_ns: int,
    ) -> None:
        """Add a driver allocation; ``pool`` is the pool that made the allocation, "" if unknown."""
        self._add_segment(
            Segment(
                device=HOST if kind is AllocationKind.PINNED else device,
                address=address,
                size_bytes=_rounded_size(size_bytes),
                requested_bytes=size_bytes,
                stream=stream,
                stack=stack,
                begin_ns=time_ns,
                pool=pool or (MANAGED if kind is AllocationKind.MANAGED else DRIVER),
            )
        )

    def driver_free(self, *, address: int, stack: Stack, time_ns: int) -> None:
        """Remove a driver allocation; an address without a recorded allocation is ignored."""
        if address in self._segments:
            self._remove_segment(self._segments[address], stack, time_ns)

    # --- blocks of pools

    def pool_alloc(
        self,
        *,
        device: int,
        address: int,
        size_bytes: int,
        requested_bytes: int,
        pool: str,
        stack: Stack,
        time_ns: int,
    ) -> None:
        """Add a block of a pool, unless a block of another pool has the same address.

        For example, both Numba and RMM report a block that Numba allocates from RMM.
        """
        rounded_bytes, requested_bytes = _rounded_size(size_bytes), requested_bytes or size_bytes
        segment = self._segment_at(address)
        if segment is None:
            segment = Segment(
                device=device,
                address=address,
                size_bytes=rounded_bytes,
                requested_bytes=requested_bytes,
                stream=0,
                stack=stack,
                begin_ns=time_ns,
                pool=pool,
                is_recorded=False,
            )
            self._add_segment(segment)
        if address in segment.blocks:
            if segment.blocks[address].pool != pool:
                return
            # The free of the earlier block was not recorded.
            self._free_block(segment, address, stack, time_ns)
        segment.pool = pool
        block_bytes = min(rounded_bytes, segment.end - address)
        segment.blocks[address] = BlockInUse(block_bytes, requested_bytes, pool, stack)
        self._append(Entry("alloc", address, requested_bytes, time_ns, stack, segment))

    def pool_free(self, *, address: int, pool: str, stack: Stack, time_ns: int) -> None:
        """Remove a block of a pool; an unrecorded block or a block of another pool is ignored."""
        segment = self._segment_at(address)
        if segment is None or address not in segment.blocks or segment.blocks[address].pool != pool:
            return
        self._free_block(segment, address, stack, time_ns)
        if not segment.is_recorded and not segment.blocks:
            self._remove_segment(segment, stack, time_ns)

    def out_of_memory(
        self,
        *,
        device: int,
        size_bytes: int,
        free_bytes: int,
        pool: str,
        stack: Stack,
        time_ns: int,
    ) -> None:
        """Add a failed allocation of a pool; ``free_bytes`` is the free memory of the device."""
        no_segment = Segment(
            device=device,
            address=0,
            size_bytes=0,
            requested_bytes=0,
            stream=0,
            stack=stack,
            begin_ns=time_ns,
            pool=pool,
        )
        self._append(Entry("oom", free_bytes, size_bytes, time_ns, stack, no_segment))

    def replace_blocks(
        self, pool: str, blocks: Mapping[tuple[int, int], tuple[int, Stack]], time_ns: int
    ) -> None:
        """Replace all blocks of a pool that has no history.

        ``blocks`` maps (device, address) to the size in bytes and the call stack.
        """
        for segment in list(self.segments):
            for address, block in list(segment.blocks.items()):
                new_block = blocks.get((segment.device, address))
                if block.pool == pool and new_block != (block.requested_bytes, block.stack):
                    self.pool_free(address=address, pool=pool, stack=(), time_ns=time_ns)
        for (device, address), (size_bytes, stack) in blocks.items():
            existing_segment = self._segment_at(address)
            if existing_segment is None or address not in existing_segment.blocks:
                self.pool_alloc(
                    device=device,
                    address=address,
                    size_bytes=size_bytes,
                    requested_bytes=size_bytes,
                    pool=pool,
                    stack=stack,
                    time_ns=time_ns,
                )

    # --- segments

    def _segment_at(self, address: int) -> Segment | None:
        index = bisect_right(self._addresses, address) - 1
        segment = self._segments[self._addresses[index]] if index >= 0 else None
        return segment if segment and address < segment.end else None

    def _add_segment(self, segment: Segment) -> None:
        first_index = max(bisect_right(self._addresses, segment.address) - 1, 0)
        end_index = bisect_right(self._addresses, segment.end - 1)
        for earlier in [self._segments[key] for key in self._addresses[first_index:end_index]]:
            if earlier.end > segment.address:  # its free was not recorded
                self._remove_segment(earlier, (), segment.begin_ns)
        address, stack, time_ns = segment.address, segment.stack, segment.begin_ns
        self._segments[address] = segment
        insort(self._addresses, address)
        requested_bytes = segment.requested_bytes
        self._append(
            Entry("segment_alloc", address, segment.size_bytes, time_ns, stack, segment),
            Entry("alloc", address, requested_bytes, time_ns, stack, segment, True),
        )

    def _remove_segment(self, segment: Segment, stack: Stack, time_ns: int) -> None:
        for address in list(segment.blocks):
            self._free_block(segment, address, stack, time_ns)
        address, requested_bytes = segment.address, segment.requested_bytes
        self._append(
            Entry("free_requested", address, requested_bytes, time_ns, stack, segment, True),
            Entry("free_completed", address, requested_bytes, time_ns, stack, segment, True),
            Entry("segment_free", address, segment.size_bytes, time_ns, stack, segment),
        )
        segment.end_ns = time_ns
        del self._segments[address]
        del self._addresses[bisect_right(self._addresses, address) - 1]

    def _free_block(self, segment: Segment, address: int, stack: Stack, time_ns: int) -> None:
        requested_bytes = segment.blocks.pop(address).requested_bytes
        self._append(
            Entry("free_requested", address, requested_bytes, time_ns, stack, segment),
            Entry("free_completed", address, requested_bytes, time_ns, stack, segment),
        )

    def _append(self, *entries: Entry) -> None:
        device = entries[0].segment.device
        kept_entries = self.entries.setdefault(device, deque(maxlen=self.max_entries))
        if len(kept_entries) + len(entries) > self.max_entries:
            self.overflowed_devices.add(device)
        kept_entries += entries


def _rounded_size(size_bytes: int) -> int:
    return -(-size_bytes // _ROUNDING_BYTES) * _ROUNDING_BYTES


# --- Collect the memory of one process from the batches of its trace -------------------------------

# Number of events that are kept for each device; the agent sets the same limit for PyTorch's history.
MAX_EVENTS = 200_000
_MAX_RANGES = 100_000  # number of ranges, and of marks, that are kept for each process

# Fields of trace records that this module does not read.
_UNUSED_FIELDS = ("seq", "context", "kind")

# The NVTX domain of the ranges and marks that cudakit itself records.
OWN_DOMAIN = "cudakit"
BACKWARD_RANGE = "backward pass"
# The name of the mark at the moment of the final snapshot. Frees after the mark are part of process exit.
END_MARK = "end of the program"

# Kinds of trace records that change the memory, and all kinds that are read: also NVTX ranges and marks.
_MEMORY_KINDS = (EventKind.ALLOC, EventKind.FREE, EventKind.OUT_OF_MEMORY)
_READ_KINDS = (*_MEMORY_KINDS, EventKind.RANGE_PUSH, EventKind.RANGE_POP, EventKind.MARK)


@dataclass(slots=True)
class NamedRange:
    """An NVTX range of a thread or process; ``end_ns`` is None until the range ends."""

    name: str
    domain: str
    stack: Stack
    begin_ns: int
    end_ns: int | None = None

    @property
    def is_backward_pass(self) -> bool:
        """Whether cudakit recorded this range for a backward pass of PyTorch."""
        return self.domain == OWN_DOMAIN and self.name == BACKWARD_RANGE


@dataclass(frozen=True, slots=True)
class NamedMark:
    """An NVTX mark: a named point in time."""

    name: str
    time_ns: int


@dataclass(slots=True)
class ProcessMemory:
    """The memory of one process, and its named ranges and marks.

    ``has_ended`` is True after the mark at the moment of the final snapshot; later records are ignored.
    """

    model: MemoryModel = field(default_factory=lambda: MemoryModel(max_entries=MAX_EVENTS))
    ranges: deque[NamedRange] = field(default_factory=lambda: deque(maxlen=_MAX_RANGES))
    marks: deque[NamedMark] = field(default_factory=lambda: deque(maxlen=_MAX_RANGES))
    has_ended: bool = False
    has_run_out_of_memory: bool = False
    # Function that is called when a pool first runs out of memory, before later records are applied.
    on_out_of_memory: Callable[[], None] = field(default=lambda: None)
    # Open ranges, outermost first. The key is (thread, domain), or the number of a range of the process.
    _open_ranges: dict[tuple[int, str] | int, list[NamedRange]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether no memory and no range was recorded."""
        return self.model.is_empty and not self.ranges

    def forget_ended_ranges(self) -> None:
        """Forget the marks, and the ranges that have ended, because a new recording begins."""
        open_ranges = [open_range for ranges in self._open_ranges.values() for open_range in ranges]
        self.ranges.clear()
        self.marks.clear()
        self.ranges += sorted(open_ranges, key=lambda open_range: open_range.begin_ns)

    def feed(self, batch: Batch) -> None:
        """Apply the records of a batch."""
        records = batch.records[np.isin(batch.records["kind"], _READ_KINDS)]
        kinds = records["kind"].tolist()
        rows_by_kind = {kind: iter(_rows_of_kind(records, kind)) for kind in set(kinds)}
        for kind in kinds:
            if self.has_ended:
                return
            fields = next(rows_by_kind[kind])
            site = fields["site"]
            # Only a damaged trace refers to a missing call stack.
            stack = batch.stacks[site] if site < len(batch.stacks) else ()
            if kind in _MEMORY_KINDS:
                self._apply_memory(kind, fields, stack, batch.strings)
            else:
                self._apply_range(EventKind(kind), fields, stack, batch.strings)

    def _apply_memory(
        self, kind: int, fields: Mapping[str, int], stack: Stack, strings: Sequence[str]
    ) -> None:
        model, time_ns = self.model, fields["time_ns"]
        is_block = fields.get("layer") == AllocationLayer.POOL
        if kind == EventKind.FREE and not is_block:
            model.driver_free(address=fields["address"], stack=stack, time_ns=time_ns)
            return
        pool = strings[fields["pool"]]
        if kind == EventKind.OUT_OF_MEMORY:
            model.out_of_memory(
                device=fields["device"],
                size_bytes=fields["size_bytes"],
                free_bytes=fields["free_bytes"],
                pool=pool,
                stack=stack,
                time_ns=time_ns,
            )
            if not self.has_run_out_of_memory:
                self.has_run_out_of_memory = True
                self.on_out_of_memory()
        elif kind == EventKind.FREE:
            address = fields["address"]
            model.pool_free(address=address, pool=pool, stack=stack, time_ns=time_ns)
        elif is_block:
            model.pool_alloc(
                device=fields["device"],
                address=fields["address"],
                size_bytes=fields["size_bytes"],
                requested_bytes=fields["requested_bytes"],
                pool=pool,
                stack=stack,
                time_ns=time_ns,
            )
        else:
            model.driver_alloc(
                device=fields["device"],
                address=fields["address"],
                size_bytes=fields["size_bytes"],
                kind=AllocationKind(fields["allocation_kind"]),
                pool=pool,
                stream=fields["stream"],
                stack=stack,
                time_ns=time_ns,
            )

    def _apply_range(
        self, kind: EventKind, fields: Mapping[str, int], stack: Stack, strings: Sequence[str]
    ) -> None:
        domain, time_ns = strings[fields["domain"]], fields["time_ns"]
        if kind == EventKind.MARK:
            if domain == OWN_DOMAIN:
                self.has_ended = strings[fields["name"]] == END_MARK
            elif domain not in LIBRARY_DOMAINS:
                self.marks.append(NamedMark(strings[fields["name"]], time_ns))
            return
        # Autograd's threads have copies of the ranges of the thread that called ``backward()``.
        if fields.get("is_copy") or domain in LIBRARY_DOMAINS:
            return
        range_number = fields.get("number", 0)
        # Ranges of a thread nest by domain; a range of the process nests in no other range.
        nesting_key = range_number or (fields["thread"], domain)
        open_ranges = self._open_ranges.setdefault(nesting_key, [])
        if kind == EventKind.RANGE_PUSH:
            new_range = NamedRange(strings[fields["name"]], domain, stack, time_ns)
            open_ranges.append(new_range)
            self.ranges.append(new_range)
        elif kind == EventKind.RANGE_POP and open_ranges:
            open_ranges.pop().end_ns = time_ns
            if not open_ranges:
                del self._open_ranges[nesting_key]


def _rows_of_kind(records: Records, kind: int) -> list[dict[str, int]]:
    """Return a dictionary of the used fields of each record of one kind, in the order of the records."""
    rows = view(records[records["kind"] == kind], EventKind(kind))
    field_names = [name for name in rows.dtype.names or () if name not in _UNUSED_FIELDS]
    columns = [rows[name].tolist() for name in field_names]
    return [
        dict(zip(field_names, row_values, strict=True)) for row_values in zip(*columns, strict=True)
    ]
