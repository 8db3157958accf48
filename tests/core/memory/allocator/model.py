"""The allocator once more, slow and obvious: lists searched from end to end, a counter for every number.

It follows parts a2 to a10 of what PyTorch does, and shares no code with the allocator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from core.memory.allocator.device import MIB, Device

from cudakit.errors import CudaError

FREE, LIVE, PENDING = "inactive", "active_allocated", "active_pending_free"
METRICS = (
    "allocation",
    "allocated_bytes",
    "segment",
    "reserved_bytes",
    "active",
    "active_bytes",
    "inactive_split",
    "inactive_split_bytes",
    "requested_bytes",
)
SCALARS = [
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
]


class Full(Exception):
    """No memory."""


@dataclass(eq=False)
class Piece:
    address: int
    size: int
    state: str = FREE
    requested: int = 0
    uses: list[int] = field(default_factory=list)
    waits: int = 0
    freed_at: int = 0


@dataclass(eq=False)
class Area:
    address: int
    size: int
    stream: int
    small: bool
    pieces: list[Piece]

    @property
    def kind(self) -> str:
        return "small_pool" if self.small else "large_pool"


class Model:
    def __init__(
        self,
        device: Device,
        *,
        max_split: float = math.inf,
        limit: float = math.inf,
        gc_threshold: float = 0.0,
    ) -> None:
        self.device, self.max_split, self.limit = device, max_split, limit
        self.gc_threshold = gc_threshold
        self.areas: list[Area] = []
        self.queues: dict[int, list[tuple[int, Area, Piece]]] = {}
        self.searches = {True: 0, False: 0}
        self.numbers = dict.fromkeys(SCALARS, 0)
        self.numbers["max_split_size"] = -1 if max_split == math.inf else int(max_split)
        for metric in METRICS:
            for kind in ("all", "small_pool", "large_pool"):
                self._zero(f"{metric}.{kind}")
        for metric in ("oversize_allocations", "oversize_segments"):
            self._zero(metric)

    # Operations.

    def alloc(self, requested: int, stream: int) -> int:
        self._process()
        size = max(-(-requested // 512), 1) * 512
        small = size <= MIB
        found = self._find(size, small, stream) or self._obtain(size, small, stream)
        if found is None:
            self.numbers["num_ooms"] += 1
            raise Full
        area, piece = found
        was_split, rest = len(area.pieces) > 1, piece.size - size
        if (rest >= 512) if small else (size < self.max_split and rest > MIB):
            remainder = Piece(piece.address + size, rest, requested=piece.requested)
            remainder.freed_at = self.searches[small]
            area.pieces.insert(area.pieces.index(piece) + 1, remainder)
            piece.size = size
            if was_split:
                self._change("inactive_split_bytes", area.kind, -size)
            else:
                self._change("inactive_split", area.kind, 1)
                self._change("inactive_split_bytes", area.kind, rest)
        elif was_split:
            self._change("inactive_split", area.kind, -1)
            self._change("inactive_split_bytes", area.kind, -piece.size)
        piece.state, piece.requested = LIVE, requested
        for metric in ("allocation", "active"):
            self._change(metric, area.kind, 1)
        for metric in ("allocated_bytes", "active_bytes"):
            self._change(metric, area.kind, piece.size)
        self._change("requested_bytes", area.kind, requested)
        if piece.size >= self.max_split:
            self._count("oversize_allocations", 1)
        return piece.address

    def use(self, address: int, stream: int) -> None:
        area, piece = self._at(address)
        if stream != area.stream and stream not in piece.uses:
            piece.uses.append(stream)

    def free(self, address: int) -> None:
        area, piece = self._at(address)
        piece.state = PENDING
        self._change("allocation", area.kind, -1)
        self._change("allocated_bytes", area.kind, -piece.size)
        if piece.size >= self.max_split:
            self._count("oversize_allocations", -1)
        for stream in piece.uses:
            place = self.device.recorded[stream] = self.device.recorded.get(stream, 0) + 1
            self.queues.setdefault(stream, []).append((place, area, piece))
        piece.waits = len(piece.uses)
        piece.uses = []
        if not piece.waits:
            self._complete(area, piece)

    def empty_cache(self) -> None:
        self.numbers["num_sync_all_streams"] += 1
        for stream in list(self.queues):
            self.device.finish(stream)
        self._process()
        for small in (False, True):
            for area in self._whole(small):
                self._release(area)

    def reset_peaks(self) -> None:
        for name in self.numbers:
            if name.endswith(".peak"):
                self.numbers[name] = self.numbers[name.replace(".peak", ".current")]

    def reset_sums(self) -> None:
        for name in self.numbers:
            if name.endswith((".allocated", ".freed")) or name in SCALARS:
                self.numbers[name] = 0

    # What it is then.

    def layout(self) -> list[Any]:
        return [
            (
                area.address,
                area.stream,
                area.kind,
                [(p.address, p.size, p.state, p.requested) for p in area.pieces],
            )
            for area in sorted(self.areas, key=lambda area: area.address)
        ]

    # How.

    def _free_pieces(self, small: bool) -> list[tuple[Area, Piece]]:
        found = [
            (area, piece)
            for area in self.areas
            if area.small == small
            for piece in area.pieces
            if piece.state == FREE
        ]
        return sorted(found, key=lambda at: (at[0].stream, at[1].size, at[1].address))

    def _whole(self, small: bool) -> list[Area]:
        return [area for area, _ in self._free_pieces(small) if len(area.pieces) == 1]

    def _find(self, size: int, small: bool, stream: int) -> tuple[Area, Piece] | None:
        if self.gc_threshold and self.limit < math.inf:
            self.searches[small] += 1
        for area, piece in self._free_pieces(small):
            if area.stream == stream and piece.size >= size:
                if size < self.max_split <= piece.size:
                    return None
                if size >= self.max_split and piece.size >= size + 20 * MIB:
                    return None
                return area, piece
        return None

    def _obtain(self, size: int, small: bool, stream: int) -> tuple[Area, Piece] | None:
        if self.gc_threshold and self.limit < math.inf:
            self._collect()
        return (
            self._reserve(size, small, stream)
            or (self._release_oversize(size, small, stream) and self._reserve(size, small, stream))
            or self._retry(size, small, stream)
            or None
        )

    def _retry(self, size: int, small: bool, stream: int) -> tuple[Area, Piece] | None:
        self.empty_cache()
        self.numbers["num_alloc_retries"] += 1
        return self._reserve(size, small, stream) or self._find(size, small, stream)

    def _reserve(self, size: int, small: bool, stream: int) -> tuple[Area, Piece] | None:
        if small:
            total = 2 * MIB
        elif size < 10 * MIB:
            total = 20 * MIB
        else:
            total = -(-size // (2 * MIB)) * 2 * MIB
        if sum(area.size for area in self.areas) + total > self.limit:
            return None
        try:
            address = self.device.malloc(total, stream)
        except CudaError:
            return None
        piece = Piece(address, total)
        area = Area(address, total, stream, small, [piece])
        self.areas.append(area)
        self.numbers["num_device_alloc"] += 1
        self._change("segment", area.kind, 1)
        self._change("reserved_bytes", area.kind, total)
        if total >= self.max_split:
            self._count("oversize_segments", 1)
        return area, piece

    def _release(self, area: Area) -> None:
        self.device.free(area.address)
        self.areas.remove(area)
        self.numbers["num_device_free"] += 1
        self._change("segment", area.kind, -1)
        self._change("reserved_bytes", area.kind, -area.size)
        if area.size >= self.max_split:
            self._count("oversize_segments", -1)

    def _release_oversize(self, size: int, small: bool, stream: int) -> bool:
        if self.max_split == math.inf:
            return False
        key = max(size, self.max_split)
        own = [area for area in self._whole(small) if area.stream == stream]
        for area in own:
            if area.size >= key:
                self._release(area)
                return True
        released = 0
        for area in reversed(own):
            if area.size >= self.max_split and released < key:
                self._release(area)
                released += area.size
        return released >= key

    def _collect(self) -> None:
        reserved = sum(area.size for area in self.areas)
        target = reserved - int(self.gc_threshold * self.limit)
        while target > 0 and (left := self._whole(False)):
            ages = [self.searches[False] - area.pieces[0].freed_at for area in left]
            mean = sum(ages) / len(ages)
            for area, age in zip(left, ages, strict=True):
                if age >= mean:
                    target -= area.size
                    self._release(area)

    def _process(self) -> None:
        for stream, queue in self.queues.items():
            while queue and queue[0][0] <= self.device.reached.get(stream, 0):
                _, area, piece = queue.pop(0)
                piece.waits -= 1
                if not piece.waits:
                    self._complete(area, piece)
        self.queues = {stream: queue for stream, queue in self.queues.items() if queue}

    def _complete(self, area: Area, piece: Piece) -> None:
        self._change("active", area.kind, -1)
        self._change("active_bytes", area.kind, -piece.size)
        self._change("requested_bytes", area.kind, -piece.requested)
        index, count, size = area.pieces.index(piece), 0, 0
        for other in self._neighbours(area, index):
            count, size = count - 1, size - other.size
            piece.address = min(piece.address, other.address)
            piece.size += other.size
            area.pieces.remove(other)
        piece.state, piece.freed_at = FREE, self.searches[area.small]
        if len(area.pieces) > 1:
            count, size = count + 1, size + piece.size
        self._change("inactive_split", area.kind, count)
        self._change("inactive_split_bytes", area.kind, size)

    def _neighbours(self, area: Area, index: int) -> Iterator[Piece]:
        around = [area.pieces[i] for i in (index - 1, index + 1) if 0 <= i < len(area.pieces)]
        return iter([piece for piece in around if piece.state == FREE])

    def _at(self, address: int) -> tuple[Area, Piece]:
        for area in self.areas:
            for piece in area.pieces:
                if piece.address == address and piece.state == LIVE:
                    return area, piece
        raise KeyError(address)

    def _zero(self, metric: str) -> None:
        for part in ("current", "peak", "allocated", "freed"):
            self.numbers[f"{metric}.{part}"] = 0

    def _change(self, metric: str, kind: str, amount: int) -> None:
        self._count(f"{metric}.{kind}", amount)
        self._count(f"{metric}.all", amount)

    def _count(self, metric: str, amount: int) -> None:
        now = self.numbers[f"{metric}.current"] = self.numbers[f"{metric}.current"] + amount
        self.numbers[f"{metric}.peak"] = max(self.numbers[f"{metric}.peak"], now)
        self.numbers[f"{metric}.{'allocated' if amount > 0 else 'freed'}"] += abs(amount)
