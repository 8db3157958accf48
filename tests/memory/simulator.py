"""A simple, slow caching allocator with PyTorch's rules: the reference for the replay.

It follows c10/cuda/CUDACachingAllocator.cpp (torch 2.11) with lists and linear searches: pools by stream and
size, best fit, rounding, splitting, merging, frees that wait for other streams, expandable segments, private
pools, and the steps before an out-of-memory error. With every trace entry it stores the expected state.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from memory.areas import LARGE_SEGMENT, SMALL_SEGMENT, Area, Piece, Use, expected_state_of
from memory.builders import MIB, Entry
from memory.simulated_history import Lifetime, SimulatedHistory

from cudakit.memory.snapshot import Action

SMALLEST_BLOCK = 512
MAX_SMALL_BYTES = MIB  # larger requests come from the large pool
OWN_SEGMENT = 10 * MIB  # larger requests get their own segment
ROUND_SEGMENT = 2 * MIB
OVERSIZE_SLACK = 20 * MIB
BASE = 0x7F00_0000_0000
NOT_YET = 1 << 62


@dataclass(frozen=True, slots=True)
class Request:
    """A request after rounding."""

    size: int
    stream: int
    pool: int

    @property
    def small(self) -> bool:
        return self.size <= MAX_SMALL_BYTES

    def served_by(self, area: Area) -> bool:
        own = (self.stream, self.pool, self.small)
        return (area.stream, area.pool, area.small) == own


@dataclass(eq=False, slots=True)
class StreamEvent:
    """An event, recorded on a stream when a block that the stream used is freed."""

    piece: Piece
    done: bool = False


class Allocator:
    """The allocator of one device. Sizes are in bytes; streams and pools are small numbers.

    ``capacity`` is the memory of the device, ``limit`` the most that the process may reserve. Pools in
    ``custom_pools`` have their own upstream allocator and never expand. ``records_pools`` writes the pool
    into each entry, as torch does since 2.12. While ``capturing`` is set, nothing waits for streams or is
    released.
    """

    def __init__(
        self,
        *,
        capacity: int = 512 * MIB,
        limit: int | None = None,
        expandable: bool = False,
        max_split: int | None = None,
        custom_pools: frozenset[int] = frozenset(),
        records_pools: bool = True,
    ) -> None:
        self.capacity, self.limit = capacity, limit
        self.expandable, self.max_split = expandable, max_split
        self.custom_pools, self.records_pools = custom_pools, records_pools
        self.capturing = False
        self.released_pools: set[int] = set()
        self.areas: list[Area] = []
        self.queues: defaultdict[int, list[StreamEvent]] = defaultdict(list)
        self.deferred: list[Piece] = []
        self.entries: list[Entry] = []
        self.lifetimes: list[Lifetime] = []
        self.expected_states = [expected_state_of(self.areas)]

    # Calls of a program.

    def alloc(self, size: int, *, stream: int = 0, pool: int = 0, stack: int = 0) -> int | None:
        """Allocate and return the address; None if out of memory."""
        if not self.capturing:
            self._process_events()
        request = Request(max(-(-size // SMALLEST_BLOCK), 1) * SMALLEST_BLOCK, stream, pool)
        found = (
            self._find(request) or self._reserve(request) or self._reserve_after_release(request)
        )
        if found is None:
            free = self.capacity - self.expected_states[-1].reserved
            said = self._recorded_pool(pool)
            self._emit(Entry(Action.OOM, free, request.size, stream, stack=stack, pool=said))
            return None
        area, piece = found
        if self._splits(area, piece.size - request.size, request):
            area.split(piece, request.size)
        piece.use, piece.requested, piece.stack = Use.ALLOCATED, size, stack
        piece.lifetime = len(self.lifetimes)
        lifetime = Lifetime(piece.address, piece.size, size, stream, pool, stack, *self._born())
        self.lifetimes.append(lifetime)
        self._emit_piece(Action.ALLOC, area, piece)
        return piece.address

    def record_stream(self, address: int, stream: int) -> None:
        """Record that another stream uses an allocation."""
        area, piece = self._holding(address)
        if stream != area.stream:
            piece.other_streams.add(stream)

    def free(self, address: int) -> None:
        """Free an allocation; the free completes after all recorded streams have finished with it."""
        area, piece = self._holding(address)
        lifetime = self.lifetimes[piece.lifetime]
        self.lifetimes[piece.lifetime] = replace(lifetime, free_request=len(self.entries))
        piece.use = Use.PENDING
        self._emit_piece(Action.FREE_REQUESTED, area, piece)
        if not piece.other_streams:
            self._complete(piece)
        elif self.capturing:
            self.deferred.append(piece)
        else:
            self._record_events(piece)

    def synchronize(self, stream: int) -> None:
        """Finish all work of a stream; the allocator checks at its next request."""
        for event in self.queues[stream]:
            event.done = True

    def empty_cache(self) -> None:
        """Release empty segments."""
        if not self.capturing:
            self._release_cached()

    def release_pool(self, pool: int) -> None:
        """Allow the memory of a private pool to be released."""
        self.released_pools.add(pool)

    def mark(self, action: Action = Action.SNAPSHOT) -> None:
        """Write an entry that does not change memory."""
        self._emit(Entry(action))

    def live(self) -> list[int]:
        """Return the addresses of all allocations, oldest first."""
        held = [p for area in self.areas for p in area.pieces if p.use == Use.ALLOCATED]
        return [piece.address for piece in sorted(held, key=lambda piece: piece.lifetime)]

    def history(self) -> SimulatedHistory:
        """Return the history so far."""
        n = len(self.entries)
        lifetimes = (
            replace(lifetime, free_request=min(lifetime.free_request, n), end=min(lifetime.end, n))
            for lifetime in self.lifetimes
        )
        limit = -1 if self.max_split is None else self.max_split
        settings = {"max_split_size": limit, "expandable_segments": self.expandable}
        return SimulatedHistory(
            tuple(self.entries), tuple(self.expected_states), tuple(lifetimes), settings
        )

    # The search for a free block.

    def _free_pieces(self, request: Request) -> list[tuple[Area, Piece]]:
        """Return the free blocks that can serve a request, the smallest first."""
        places = [
            (area, piece)
            for area in self.areas
            if request.served_by(area)
            for piece in area.pieces
            if piece.use == Use.FREE
        ]
        return sorted(places, key=lambda place: (place[1].size, place[1].address))

    def _find(self, request: Request) -> tuple[Area, Piece] | None:
        """Return the best fit, or None if PyTorch would not use it."""
        places = [place for place in self._free_pieces(request) if place[1].size >= request.size]
        if not places:
            return None
        area, piece = places[0]
        for other_area, other in places[1:]:
            if not area.expandable or other_area.size_with_unmapped(
                other
            ) >= area.size_with_unmapped(piece):
                break
            area, piece = other_area, other
        if self._oversize(piece.size) and not self._oversize(request.size):
            return None
        if self._oversize(request.size) and piece.size >= request.size + OVERSIZE_SLACK:
            return None
        return area, piece

    def _reserve(self, request: Request) -> tuple[Area, Piece] | None:
        amount = _segment_size(request.size)
        reserved = self.expected_states[-1].reserved
        if self.limit is not None and reserved + amount > self.limit:
            return None
        if self.expandable and request.pool not in self.custom_pools:
            return self._grow(request)
        if reserved + amount > self.capacity:
            return None
        area = self._new_area(request, amount, Use.FREE)
        self._emit_piece(Action.SEGMENT_ALLOC, area, area.pieces[0])
        return area, area.pieces[0]

    def _reserve_after_release(self, request: Request) -> tuple[Area, Piece] | None:
        """Release the cache, then reserve. As in PyTorch, free blocks are not searched again."""
        if self.max_split is not None and self._release_oversize(request):
            found = self._reserve(request)
            if found is not None:
                return found
        if self.capturing:
            return None
        self._release_cached()
        return self._reserve(request)

    def _oversize(self, size: int) -> bool:
        return self.max_split is not None and size >= self.max_split

    def _splits(self, area: Area, rest: int, request: Request) -> bool:
        if area.small or self.expandable:
            return rest >= SMALLEST_BLOCK
        return not self._oversize(request.size) and rest > MIB

    def _new_area(self, request: Request, size: int, use: Use) -> Area:
        piece = Piece(self._unused_address(size), size, use)
        area = Area(request.pool, request.stream, request.small, use == Use.UNMAPPED, [piece])
        self.areas.append(area)
        return area

    def _unused_address(self, size: int) -> int:
        """Return the lowest unused address, because the driver reuses addresses."""
        place = BASE
        for area in sorted(self.areas, key=lambda area: area.address):
            if place + size <= area.address:
                break
            place = max(place, -(-area.end // ROUND_SEGMENT) * ROUND_SEGMENT)
        return place

    # Expandable segments.

    def _grow(self, request: Request) -> tuple[Area, Piece] | None:
        """Map missing pages after a free block, at the lowest address with enough space."""
        area, place = self._place_to_grow(request)
        while place.use == Use.UNMAPPED or place.size < request.size:
            unmapped = place if place.use == Use.UNMAPPED else area.after(place)
            assert unmapped is not None
            have = 0 if unmapped is place else place.size
            mapped = self._map(area, unmapped, min(request.size - have, unmapped.size))
            if mapped is None:
                return None
            place = mapped
        return area, place

    def _place_to_grow(self, request: Request) -> tuple[Area, Piece]:
        for area in sorted(self.areas, key=lambda area: area.address):
            if not area.expandable or not request.served_by(area):
                continue
            for index, piece in enumerate(area.pieces):
                if piece.use == Use.UNMAPPED:
                    start = index - (index > 0 and area.pieces[index - 1].use == Use.FREE)
                    if area.free_size_from(start) >= request.size:
                        return area, area.pieces[start]
        page = SMALL_SEGMENT if request.small else LARGE_SEGMENT
        area = self._new_area(request, -(-self.capacity * 9 // 8 // page) * page, Use.UNMAPPED)
        return area, area.pieces[0]

    def _map(self, area: Area, piece: Piece, size: int) -> Piece | None:
        """Map pages at the start of an unmapped range; return the free block that contains them."""
        size = -(-size // area.page) * area.page
        if self.expected_states[-1].reserved + size > self.capacity:
            return None
        area.split(piece, size)
        address, piece.use = piece.address, Use.FREE
        merged = area.merge(piece)
        self._emit(self._entry(Action.SEGMENT_MAP, area, address, size))
        return merged

    def _unmap(self, area: Area, piece: Piece) -> None:
        """Unmap all whole pages inside a free block."""
        before = -(piece.address - area.address) % area.page
        size = (piece.size - before) // area.page * area.page
        if size <= 0:
            return
        if before:
            area.split(piece, before)
            piece = area.pieces[area.pieces.index(piece) + 1]
        area.split(piece, size)
        address, piece.use = piece.address, Use.UNMAPPED
        area.merge(piece)
        self._emit(self._entry(Action.SEGMENT_UNMAP, area, address, size))

    # Releases.

    def _release_cached(self) -> None:
        self._record_deferred()
        for stream in list(self.queues):
            self.synchronize(stream)
        self._process_events()
        for area in sorted(self.areas, key=lambda area: (area.pool, area.small, area.address)):
            if area.pool == 0 or area.pool in self.released_pools:
                self._release(area)

    def _release(self, area: Area) -> None:
        if area.expandable:
            for piece in [piece for piece in area.pieces if piece.use == Use.FREE]:
                self._unmap(area, piece)
            if all(piece.use == Use.UNMAPPED for piece in area.pieces):
                self.areas.remove(area)
        elif [piece.use for piece in area.pieces] == [Use.FREE]:
            self.areas.remove(area)
            self._emit_piece(Action.SEGMENT_FREE, area, area.pieces[0])

    def _release_oversize(self, request: Request) -> bool:
        """Release cached segments of the request's stream that may not be split."""
        key = max(request.size, self.max_split or 0)
        whole = [
            (area, piece)
            for area, piece in self._free_pieces(request)
            if not area.expandable and len(area.pieces) == 1
        ]
        enough = [area for area, piece in whole if piece.size >= key]
        if enough:
            self._release(enough[0])
            return True
        released = 0
        for area, piece in reversed(whole):
            if released >= key or not self._oversize(piece.size):
                break
            released += piece.size
            self._release(area)
        return released >= key

    # Frees that wait for other streams.

    def _record_events(self, piece: Piece) -> None:
        for stream in sorted(piece.other_streams):
            self.queues[stream].append(StreamEvent(piece))
        piece.waits_for = len(piece.other_streams)
        piece.other_streams.clear()

    def _record_deferred(self) -> None:
        for piece in self.deferred:
            self._record_events(piece)
        self.deferred.clear()

    def _process_events(self) -> None:
        self._record_deferred()
        for queue in self.queues.values():
            while queue and queue[0].done:
                piece = queue.pop(0).piece
                piece.waits_for -= 1
                if not piece.waits_for:
                    self._complete(piece)

    def _complete(self, piece: Piece) -> None:
        area, _ = self._holding(piece.address)
        lifetime = self.lifetimes[piece.lifetime]
        self.lifetimes[piece.lifetime] = replace(lifetime, end=len(self.entries))
        entry = self._entry(
            Action.FREE_COMPLETED, area, piece.address, piece.requested, stack=piece.stack
        )
        piece.use = Use.FREE
        area.merge(piece)
        self._emit(entry)

    def _holding(self, address: int) -> tuple[Area, Piece]:
        return next(
            (area, piece)
            for area in self.areas
            for piece in area.pieces
            if piece.address == address and piece.use in (Use.ALLOCATED, Use.PENDING)
        )

    # The trace.

    def _born(self) -> tuple[int, int, int]:
        return len(self.entries), NOT_YET, NOT_YET

    def _recorded_pool(self, pool: int) -> int:
        return pool if self.records_pools else -1

    def _entry(
        self, action: Action, area: Area, address: int, size: int, *, stack: int = 0
    ) -> Entry:
        return Entry(
            action, address, size, area.stream, stack=stack, pool=self._recorded_pool(area.pool)
        )

    def _emit_piece(self, action: Action, area: Area, piece: Piece) -> None:
        size = piece.size if piece.use == Use.FREE else piece.requested
        self._emit(self._entry(action, area, piece.address, size, stack=piece.stack))

    def _emit(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.expected_states.append(expected_state_of(self.areas))


def _segment_size(size: int) -> int:
    if size <= MAX_SMALL_BYTES:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
