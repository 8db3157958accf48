"""Copy: how fast the driver copies, to the device, back, both ways at once, and within it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

import numpy as np

from cudakit.core.bench.cache import MOST_SETS, is_cold, l2_size_bytes
from cudakit.core.bench.case import Case
from cudakit.core.bench.limits import Work
from cudakit.core.bench.method import Cache
from cudakit.core.bench.spec import CopySpec
from cudakit.core.bench.verification import Verification
from cudakit.core.bench.workloads.moved import POISON, Finding, check_copy, worst
from cudakit.gpu.api import LEGACY, Event, Gpu, Ptr, Stream
from cudakit.kernels.compare import Compare
from cudakit.kernels.fill import Fill

_SIZES_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
_SIMULATED_SIZES_BYTES = (4 << 10, 64 << 10, 1 << 20)
_BLOCK_BYTES = 16  # of random bits

# From where to where; what is in one row runs at the same time.
_ROUTES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "h2d": (("host", "device"),),
    "d2h": (("device", "host"),),
    "both": (("host", "device"), ("device", "host")),
    "d2d": (("device", "device"),),
}


def copy_cases(spec: CopySpec, gpu: Gpu) -> tuple[Case, ...]:
    """Make a case of each direction and size."""
    usual = _SIMULATED_SIZES_BYTES if gpu.simulated else _SIZES_BYTES
    l2_bytes = l2_size_bytes(gpu.facts().fields)
    return tuple(
        _case(spec, direction, size_bytes, l2_bytes)
        for direction in spec.directions
        for size_bytes in spec.sizes_bytes or usual
    )


def _case(spec: CopySpec, direction: str, size_bytes: int, l2_bytes: int) -> Case:
    buffers = _on_device(direction)
    cache = spec.cache or _usual_cache(direction, buffers * size_bytes, l2_bytes)
    link_bytes = 0 if direction == "d2d" else size_bytes
    return Case(
        Copy(direction, size_bytes),
        spec.method(spec.mode, cache, fill="bits"),
        Work(bytes_moved=buffers * size_bytes, link_bytes=link_bytes),
        size_bytes,
        buffers,
    )


def _usual_cache(direction: str, footprint_bytes: int, l2_bytes: int) -> Cache:
    """Have the cache cold where that matters: a link is slower than the memory behind it.

    What is so small that no number of buffers fills the cache takes as long as a call, cold or hot.
    """
    can_be_cold = is_cold(MOST_SETS, l2_bytes=l2_bytes, footprint_bytes=footprint_bytes)
    return "rotate" if direction == "d2d" and can_be_cold else "hot"


def _on_device(direction: str) -> int:
    """Count the buffers in the memory of the device."""
    return sum(place == "device" for route in _ROUTES[direction] for place in route)


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies of a size in one direction, or in two at once."""

    direction: str
    size_bytes: int
    name: str = "copy"

    @property
    def axes(self) -> Mapping[str, str | int | float]:
        return {"direction": self.direction, "size_bytes": self.size_bytes}

    def prepare(self, gpu: Gpu, seed: int) -> PreparedCopy:
        return PreparedCopy(gpu, self.direction, self.size_bytes, seed)


@dataclass(frozen=True, slots=True)
class _Route:
    to: Ptr
    source: Ptr
    poison: Callable[[], None]


class PreparedCopy:
    """Buffers on both sides; a second stream, where something runs at the same time."""

    operations = 0

    def __init__(self, gpu: Gpu, direction: str, size_bytes: int, seed: int) -> None:
        self._gpu, self._direction, self._size_bytes, self._seed = gpu, direction, size_bytes, seed
        self._sets: list[tuple[_Route, ...]] = []
        with ExitStack() as owned:
            self._compare = owned.enter_context(closing(Compare(gpu)))
            self._aside = gpu.stream(blocking=False)
            owned.callback(gpu.destroy_stream, self._aside)
            self._fork, self._join = (self._event(owned) for _ in range(2))
            self._owned = owned
            self.rotate(1)
            self._owned = owned.pop_all()

    @property
    def footprint_bytes(self) -> int:
        return _on_device(self._direction) * self._size_bytes

    @property
    def bytes_moved(self) -> int:
        return self.footprint_bytes

    def rotate(self, sets: int) -> None:
        with closing(Fill(self._gpu)) as fill:
            while len(self._sets) < sets:
                routes = _ROUTES[self._direction]
                first = len(self._sets) * len(routes)
                made = (self._route(fill, first + at, *ends) for at, ends in enumerate(routes))
                self._sets.append(tuple(made))

    def enqueue(self, stream: Stream, index: int) -> None:
        gpu, size_bytes = self._gpu, self._size_bytes
        route, *others = self._sets[index % len(self._sets)]
        if others:
            gpu.record(self._fork, stream)
            gpu.wait(self._aside, self._fork)
        gpu.copy(route.to, route.source, size_bytes, stream)
        for other in others:
            gpu.copy(other.to, other.source, size_bytes, self._aside)
        if others:
            gpu.record(self._join, self._aside)
            gpu.wait(stream, self._join)

    def verify(self) -> Verification:
        verification = worst(self._findings())
        for route in self._routes():
            route.poison()
        self._gpu.sync()
        return verification

    def close(self) -> None:
        self._owned.close()

    def _routes(self) -> Iterator[_Route]:
        return (route for routes in self._sets for route in routes)

    def _findings(self) -> Iterator[Finding]:
        # The device reaches pinned memory of the host by the same address (CUDA C++ Programming Guide,
        # "Unified Virtual Address Space").
        for route in self._routes():
            size_bytes = self._size_bytes
            yield check_copy(
                self._compare, route.to, (route.source,), size_bytes, self._seed, LEGACY
            )

    def _route(self, fill: Fill, number: int, from_: str, to: str) -> _Route:
        source, target = self._malloc(from_), self._malloc(to)
        # Random bits are made in memory of the device, of which each route has some.
        made = source if from_ == "device" else target
        blocks = -(-self._size_bytes // _BLOCK_BYTES)
        fill.bits(made, blocks, LEGACY, seed=self._seed, sequence=number)
        if made != source:
            self._gpu.copy(source, made, self._size_bytes, LEGACY)
        self._gpu.sync()
        route = _Route(target, source, partial(self._poison, target, to))
        route.poison()
        self._gpu.sync()
        return route

    def _poison(self, ptr: Ptr, place: str) -> None:
        gpu, size_bytes = self._gpu, self._size_bytes
        if place == "device":
            gpu.fill(ptr, POISON, size_bytes, LEGACY)
        else:
            np.frombuffer(gpu.host_view(ptr, size_bytes), np.uint8)[:] = POISON

    def _malloc(self, place: str) -> Ptr:
        gpu = self._gpu
        malloc, free = (
            (gpu.malloc, gpu.free) if place == "device" else (gpu.host_malloc, gpu.host_free)
        )
        ptr = malloc(-(-self._size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES)
        self._owned.callback(free, ptr)
        return ptr

    def _event(self, owned: ExitStack) -> Event:
        event = self._gpu.event(timing=False)
        owned.callback(self._gpu.destroy_event, event)
        return event
