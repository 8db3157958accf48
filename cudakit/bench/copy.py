"""Benchmark of the driver's copies between host and device, within the device, and between devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from cudakit.arrays.compare import Compare
from cudakit.arrays.fill import Fill
from cudakit.bench.benchmarks import spec_class
from cudakit.bench.case import (
    POISON,
    Cache,
    Case,
    Mode,
    Verification,
    allocate,
    create_event,
    create_stream,
    exact_verification,
    worst_verification,
)
from cudakit.bench.labels import Axis
from cudakit.bench.result import CaseResult
from cudakit.bench.roofline import Work
from cudakit.bench.spec import (
    Spec,
    cache_option,
    check_method,
    check_names,
    check_sizes,
    mode_option,
    option,
    sizes_option,
)
from cudakit.bench.timer import IN_CACHE, can_be_cold, l2_size_bytes
from cudakit.bench.words import Words
from cudakit.errors import CudaError, InputError, Unsupported, UsageError
from cudakit.gpu.api import LEGACY, DeviceInfo, Gpu, Peers, Ptr, Stream
from cudakit.units import Unavailable

Location: TypeAlias = Literal["device", "host", "pageable", "peer"]
Access: TypeAlias = Literal["direct", "staged"]

# h2d and d2h copy between pinned host memory and the device, "both" runs h2d and d2h at the same time, d2d
# copies within the device, "peer" copies to each other device.
DIRECTIONS = ("h2d", "d2h", "both", "pageable-h2d", "pageable-d2h", "d2d", "peer", "peer-both")
# Sizes of copies are multiples of this size, because the kernels that verify copies compare words.
WORD_BYTES = 4

# Memory that kernels may be unable to access. Its content is copied to a staging buffer in device memory.
_INACCESSIBLE_LOCATIONS = ("pageable", "peer")
# The byte that fills the staging buffer before a copy. It is neither POISON nor random, so that a copy that
# did nothing is found.
_STAGING_FILL = 0x5A
_ALIGNMENT_BYTES = 16

_SIZES_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
_SIMULATED_SIZES_BYTES = (4 << 10, 64 << 10, 1 << 20)
_RANDOM_BLOCK_BYTES = 16  # The kernel generates random bits in blocks of this size.

# Source and target of each copy of a direction; the copies of a direction run at the same time.
_ROUTES: Mapping[str, tuple[tuple[Location, Location], ...]] = {
    "h2d": (("host", "device"),),
    "d2h": (("device", "host"),),
    "both": (("host", "device"), ("device", "host")),
    "pageable-h2d": (("pageable", "device"),),
    "pageable-d2h": (("device", "pageable"),),
    "d2d": (("device", "device"),),
    "peer": (("device", "peer"),),
    "peer-both": (("device", "peer"), ("peer", "device")),
}


class _LinkedDevice(DeviceInfo, Peers, Protocol):
    """A device that reports whether it can access other devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySpec(Spec):
    """Measure the rate of the driver's copies: between host and device, within the device, and between GPUs.

    The theoretical peak is that of PCIe, NVLink or device memory. For --directions both and peer-both, the
    rate is the sum of the two directions; for d2d, it counts the bytes read and the bytes written. Copies
    between GPUs without peer access go through host memory; the column "access" shows this. The default sizes
    are 4 KiB to 1 GiB, and with --gpu sim 4 KiB to 1 MiB.

    With --overlap gemm, the directions are h2d, d2h, pageable-h2d, pageable-d2h and d2d, and the default size
    is 64 MiB (with --gpu sim 256 KiB). The GEMM has bf16 matrices of 4096 x 4096 (with --gpu sim 64 x 64).

    \b
    cudakit bench copy
    cudakit bench copy --directions h2d,d2h --sizes 4KiB..256MiB
    cudakit bench copy --directions peer,peer-both --sizes 1GiB
    cudakit bench copy --overlap gemm
    """

    bench: ClassVar[str] = "copy"

    directions: tuple[str, ...] | None = option(  # None: all that the machine supports.
        "--directions",
        "Directions: h2d and d2h (pinned host memory), both (h2d and d2h at the same time), pageable-h2d, "
        "pageable-d2h, d2d (within the device), peer (from the measured GPU to each other GPU), peer-both.  "
        "[default: all available]",
        choices=DIRECTIONS,
    )
    # Sizes of each copy; None: several sizes from 4 KiB on.
    sizes_bytes: tuple[int, ...] | None = sizes_option("Bytes of each copy")
    mode: Mode | None = mode_option("host for pageable memory, else isolated")
    # None: rotate for copies within the device, else hot.
    cache: Cache | None = cache_option(
        "rotate for d2d of sizes that can overwrite the L2, else hot"
    )

    # Work whose overlap with copies is measured instead, by an OverlapSpec.
    overlap: str | None = option(
        "--overlap",
        "Measure how copies overlap with GEMMs on another stream, and how much each slows the other "
        "down.",
        kind="choice",
        metavar="gemm",
        choices=("gemm",),
    )

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        if self.directions is not None:
            check_names("direction", self.directions, DIRECTIONS)
        check_sizes(self.sizes_bytes, WORD_BYTES)
        check_method(self.mode or "isolated", self.cache)
        if self.mode == "graph" and any(map(is_pageable, self.directions or ())):
            raise InputError(
                "copies of pageable memory block the host, so a graph cannot contain them",
                hint="choose another --mode, or other --directions",
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, simulated: bool) -> Spec:
        if "overlap" not in options:
            return cls.with_rule(options)
        for name in ("mode", "cache"):
            if name in options:
                raise UsageError(f"--{name} cannot be used with --overlap", hint=f"remove --{name}")
        passed = {name: options[name] for name in options if name != "overlap"}
        return spec_class("copy-overlap").from_options(passed, simulated=simulated)

    def cases(self, gpu: _LinkedDevice) -> tuple[Case, ...]:
        """Return a case per direction, size and other device.

        Raises Unsupported if copies to other devices are requested and CUDA has one device only.
        """
        default_sizes = _SIMULATED_SIZES_BYTES if gpu.simulated else _SIZES_BYTES
        l2_bytes = l2_size_bytes(gpu.facts().fields)
        return tuple(
            _case(self, replace(copy, size_bytes=size_bytes), l2_bytes)
            for copy in self._copies(gpu)
            for size_bytes in self.sizes_bytes or default_sizes
        )

    def _copies(self, gpu: _LinkedDevice) -> Iterator[Copy]:
        """Yield a Copy of size 0 for each direction and each other device."""
        access_by_peer = other_devices(gpu)
        default_directions = (
            name for name in DIRECTIONS if self.mode != "graph" or not is_pageable(name)
        )
        for direction in self.directions or default_directions:
            if "peer" not in _locations(direction):
                yield Copy(direction, 0)
                continue
            if self.directions and not access_by_peer:
                raise Unsupported(
                    f"--directions {direction} needs two GPUs, but CUDA has only one",
                    hint="--gpu sim:h200x2 simulates two GPUs"
                    if gpu.simulated
                    else "CUDA_VISIBLE_DEVICES may hide GPUs; cudakit devices lists all of them",
                )
            for peer, access in access_by_peer.items():
                yield Copy(direction, 0, peer, access)


def is_pageable(direction: str) -> bool:
    """Return whether a direction copies pageable host memory."""
    return direction.startswith("pageable")


def _case(spec: CopySpec, copy: Copy, l2_bytes: int) -> Case:
    direction, size_bytes = copy.direction, copy.size_bytes
    locations = _locations(direction)
    bytes_moved = locations.count("device") * size_bytes
    device_buffer_count, host_buffer_count = count_buffers(direction)
    cache: Cache = spec.cache or "hot"  # Links are slower than the memory.
    work: Work | Unavailable = Work(
        bytes_moved=bytes_moved,
        link_bytes=0 if direction == "d2d" else size_bytes,
        link="peer" if copy.access == "direct" else "host",
    )
    if direction == "d2d":
        # If copies are so small that MAX_SETS buffer sets do not overwrite the cache, the time is that of
        # the call.
        if can_be_cold("rotate", l2_bytes=l2_bytes, footprint_bytes=bytes_moved):
            cache = spec.cache or "rotate"
        if not can_be_cold(cache, l2_bytes=l2_bytes, footprint_bytes=bytes_moved):
            work = IN_CACHE
    # Copies of pageable memory block the host (CUDA Driver API, "API synchronization behavior"), and so may
    # copies between two devices that the driver stages in host memory. Then there is no blocking kernel.
    mode: Mode = spec.mode or ("host" if is_pageable(direction) else "isolated")
    method = spec.method(mode, cache, fill="bits")
    if is_pageable(direction) or copy.access == "staged":
        method = replace(method, blocker=False)
    return Case(
        copy,
        method,
        work,
        size_bytes,
        device_buffer_count,
        host_bytes=host_buffer_count * size_bytes,
    )


def count_buffers(direction: str) -> tuple[int, int]:
    """Return the numbers of buffers in device memory and in host memory that a direction needs.

    The verification needs a staging buffer in device memory for memory that kernels cannot access.
    """
    locations = _locations(direction)
    staging_buffer_count = int(not set(locations).isdisjoint(_INACCESSIBLE_LOCATIONS))
    return (
        locations.count("device") + staging_buffer_count,
        locations.count("host") + locations.count("pageable"),
    )


def _locations(direction: str) -> list[Location]:
    return [location for route in _ROUTES[direction] for location in route]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies of one size in one direction, or in both at once; ``peer`` is the other device or None."""

    direction: str
    size_bytes: int
    peer: int | None = None
    access: Access | None = None  # Access to the memory of ``peer``.
    name: str = "copy"

    @property
    def axes(self) -> Mapping[str, Axis]:
        peer_axes = (
            {} if self.peer is None else {"peer": self.peer, "access": self.access or "staged"}
        )
        return {"direction": self.direction, **peer_axes, "size_bytes": self.size_bytes}

    def prepare(self, gpu: Gpu, seed: int) -> PreparedCopy:
        return PreparedCopy(gpu, self, seed)


class _Buffer(NamedTuple):
    ptr: Ptr
    location: Location


class _Route(NamedTuple):
    target: _Buffer
    source: _Buffer


class PreparedCopy:
    """The buffers of a copy, and a second stream for concurrent copies."""

    operations = 0

    def __init__(self, gpu: Gpu, copy: Copy, seed: int) -> None:
        self._gpu, self._seed, self._size_bytes = gpu, seed, copy.size_bytes
        self._peer = copy.peer
        self._staging_ptr: Ptr | None = None
        self._locations_of_copies = _ROUTES[copy.direction]
        device_buffer_count = _locations(copy.direction).count("device")
        self.footprint_bytes = self.bytes_moved = device_buffer_count * copy.size_bytes
        self._sets: list[tuple[_Route, ...]] = []
        with ExitStack() as cleanup:
            self._compare = cleanup.enter_context(closing(Compare(gpu)))
            self._second_stream = create_stream(gpu, cleanup)
            self._fork_event = create_event(gpu, cleanup)
            self._join_event = create_event(gpu, cleanup)
            self._cleanup = cleanup
            self.rotate(1)
            self._cleanup = cleanup.pop_all()

    def rotate(self, set_count: int) -> None:
        with closing(Fill(self._gpu)) as fill:
            while len(self._sets) < set_count:
                first_sequence = len(self._sets) * len(self._locations_of_copies)
                routes = (
                    self._make_route(fill, first_sequence + i, *locations)
                    for i, locations in enumerate(self._locations_of_copies)
                )
                self._sets.append(tuple(routes))

    def enqueue(self, stream: Stream, set_index: int) -> None:
        gpu, size_bytes = self._gpu, self._size_bytes
        route, *concurrent_routes = self._sets[set_index % len(self._sets)]
        if concurrent_routes:
            gpu.record(self._fork_event, stream)
            gpu.wait(self._second_stream, self._fork_event)
        gpu.copy(route.target.ptr, route.source.ptr, size_bytes, stream)
        for target, source in concurrent_routes:
            gpu.copy(target.ptr, source.ptr, size_bytes, self._second_stream)
        if concurrent_routes:
            gpu.record(self._join_event, self._second_stream)
            gpu.wait(stream, self._join_event)

    def verify(self) -> Verification:
        routes = [*chain.from_iterable(self._sets)]
        worst = worst_verification(map(self._check, routes))
        self._poison(routes)
        return worst

    def close(self) -> None:
        self._cleanup.close()

    def _check(self, route: _Route) -> Verification:
        # Kernels can access at least one of the two buffers, so one staging buffer suffices.
        target, source = (self._device_readable_ptr(*buffer) for buffer in route)
        wrong = self._compare.count_different(target, source, self._size_bytes, LEGACY)
        word_count = self._size_bytes // WORD_BYTES
        return exact_verification(wrong, word_count, "all words of the source", "words are wrong")

    def _make_route(
        self, fill: Fill, sequence: int, source_location: Location, target_location: Location
    ) -> _Route:
        """Allocate both buffers of a copy, fill the source with random bits and the target with POISON."""
        source, target = (
            _Buffer(self._malloc(location), location)
            for location in (source_location, target_location)
        )
        # A kernel generates the random bits in device memory, where every copy has its source or its target.
        on_device = source if source_location == "device" else target
        block_count = -(-self._size_bytes // _RANDOM_BLOCK_BYTES)
        fill.bits(on_device.ptr, block_count, LEGACY, seed=self._seed, sequence=sequence)
        if on_device is not source:
            self._gpu.copy(source.ptr, on_device.ptr, self._size_bytes, LEGACY)
        self._gpu.sync()
        route = _Route(target, source)
        self._poison([route])
        return route

    def _malloc(self, location: Location) -> Ptr:
        gpu, peer, cleanup = self._gpu, self._peer, self._cleanup
        size_bytes = -(-self._size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if location == "peer" and peer is not None:
            ptr = gpu.peer_malloc(peer, size_bytes)
            cleanup.callback(gpu.peer_free, peer, ptr)
            return ptr
        if location == "device":
            return allocate(gpu, cleanup, size_bytes)
        ptr = gpu.host_malloc(size_bytes, pinned=location != "pageable")
        cleanup.callback(gpu.host_free, ptr)
        return ptr

    def _poison(self, routes: Iterable[_Route]) -> None:
        """Overwrite the targets with POISON; earlier copies must have finished."""
        gpu, size_bytes = self._gpu, self._size_bytes
        for (ptr, location), _ in routes:
            if location in ("host", "pageable"):
                np.frombuffer(gpu.host_view(ptr, size_bytes), np.uint8)[:] = POISON
            elif location == "peer":
                gpu.copy(ptr, self._fill_staging(POISON), size_bytes, LEGACY)
            else:
                gpu.fill(ptr, POISON, size_bytes, LEGACY)
        gpu.sync()

    def _device_readable_ptr(self, ptr: Ptr, location: Location) -> Ptr:
        """Return an address where kernels can read the content of a buffer until the next call.

        Kernels can access pinned host memory by its host address (CUDA C++ Programming Guide, "Unified
        Virtual Address Space").
        """
        if location not in _INACCESSIBLE_LOCATIONS:
            return ptr
        staging_ptr = self._fill_staging(_STAGING_FILL)
        self._gpu.copy(staging_ptr, ptr, self._size_bytes, LEGACY)
        return staging_ptr

    def _fill_staging(self, fill_byte: int) -> Ptr:
        """Enqueue a fill of the staging buffer, and return its address."""
        if self._staging_ptr is None:
            self._staging_ptr = self._malloc("device")
        self._gpu.fill(self._staging_ptr, fill_byte, self._size_bytes, LEGACY)
        return self._staging_ptr


def other_devices(gpu: _LinkedDevice) -> dict[int, Access]:
    """Return the index of each other device, and whether copies to it are direct or staged."""
    measured_index, access_by_device = gpu.facts().index, dict[int, Access]()
    for ordinal in count():
        if ordinal == measured_index:
            continue
        try:
            access_by_device[ordinal] = "direct" if gpu.can_access_peer(ordinal) else "staged"
        except CudaError as error:
            if error.name != "CUDA_ERROR_INVALID_DEVICE":
                raise
            return access_by_device
    raise AssertionError("unreachable: count() does not end")


def _explain_rate(cases: Sequence[CaseResult]) -> str:
    directions = {case.axes.get("direction") for case in cases}
    sentences: list[str] = []
    if directions == {"d2d"}:
        sentences.append("Rate: of all bytes read and written.")
    else:
        texts = ["for d2d of all bytes read and written"] if "d2d" in directions else []
        if summed := " and ".join(name for name in ("both", "peer-both") if name in directions):
            texts.append(f"for {summed} the sum of the two directions")
        sentences += [f"Rate: {'; '.join(texts)}."] if texts else []
    if any(case.axes.get("access") for case in cases):
        sentences.append("Access: direct between the GPUs, or staged in host memory.")
    return " ".join(sentences)


CopySpec.words = Words(rate=_explain_rate)
