"""A simple model of the pool of pinned memory, with linear searches."""

from __future__ import annotations

from dataclasses import dataclass, field

from allocator.pinned.host import Host

from cudakit.errors import CudaError


class Full(Exception):
    """Out of memory."""


@dataclass
class Piece:
    ptr: int
    size: int

    users: set[int] = field(default_factory=set)
    events: list[int] = field(default_factory=list)
    freed_at: int = 0


class Model:
    """A model of PyTorch's pool."""

    def __init__(self, host: Host, *, most_cached: int | None = None) -> None:
        self.host = host
        self.most_cached = most_cached
        self.live: dict[int, Piece] = {}
        self.free_pieces: list[Piece] = []
        self.queue: list[tuple[int, Piece]] = []
        self.clock = 0

    def alloc(self, size: int) -> int:
        self.process()
        rounded = self.rounded(size)
        piece = self.find(rounded)
        if piece is None:
            piece = self.from_driver(rounded)
        self.live[piece.ptr] = piece
        return piece.ptr

    def rounded(self, size: int) -> int:
        if self.most_cached is not None and size > self.most_cached:
            return (size + 511) // 512 * 512
        power = 1
        while power < size:
            power *= 2
        return power

    def find(self, size: int) -> Piece | None:
        fitting_pieces = [p for p in self.free_pieces if size <= p.size <= power_above(size)]
        best_piece = max(fitting_pieces, key=lambda p: p.freed_at, default=None)
        if best_piece is not None:
            self.free_pieces.remove(best_piece)
        return best_piece

    def from_driver(self, size: int) -> Piece:
        try:
            ptr = self.host.malloc(size)
        except CudaError:
            return self.rescued(size)
        return Piece(ptr, size)

    def rescued(self, size: int) -> Piece:
        while self.queue:
            event, piece = self.queue.pop(0)
            self.host.sync_event(event)  # type: ignore[arg-type]
            self.reached(event, piece)
        freed_piece = self.find(size)
        if freed_piece is not None:
            return freed_piece
        self.give_back()
        try:
            ptr = self.host.malloc(size)
        except CudaError:
            raise Full from None
        return Piece(ptr, size)

    def use(self, ptr: int, stream: int) -> None:
        self.live[ptr].users.add(stream)

    def free(self, ptr: int) -> None:
        piece = self.live.pop(ptr)
        for stream in piece.users:
            event = self.host.event()
            self.host.record(event, stream)
            piece.events.append(event)
        # The order of the events of one block does not matter, unless one of them delays later events.
        self.queue += [(event, piece) for event in piece.events]
        if not piece.users:
            self.put(piece)
        piece.users = set()

    def process(self) -> None:
        while self.queue and self.host.query_event(self.queue[0][0]):  # type: ignore[arg-type]
            self.reached(*self.queue.pop(0))

    def reached(self, event: int, piece: Piece) -> None:
        piece.events.remove(event)
        if not piece.events:
            self.put(piece)

    def put(self, piece: Piece) -> None:
        self.clock += 1
        piece.freed_at = self.clock
        self.free_pieces.append(piece)
        if self.most_cached is not None and piece.size > self.most_cached:
            self.host.free(piece.ptr)
            self.free_pieces.remove(piece)

    def give_back(self) -> None:
        for piece in list(self.free_pieces):
            self.host.free(piece.ptr)
            self.free_pieces.remove(piece)

    def empty_cache(self) -> None:
        self.process()
        self.give_back()

    def layout(self) -> list[tuple[int, int, bool]]:
        """Return the address and the size of each block, and whether the block is in use."""
        waiting = {id(piece): piece for _, piece in self.queue}.values()
        used_pieces = [(p.ptr, p.size, True) for p in (*self.live.values(), *waiting)]
        return sorted(used_pieces + [(p.ptr, p.size, False) for p in self.free_pieces])


def power_above(size: int) -> int:
    power = 1
    while power < size:
        power *= 2
    return power
