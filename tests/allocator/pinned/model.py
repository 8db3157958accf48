"""A simple model of the pool of pinned memory, with linear searches."""

from __future__ import annotations

from dataclasses import dataclass, field

from allocator.device import MIB
from allocator.pinned.host import Host

from cudakit.errors import CudaError


class Full(Exception):
    """Out of memory."""


@dataclass
class Piece:
    ptr: int
    size: int
    driver_allocation: tuple[int, int]  # The allocation of the driver that contains the block.
    users: set[int] = field(default_factory=set)
    events: list[int] = field(default_factory=list)
    freed_at: int = 0

    @property
    def small(self) -> bool:
        return self.driver_allocation[1] == 2 * MIB and self.small_request

    small_request: bool = False


class Model:
    """A model of PyTorch's pool, or of a pool that splits the driver's allocations."""

    def __init__(self, host: Host, *, splits: bool, most_cached: int | None = None) -> None:
        self.host = host
        self.splits = splits
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
        if self.splits:
            self.cut(piece, rounded)
        self.live[piece.ptr] = piece
        return piece.ptr

    def rounded(self, size: int) -> int:
        if self.splits or (self.most_cached is not None and size > self.most_cached):
            return (size + 511) // 512 * 512
        power = 1
        while power < size:
            power *= 2
        return power

    def find(self, size: int) -> Piece | None:
        if self.splits:
            fitting_pieces = [
                p for p in self.free_pieces if p.size >= size and p.small_request == (size <= MIB)
            ]
            best_piece = min(fitting_pieces, key=lambda p: (p.size, p.ptr), default=None)
        else:
            fitting_pieces = [p for p in self.free_pieces if size <= p.size <= power_above(size)]
            best_piece = max(fitting_pieces, key=lambda p: p.freed_at, default=None)
        if best_piece is not None:
            self.free_pieces.remove(best_piece)
        return best_piece

    def from_driver(self, size: int) -> Piece:
        size_bytes = size
        if self.splits:
            size_bytes = 2 * MIB if size <= MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        try:
            ptr = self.host.malloc(size_bytes)
        except CudaError:
            return self.rescued(size, size_bytes)
        return Piece(ptr, size_bytes, (ptr, size_bytes), small_request=self.splits and size <= MIB)

    def rescued(self, size: int, size_bytes: int) -> Piece:
        while self.queue:
            event, piece = self.queue.pop(0)
            self.host.sync_event(event)  # type: ignore[arg-type]
            self.reached(event, piece)
        freed_piece = self.find(size)
        if freed_piece is not None:
            return freed_piece
        self.give_back()
        try:
            ptr = self.host.malloc(size_bytes)
        except CudaError:
            raise Full from None
        return Piece(ptr, size_bytes, (ptr, size_bytes), small_request=self.splits and size <= MIB)

    def cut(self, piece: Piece, size: int) -> None:
        rest_bytes = piece.size - size
        if rest_bytes > (0 if piece.small_request else MIB):
            self.free_pieces.append(
                Piece(
                    piece.ptr + size,
                    rest_bytes,
                    piece.driver_allocation,
                    small_request=piece.small_request,
                )
            )
            piece.size = size

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
        merged = True
        while self.splits and merged:
            merged = self.merge_once()
        for whole_piece in [p for p in self.free_pieces if (p.ptr, p.size) == p.driver_allocation]:
            if self.most_cached is not None and whole_piece.size > self.most_cached:
                self.host.free(whole_piece.ptr)
                self.free_pieces.remove(whole_piece)

    def merge_once(self) -> bool:
        for low in self.free_pieces:
            for high in self.free_pieces:
                if (
                    low.driver_allocation == high.driver_allocation
                    and low.ptr + low.size == high.ptr
                ):
                    low.size += high.size
                    self.free_pieces.remove(high)
                    return True
        return False

    def give_back(self) -> None:
        for piece in [p for p in self.free_pieces if (p.ptr, p.size) == p.driver_allocation]:
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
