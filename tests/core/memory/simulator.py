"""A caching allocator as torch has it, slow and obvious: the oracle of the replay.

It follows the behaviour of c10/cuda/CUDACachingAllocator.cpp (torch 2.11) with lists that are searched
from end to end: pools by stream and by size, best fit, rounding, splitting, merging, frees that wait for
other streams, expandable segments, private pools, and what happens before it runs out of memory. With
every trace entry it writes down what is true at that moment.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from core.memory.areas import LARGE_SEGMENT, SMALL_SEGMENT, Area, Piece, Use, truth_of
from core.memory.builders import MIB, Entry
from core.memory.history import History, Life

from cudakit.torch_rules.actions import Action

SMALLEST_BLOCK = 512
MOST_SMALL = MIB  # larger requests come from the large pool
OWN_SEGMENT = 10 * MIB  # requests from here on get a segment of their own
ROUND_SEGMENT = 2 * MIB
OVERSIZE_SLACK = 20 * MIB
BASE = 0x7F00_0000_0000
NOT_YET = 1 << 62


@dataclass(frozen=True, slots=True)
class Want:
    """A request after rounding."""

    size: int
    stream: int
    pool: int

    @property
    def small(self) -> bool:
        return self.size <= MOST_SMALL

    def served_by(self, area: Area) -> bool:
        own = (self.stream, self.pool, self.small)
        return (area.stream, area.pool, area.small) == own


@dataclass(eq=False, slots=True)
class StreamEvent:
    """Recorded on a stream when a piece that the stream used is freed."""

    piece: Piece
    done: bool = False


class Allocator:
    """One device's allocator. Sizes and limits are bytes; streams and pools are small numbers.

    ``capacity`` is what the device has, ``limit`` what the process may reserve of it. Pools in
    ``custom_pools`` get their memory from the user and never expand. ``says_pools`` writes the pool
    into each entry, as torch does from 2.12 on. While ``capturing`` nothing waits or is given back.
    """

    def __init__(
        self,
        *,
        capacity: int = 512 * MIB,
        limit: int | None = None,
        expandable: bool = False,
        max_split: int | None = None,
        custom_pools: frozenset[int] = frozenset(),
        says_pools: bool = True,
    ) -> None:
        self.capacity, self.limit = capacity, limit
        self.expandable, self.max_split = expandable, max_split
        self.custom_pools, self.says_pools = custom_pools, says_pools
        self.capturing = False
        self.released_pools: set[int] = set()
        self.areas: list[Area] = []
        self.queues: defaultdict[int, list[StreamEvent]] = defaultdict(list)
        self.deferred: list[Piece] = []
        self.entries: list[Entry] = []
        self.lives: list[Life] = []
        self.truths = [truth_of(self.areas)]

    # What a program does.

    def alloc(self, size: int, *, stream: int = 0, pool: int = 0, stack: int = 0) -> int | None:
        """Allocate; the address, or None when out of memory."""
        if not self.capturing:
            self._process_events()
        want = Want(max(-(-size // SMALLEST_BLOCK), 1) * SMALLEST_BLOCK, stream, pool)
        found = self._find(want) or self._reserve(want) or self._reserve_after_release(want)
        if found is None:
            free = self.capacity - self.truths[-1].reserved
            said = self._said(pool)
            self._emit(Entry(Action.OOM, free, want.size, stream, stack=stack, pool=said))
            return None
        area, piece = found
        if self._splits(area, piece.size - want.size, want):
            area.split(piece, want.size)
        piece.use, piece.requested, piece.stack = Use.ALLOCATED, size, stack
        piece.life = len(self.lives)
        life = Life(piece.address, piece.size, size, stream, pool, stack, *self._born())
        self.lives.append(life)
        self._emit_piece(Action.ALLOC, area, piece)
        return piece.address

    def record_stream(self, address: int, stream: int) -> None:
        """Say that another stream uses an allocation."""
        area, piece = self._holding(address)
        if stream != area.stream:
            piece.other_streams.add(stream)

    def free(self, address: int) -> None:
        """Free: at once, or when the streams that use the allocation have come so far."""
        area, piece = self._holding(address)
        life = self.lives[piece.life]
        self.lives[piece.life] = replace(life, free_requested=len(self.entries))
        piece.use = Use.PENDING
        self._emit_piece(Action.FREE_REQUESTED, area, piece)
        if not piece.other_streams:
            self._complete(piece)
        elif self.capturing:
            self.deferred.append(piece)
        else:
            self._record_events(piece)

    def synchronize(self, stream: int) -> None:
        """Let a stream finish all its work so far; the allocator notices when next asked."""
        for event in self.queues[stream]:
            event.done = True

    def empty_cache(self) -> None:
        """Give back what is not in use."""
        if not self.capturing:
            self._release_cached()

    def release_pool(self, pool: int) -> None:
        """Say that nothing will be allocated from a private pool: its memory may be given back."""
        self.released_pools.add(pool)

    def mark(self, action: Action = Action.SNAPSHOT) -> None:
        """Write an entry that moves no memory."""
        self._emit(Entry(action))

    def live(self) -> list[int]:
        """List the addresses of what is allocated, oldest first."""
        held = [p for area in self.areas for p in area.pieces if p.use == Use.ALLOCATED]
        return [piece.address for piece in sorted(held, key=lambda piece: piece.life)]

    def history(self) -> History:
        """Tell all that happened."""
        n = len(self.entries)
        lives = (
            replace(life, free_requested=min(life.free_requested, n), end=min(life.end, n))
            for life in self.lives
        )
        limit = -1 if self.max_split is None else self.max_split
        settings = {"max_split_size": limit, "expandable_segments": self.expandable}
        return History(tuple(self.entries), tuple(self.truths), tuple(lives), settings)

    # Finding room.

    def _free_pieces(self, want: Want) -> list[tuple[Area, Piece]]:
        """List the free pieces that may serve a request, the smallest first."""
        places = [
            (area, piece)
            for area in self.areas
            if want.served_by(area)
            for piece in area.pieces
            if piece.use == Use.FREE
        ]
        return sorted(places, key=lambda place: (place[1].size, place[1].address))

    def _find(self, want: Want) -> tuple[Area, Piece] | None:
        """Take the best fit, or nothing where torch would not take that one."""
        places = [place for place in self._free_pieces(want) if place[1].size >= want.size]
        if not places:
            return None
        area, piece = places[0]
        for other_area, other in places[1:]:
            if not area.expandable or other_area.growing_size(other) >= area.growing_size(piece):
                break
            area, piece = other_area, other
        if self._oversize(piece.size) and not self._oversize(want.size):
            return None
        if self._oversize(want.size) and piece.size >= want.size + OVERSIZE_SLACK:
            return None
        return area, piece

    def _reserve(self, want: Want) -> tuple[Area, Piece] | None:
        amount = _segment_size(want.size)
        reserved = self.truths[-1].reserved
        if self.limit is not None and reserved + amount > self.limit:
            return None
        if self.expandable and want.pool not in self.custom_pools:
            return self._grow(want)
        if reserved + amount > self.capacity:
            return None
        area = self._new_area(want, amount, Use.FREE)
        self._emit_piece(Action.SEGMENT_ALLOC, area, area.pieces[0])
        return area, area.pieces[0]

    def _reserve_after_release(self, want: Want) -> tuple[Area, Piece] | None:
        """Give back what is cached, then reserve; without a second look at what is now free."""
        if self.max_split is not None and self._release_oversize(want):
            found = self._reserve(want)
            if found is not None:
                return found
        if self.capturing:
            return None
        self._release_cached()
        return self._reserve(want)

    def _oversize(self, size: int) -> bool:
        return self.max_split is not None and size >= self.max_split

    def _splits(self, area: Area, rest: int, want: Want) -> bool:
        if area.small or self.expandable:
            return rest >= SMALLEST_BLOCK
        return not self._oversize(want.size) and rest > MIB

    def _new_area(self, want: Want, size: int, use: Use) -> Area:
        piece = Piece(self._unused_address(size), size, use)
        area = Area(want.pool, want.stream, want.small, use == Use.UNMAPPED, [piece])
        self.areas.append(area)
        return area

    def _unused_address(self, size: int) -> int:
        """Find the lowest addresses that no area has, as a driver that reuses them at once."""
        place = BASE
        for area in sorted(self.areas, key=lambda area: area.address):
            if place + size <= area.address:
                break
            place = max(place, -(-area.end // ROUND_SEGMENT) * ROUND_SEGMENT)
        return place

    # Expandable segments.

    def _grow(self, want: Want) -> tuple[Area, Piece] | None:
        """Map what is missing behind free space, at the lowest address where the request fits."""
        area, place = self._growing_place(want)
        while place.use == Use.UNMAPPED or place.size < want.size:
            unmapped = place if place.use == Use.UNMAPPED else area.after(place)
            assert unmapped is not None
            have = 0 if unmapped is place else place.size
            mapped = self._map(area, unmapped, min(want.size - have, unmapped.size))
            if mapped is None:
                return None
            place = mapped
        return area, place

    def _growing_place(self, want: Want) -> tuple[Area, Piece]:
        for area in sorted(self.areas, key=lambda area: area.address):
            if not area.expandable or not want.served_by(area):
                continue
            for index, piece in enumerate(area.pieces):
                if piece.use == Use.UNMAPPED:
                    start = index - (index > 0 and area.pieces[index - 1].use == Use.FREE)
                    if area.room_from(start) >= want.size:
                        return area, area.pieces[start]
        page = SMALL_SEGMENT if want.small else LARGE_SEGMENT
        area = self._new_area(want, -(-self.capacity * 9 // 8 // page) * page, Use.UNMAPPED)
        return area, area.pieces[0]

    def _map(self, area: Area, piece: Piece, size: int) -> Piece | None:
        """Map pages from the start of an unmapped piece; the free piece that they are now part of."""
        size = -(-size // area.page) * area.page
        if self.truths[-1].reserved + size > self.capacity:
            return None
        area.split(piece, size)
        address, piece.use = piece.address, Use.FREE
        merged = area.merge(piece)
        self._emit(self._entry(Action.SEGMENT_MAP, area, address, size))
        return merged

    def _unmap(self, area: Area, piece: Piece) -> None:
        """Unmap the whole pages inside a free piece."""
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

    # Giving back.

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

    def _release_oversize(self, want: Want) -> bool:
        """Give back cached segments of the request's stream that are not to be split."""
        key = max(want.size, self.max_split or 0)
        whole = [
            (area, piece)
            for area, piece in self._free_pieces(want)
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
        life = self.lives[piece.life]
        self.lives[piece.life] = replace(life, end=len(self.entries))
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

    def _said(self, pool: int) -> int:
        return pool if self.says_pools else -1

    def _entry(
        self, action: Action, area: Area, address: int, size: int, *, stack: int = 0
    ) -> Entry:
        return Entry(action, address, size, area.stream, stack=stack, pool=self._said(area.pool))

    def _emit_piece(self, action: Action, area: Area, piece: Piece) -> None:
        size = piece.size if piece.use == Use.FREE else piece.requested
        self._emit(self._entry(action, area, piece.address, size, stack=piece.stack))

    def _emit(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.truths.append(truth_of(self.areas))


def _segment_size(size: int) -> int:
    if size <= MOST_SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
