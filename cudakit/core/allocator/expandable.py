"""Expandable segments: how free blocks are chosen, memory mapped and given back page by page.

Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (get_free_block, find_expandable_block,
try_allocate_expandable_block, map_block, release_blocks, unmap_block).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import merge
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from cudakit.core.allocator.block import Block, Trail
from cudakit.core.allocator.growing import Growing, Unmapped, room_of
from cudakit.core.allocator.mapping import Reservation
from cudakit.core.allocator.pages import VirtualMemory
from cudakit.core.allocator.pools import Entry, Pool
from cudakit.core.allocator.tracing import SEGMENT_MAP, SEGMENT_UNMAP
from cudakit.core.allocator.upstream import Paged, Upstream
from cudakit.errors import CudaError, Unsupported
from cudakit.torch_rules.setting_rules import FULL_RESERVE, Reserve
from cudakit.torch_rules.sizes import SMALL_SEGMENT, SMALLEST_BLOCK
from cudakit.units import format_bytes

if TYPE_CHECKING:
    from cudakit.core.allocator.cache import Cache, Request

# CUDA_ERROR_OUT_OF_MEMORY (CUDA Driver API, CUresult).
_OUT_OF_MEMORY = 2
_FULL = Reserve(value=FULL_RESERVE)


class Expandable:
    """The expandable segments of a cache.

    ``classes`` are those of streams, by which the addresses are chosen that a segment has. Whatever a call of
    the driver raises, what was mapped by then stays, free or in use.
    """

    classes: Mapping[int, str] = MappingProxyType({})

    def __init__(self, cache: Cache, pages: VirtualMemory) -> None:
        self._cache = cache
        self._pages = pages
        self._rows: dict[tuple[Pool, int], Growing] = {}
        self._coarse: dict[
            Pool, int
        ] = {}  # the slack of pools that is meant for plain segments only

    def rest(self) -> None:
        """Let all new memory be in plain segments, until something is found here again."""
        for pool, slack_bytes in self._coarse.items():
            pool.slack_bytes = slack_bytes
        self._coarse.clear()

    def find(self, pool: Pool, size: int, stream: int, limit: int) -> Block | None:
        """Take the best fit out of a pool, or nothing where that block is of the limit or more.

        Free blocks are tried by size and address. One that could still grow is passed over as long as the
        next one has less room to grow.
        """
        if pool not in self._coarse:
            self._coarse[pool], pool.slack_bytes = pool.slack_bytes, SMALLEST_BLOCK - 1
        rows = [row for row in (pool.rows.get(stream), self._rows.get((pool, stream))) if row]
        entries = [row.from_size(size) for row in rows]
        chosen = _best_fit(entries[0] if len(entries) == 1 else merge(*entries))
        if chosen is None or chosen.size >= limit:
            return None
        chosen.row.discard(chosen)
        return chosen

    def first(self, pool: Pool, stream: int, size: int) -> Block | None:
        """Return the smallest free block of at least a size that lies in an expandable segment."""
        row = self._rows.get((pool, stream))
        entry = next(row.from_size(size), None) if row is not None else None
        return None if entry is None else entry[2]

    def obtain(self, request: Request) -> Block | None:
        """Map what a request lacks, at the lowest address where it fits; None where there is no memory.

        Raises CudaError for all else that the driver refuses. The block is in no pool.
        """
        block = self._place_for(request)
        if isinstance(block, Unmapped):
            block = self._map(block, min(request.size, block.size), request.stack)
        while block is not None and block.size < request.size:
            rest = cast("Unmapped", block.next)  # as the place was chosen
            block = self._map(rest, min(request.size - block.size, rest.size), request.stack)
        if block is not None:
            block.row.discard(block)
        return block

    def release(self, pool: Pool, stack: Trail | None) -> None:
        """Give back every page of a pool of which nothing is used, and the reservations that are left empty.

        Waits for their streams. Raises CudaError, and keeps what was not given back by then.
        """
        for row in self._rows_of(pool):
            for block in list(row):
                self._unmap(row.reservation_of(block), block, stack)
        for row in self._rows_of(pool):
            for reservation in [each for each in row.reservations if each.is_empty]:
                self._pages.unreserve(reservation.ptr, reservation.size)
                reservation.leave()
            if not row.reservations:
                del self._rows[pool, row.stream]
        if pool in self._coarse:
            pool.slack_bytes = self._coarse.pop(pool)

    @property
    def reservations(self) -> list[Reservation]:
        """The ranges of addresses that are set aside."""
        return [each for row in self._rows.values() for each in row.reservations]

    @property
    def mapped(self) -> list[tuple[int, int]]:
        """The ranges that have memory behind them: where each begins, and its size."""
        return [(each.ptr, each.size) for place in self.reservations for each in place.ranges]

    def reserve_bytes(self, pool: Pool, stream: int, total_bytes: int) -> int:
        """Return how many addresses a segment of a pool and stream has, on a device of so much memory."""
        settings = self._cache.settings
        by_class = dict(settings.expandable_segments_reserve_by_class)
        plain = settings.expandable_segments_reserve or _FULL
        reserve = by_class.get(self.classes.get(stream, ""), plain)
        page = self._page_bytes(pool)
        return -(-reserve.size_bytes(total_bytes) // page) * page

    def _rows_of(self, pool: Pool) -> list[Growing]:
        streams = sorted(stream for owner, stream in self._rows if owner is pool)
        return [self._rows[pool, stream] for stream in streams]

    def _place_for(self, request: Request) -> Block | None:
        row = self._rows.get((request.pool, request.stream))
        place = row.place_for(request.size) if row is not None else None
        return place or self._reserve(request)

    def _reserve(self, request: Request) -> Block | None:
        """Set addresses aside; None where there are none, or a request is beyond what would be set aside."""
        total = self._cache.upstream.memory_info().total_bytes
        size = self.reserve_bytes(request.pool, request.stream, total)
        if request.size > size:
            return None
        try:
            ptr = self._pages.reserve(size)
        except CudaError as error:
            _raise_unless_out_of_memory(error)
            return None
        key = request.pool, request.stream
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = Growing(*key)
        page = self._page_bytes(request.pool)
        return Reservation(ptr, size, page, row, self._cache.segments).first

    def _page_bytes(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.small else self._cache.settings.large_segment_size_bytes

    def _map(self, place: Unmapped, needed: int, stack: Trail | None) -> Block | None:
        reservation = place.reservation
        page = reservation.page_bytes
        count = -(-needed // page)
        try:
            self._pages.map(place.ptr, page, count)
        except CudaError as error:
            _raise_unless_out_of_memory(error)
            return None
        ptr = place.ptr
        if ptr == reservation.ptr and reservation.stack is None:
            reservation.stack = stack
        block = reservation.mapped(place, count * page)
        self._count(reservation.row, count * page)
        self._record(SEGMENT_MAP, block, ptr, count * page, stack)
        return block

    def _unmap(self, reservation: Reservation, block: Block, stack: Trail | None) -> None:
        begin, end = reservation.pages_within(block)
        if begin == end:
            return
        # Neither cuMemUnmap nor cuMemRelease waits for who uses the memory.
        self._pages.sync_stream(block.stream)
        self._pages.unmap(begin, end - begin)
        seen = stack or (reservation.stack if block.ptr == reservation.ptr else None)
        reservation.unmapped(block, begin, end)
        self._count(reservation.row, begin - end)
        self._record(SEGMENT_UNMAP, block, begin, end - begin, seen)

    def _count(self, row: Growing, size: int) -> None:
        cache = self._cache
        cache.reserved_bytes += size
        if size > 0:
            cache.statistics.num_device_alloc += 1
            row.tally.mapped(size)
        else:
            cache.statistics.num_device_free += 1
            row.tally.unmapped(-size)

    def _record(self, action: str, block: Block, ptr: int, size: int, stack: Trail | None) -> None:
        recorder = self._cache.recorder
        if recorder is not None:
            recorder.record(action, ptr, size, block.stream, stack, block.pool.id)


def virtual_memory(upstream: Upstream, large_page_bytes: int) -> VirtualMemory:
    """Return the virtual memory of an upstream.

    Raises Unsupported where it has none, or none with such pages; CudaError where the driver refuses.
    """
    if not isinstance(upstream, Paged):
        raise Unsupported(
            "expandable segments need virtual memory, which this upstream has not",
            hint="set expandable_segments:False, or take the memory of a Gpu",
        )
    pages = upstream.pages
    granularity = pages.granularity()
    for size in (SMALL_SEGMENT, large_page_bytes):
        if size % granularity:
            raise Unsupported(
                f"expandable segments cannot have pages of {format_bytes(size)} on this device",
                hint=f"large_segment_size_mb: a multiple of {format_bytes(granularity)}",
            )
    return pages


def _best_fit(entries: Iterator[Entry]) -> Block | None:
    first = next(entries, None)
    if first is None:
        return None
    best = first[2]
    for _, _, block in entries:
        if not isinstance(best.row, Growing) or room_of(block) >= room_of(best):
            break
        best = block
    return best


def _raise_unless_out_of_memory(error: CudaError) -> None:
    if error.code != _OUT_OF_MEMORY:
        raise error
