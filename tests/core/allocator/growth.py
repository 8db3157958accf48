"""The data of the model, and its expandable segments."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeAlias

from core.allocator.device import MIB
from core.allocator.virtual_device import VirtualDevice

from cudakit.errors import CudaError

FREE, LIVE, PENDING = "inactive", "active_allocated", "active_pending_free"
GAP = "unmapped"
PoolId: TypeAlias = tuple[int, int]
DEFAULT: PoolId = (0, 0)


@dataclass(eq=False)
class Piece:
    address: int
    size: int
    state: str = FREE
    requested: int = 0
    uses: list[int] = field(default_factory=list)
    captured: list[int] = field(default_factory=list)  # uses since a capture
    waits: int = 0
    freed_at: int = 0


@dataclass(eq=False)
class Area:
    address: int
    size: int
    stream: int
    small: bool
    pieces: list[Piece]
    page: int = 0  # of an expandable one
    pool: PoolId = DEFAULT

    @property
    def kind(self) -> str:
        return "small_pool" if self.small else "large_pool"

    @property
    def mapped(self) -> int:
        return sum(piece.size for piece in self.pieces if piece.state != GAP)


class Growth:
    """Expandable segments: pieces and gaps that cover their address ranges."""

    device: VirtualDevice
    areas: list[Area]
    pool: PoolId  # that is looked at
    numbers: dict[str, int]

    def _expand(self, size: int, small: bool, stream: int) -> tuple[Area, Piece] | None:
        place = self._place(size, small, stream) or self._set_aside(size, small, stream)
        if place is None:
            return None
        area, piece = place
        while piece.state == GAP or piece.size < size:
            behind = area.pieces[area.pieces.index(piece) + (piece.state != GAP)]
            lacking = size if piece.state == GAP else size - piece.size
            try:
                piece = self._map(area, behind, min(lacking, behind.size))
            except CudaError:
                return None
        return area, piece

    def _place(self, size: int, small: bool, stream: int) -> tuple[Area, Piece] | None:
        own = [
            area
            for area in self.areas
            if area.page and (area.small, area.stream, area.pool) == (small, stream, self.pool)
        ]
        for area in sorted(own, key=lambda area: area.address):
            for index, piece in enumerate(area.pieces):
                if piece.state == GAP:
                    first = index - (index > 0 and area.pieces[index - 1].state == FREE)
                    run = takewhile(lambda p: p.state in (FREE, GAP), area.pieces[first:])
                    if sum(p.size for p in run) >= size:
                        return area, area.pieces[first]
        return None

    def _set_aside(self, size: int, small: bool, stream: int) -> tuple[Area, Piece] | None:
        page = 2 * MIB if small else 20 * MIB
        total = -(-self.device.capacity * 9 // 8 // page) * page
        if size > total:
            return None
        address = self.device.pages.reserve(total)
        gap = Piece(address, total, GAP)
        self.areas.append(Area(address, total, stream, small, [gap], page, self.pool))
        return self.areas[-1], gap

    def _map(self, area: Area, gap: Piece, lacking: int) -> Piece:
        count = -(-lacking // area.page)
        size = count * area.page
        self.device.pages.map(gap.address, area.page, count)
        self.numbers["num_device_alloc"] += 1
        self._change("reserved_bytes", area.kind, size)
        piece = Piece(gap.address, size, FREE, gap.requested)
        rest = Piece(gap.address + size, gap.size - size, GAP)
        index = area.pieces.index(gap)
        area.pieces[index : index + 1] = [piece, rest] if rest.size else [piece]
        self._join(area, piece)
        return piece

    def _unmap_all(self, small: bool) -> None:
        for area, piece in self._free_pieces(small):
            begin = -(-(piece.address - area.address) // (area.page or 1)) * area.page
            end = (piece.address - area.address + piece.size) // (area.page or 1) * area.page
            if area.page and begin < end:
                self._unmap(area, piece, area.address + begin, area.address + end)
        for area in [area for area in self.areas if not area.mapped]:
            if area.small == small and area.pool == self.pool:
                self.device.pages.unreserve(area.address, area.size)
                self.areas.remove(area)

    def _unmap(self, area: Area, piece: Piece, begin: int, end: int) -> None:
        self.device.pages.sync_stream(area.stream)
        self.device.pages.unmap(begin, end - begin)
        self.numbers["num_device_free"] += 1
        self._change("reserved_bytes", area.kind, begin - end)
        gap = Piece(begin, end - begin, GAP, piece.requested)
        below = Piece(piece.address, begin - piece.address)
        above = Piece(end, piece.address + piece.size - end)
        index = area.pieces.index(piece)
        area.pieces[index : index + 1] = [p for p in (below, gap, above) if p.size]
        self._join(area, gap)

    def _join(self, area: Area, piece: Piece) -> None:
        """Merge a piece with adjacent ones of the same state."""
        index = area.pieces.index(piece)
        for other in [area.pieces[i] for i in (index - 1, index + 1) if 0 <= i < len(area.pieces)]:
            if other.state == piece.state:
                piece.address = min(piece.address, other.address)
                piece.size += other.size
                area.pieces.remove(other)

    def _free_pieces(self, small: bool) -> list[tuple[Area, Piece]]:
        raise NotImplementedError

    def _change(self, metric: str, kind: str, amount: int) -> None:
        raise NotImplementedError
