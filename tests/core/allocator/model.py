"""A model of the allocator, slow and obvious: linear searches, and a counter for each statistic.

It follows parts a2 to a10 of what PyTorch does, and shares no code with the allocator.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from core.allocator.device import MIB
from core.allocator.growth import (
    DEFAULT,
    FREE,
    GAP,
    LIVE,
    PENDING,
    Area,
    Growth,
    Piece,
    PoolId,
)
from core.allocator.virtual_device import VirtualDevice

from cudakit.errors import CudaError

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
    """Out of memory."""


class Model(Growth):
    def __init__(
        self,
        device: VirtualDevice,
        *,
        max_split: float = math.inf,
        limit: float = math.inf,
        gc_threshold: float = 0.0,
        expands: bool = False,
    ) -> None:
        self.device, self.max_split, self.limit = device, max_split, limit
        self.gc_threshold, self.expands = gc_threshold, expands
        self.areas: list[Area] = []
        self.queues: dict[int, list[tuple[int, Area, Piece]]] = {}
        self.pool = DEFAULT
        self.searches: Counter[tuple[PoolId, bool]] = Counter()
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
        if self._splits(area, size, rest):
            remainder = Piece(piece.address + size, rest, requested=piece.requested)
            remainder.freed_at = self.searches[area.pool, small]
            area.pieces.insert(area.pieces.index(piece) + 1, remainder)
            piece.size = size
            self._split_changed(area, *((0, -size) if was_split else (1, rest)))
        elif was_split:
            self._split_changed(area, -1, -piece.size)
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
        self._wait(area, piece)

    def empty_cache(self) -> None:
        self.numbers["num_sync_all_streams"] += 1
        for stream in list(self.queues):
            self.device.finish(stream)
        self._process()
        self._give_back((False, True))

    def reset_peaks(self) -> None:
        for name in self.numbers:
            if name.endswith(".peak"):
                self.numbers[name] = self.numbers[name.replace(".peak", ".current")]

    def reset_sums(self) -> None:
        for name in self.numbers:
            if name.endswith((".allocated", ".freed")) or name in SCALARS:
                self.numbers[name] = 0

    # The state.

    def layout(self) -> list[Any]:
        return [
            (
                pieces[0].address,
                area.stream,
                area.kind,
                area.page > 0,
                area.pool,
                [(p.address, p.size, p.state, p.requested) for p in pieces],
            )
            for area in sorted(self.areas, key=lambda area: area.address)
            for gap, found in groupby(area.pieces, key=lambda piece: piece.state == GAP)
            if not gap and (pieces := list(found))
        ]

    # How.

    def _wait(self, area: Area, piece: Piece) -> None:
        for stream in piece.uses:
            place = self.device.recorded[stream] = self.device.recorded.get(stream, 0) + 1
            self.queues.setdefault(stream, []).append((place, area, piece))
        piece.waits = len(piece.uses)
        piece.uses = []
        if not piece.waits:
            self._complete(area, piece)

    def _give_back(self, kinds: tuple[bool, bool]) -> None:
        for small in kinds:
            for area in self._whole(small):
                self._release(area)
            self._unmap_all(small)

    def _free_pieces(self, small: bool) -> list[tuple[Area, Piece]]:
        found = [
            (area, piece)
            for area in self.areas
            if area.small == small and area.pool == self.pool
            for piece in area.pieces
            if piece.state == FREE
        ]
        return sorted(found, key=lambda at: (at[0].stream, at[1].size, at[1].address))

    def _whole(self, small: bool) -> list[Area]:
        return [
            area for area, _ in self._free_pieces(small) if not area.page and len(area.pieces) == 1
        ]

    def _find(self, size: int, small: bool, stream: int) -> tuple[Area, Piece] | None:
        if self.gc_threshold and self.limit < math.inf:
            self.searches[self.pool, small] += 1
        found = [
            (area, piece)
            for area, piece in self._free_pieces(small)
            if area.stream == stream and piece.size >= size and (self.expands or not area.page)
        ]
        while (
            len(found) > 1
            and found[0][0].page
            and self._extent(*found[1]) < self._extent(*found[0])
        ):
            del found[0]
        for area, piece in found[:1]:
            if size < self.max_split <= piece.size:
                return None
            if size >= self.max_split and piece.size >= size + 20 * MIB:
                return None
            return area, piece
        return None

    def _extent(self, area: Area, piece: Piece) -> int:
        behind = area.pieces[area.pieces.index(piece) + 1 :][:1]
        return piece.size + sum(other.size for other in behind if other.state == GAP)

    def _splits(self, area: Area, size: int, rest: int) -> bool:
        if area.small or self.expands:
            return rest >= 512
        return size < self.max_split and rest > MIB

    def _obtain(self, size: int, small: bool, stream: int) -> tuple[Area, Piece] | None:
        if self.gc_threshold and self.limit < math.inf:
            self._collect()
        return (
            self._reserve(size, small, stream)
            or self._borrow(size, small, stream)
            or (self._release_oversize(size, small, stream) and self._reserve(size, small, stream))
            or self._retry(size, small, stream)
            or None
        )

    def _borrow(self, size: int, small: bool, stream: int) -> tuple[Area, Piece] | None:  # noqa: ARG002
        return None

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
        if sum(area.mapped for area in self.areas) + total > self.limit:
            return None
        if self.expands:
            return self._expand(size, small, stream)
        try:
            address = self.device.malloc(total, stream)
        except CudaError:
            return None
        piece = Piece(address, total)
        area = Area(address, total, stream, small, [piece], pool=self.pool)
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
        large = [
            (area, piece)
            for area, piece in self._free_pieces(small)
            if area.stream == stream and piece.size >= key and (area.page or len(area.pieces) == 1)
        ]
        if large and not large[0][0].page:
            self._release(large[0][0])
            return True
        released = 0
        own = [area for area in self._whole(small) if area.stream == stream]
        for area in [area for area in reversed(own) if area.size < key]:
            if area.size >= self.max_split and released < key:
                self._release(area)
                released += area.size
        return released >= key

    def _collect(self) -> None:
        reserved = sum(area.mapped for area in self.areas)
        target = reserved - int(self.gc_threshold * self.limit)
        while target > 0 and (left := self._whole(False)):
            ages = [self.searches[DEFAULT, False] - area.pieces[0].freed_at for area in left]
            mean = sum(ages) / len(ages)
            for area, age in zip(left, ages, strict=True):
                if age >= mean:
                    target -= area.size
                    self._release(area)

    def _process(self) -> None:
        for stream, queue in self.queues.items():
            while queue and queue[0][0] <= self.device.reached.get(stream, 0):
                _, area, piece = queue.pop(0)
                self._reached(area, piece)
        self.queues = {stream: queue for stream, queue in self.queues.items() if queue}

    def _reached(self, area: Area, piece: Piece) -> None:
        piece.waits -= 1
        if not piece.waits:
            self._complete(area, piece)

    def _complete(self, area: Area, piece: Piece) -> None:
        self._change("active", area.kind, -1)
        self._change("active_bytes", area.kind, -piece.size)
        self._change("requested_bytes", area.kind, -piece.requested)
        index, count, size = area.pieces.index(piece), 0, 0
        for other in self._adjacent(area, index):
            count, size = count - 1, size - other.size
            piece.address = min(piece.address, other.address)
            piece.size += other.size
            area.pieces.remove(other)
        piece.state, piece.freed_at = FREE, self.searches[area.pool, area.small]
        if len(area.pieces) > 1:
            count, size = count + 1, size + piece.size
        self._split_changed(area, count, size)

    def _split_changed(self, area: Area, count: int, size: int) -> None:
        if not area.page:
            self._change("inactive_split", area.kind, count)
            self._change("inactive_split_bytes", area.kind, size)

    def _adjacent(self, area: Area, index: int) -> Iterator[Piece]:
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
