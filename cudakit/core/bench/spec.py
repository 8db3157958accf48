"""Specs: which bench, of what, and how precisely. One dataclass for each bench.

A Spec is valid by itself; ``plan`` checks whether the device supports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeAlias, get_args

from cudakit.core.bench.method import Cache, Method, Mode, Rule
from cudakit.errors import InputError
from cudakit.gpu.api import Gpu, Ptr, Stream
from cudakit.gpu.api.gemm import LIBRARIES, Algorithm, Gemm, GemmSettings, Library
from cudakit.kernels.bandwidth import WIDTH_BYTES

# The driver's ways to allocate memory.
DRIVER_ALLOCATORS = ("driver", "stream-ordered", "pinned", "virtual")
OPERATIONS = ("read", "write", "copy", "scale", "triad")
# From host to device, back, both ways at the same time; the same with pageable memory of the host; within
# the device; from it to each other one, and both ways at the same time.
DIRECTIONS = ("h2d", "d2h", "both", "pageable-h2d", "pageable-d2h", "d2d", "peer", "peer-both")
CALLS = (
    "launch",
    "launch-to-start",
    "launch-to-finish",
    "launch-back-to-back",
    "event-record",
    "stream-synchronize",
    "event-create-destroy",
    "stream-create-destroy",
)
TOPOLOGIES = ("chain", "fork-join")
NODE_KINDS = ("kernel", "fill", "copy")
# Timed until the call returns, except run (device time), replay and eager (host time until the device is
# done). first-launch launches a graph that was not uploaded.
STEPS = (
    "capture",
    "instantiate",
    "update",
    "upload",
    "first-launch",
    "launch",
    "run",
    "replay",
    "eager",
)
# The data of matrices; int are small integers, whose sums are exact.
FILLS = ("uniform", "normal", "int", "zeros", "ones")

# Modes of enqueued work; mode call is only for latencies of the host.
_MODES = ("isolated", "batch", "graph", "host")

# After GEMMs on an idle device, clocks take longer to settle than after other work.
_HEAVY_WARMUP_S = 1.0
# Kernels compare words.
_WORD_BYTES = 4
_MOST_NODES = 100_000
_MOST_ROUNDS = 1000
_MOST_SAMPLES = 1_000_000
_MOST_WARMUP_S = 3600


class Allocator(Protocol):
    """Allocates memory in the order of a stream."""

    def alloc(self, size_bytes: int, stream: Stream) -> Ptr: ...
    def free(self, ptr: Ptr, stream: Stream) -> None: ...
    def close(self) -> None:
        """Release cached memory."""
        ...


# Makes an allocator of a device.
Opener: TypeAlias = Callable[[Gpu], Allocator]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The options of every bench. Raises InputError for invalid values, as do all Specs."""

    bench: ClassVar[str]

    seed: int = 0  # of all data
    warmup_s: float = 0.25  # at least, before each case
    rule: Rule = field(default_factory=Rule)  # when a case has enough samples
    rounds: int = 5  # each with buffers of its own
    blocker: bool = True  # whether launch gaps are hidden, where possible
    budget_s: float | None = None  # for all cases together, approximately; None is unlimited

    def __post_init__(self) -> None:
        _check_range("the seed", self.seed, 0, 2**64 - 1)
        _check_range("the warm-up", self.warmup_s, 0, _MOST_WARMUP_S)
        _check_range("the number of samples", self.rule.min_samples, 1, _MOST_SAMPLES)
        _check_range("the least time", self.rule.min_time_s, 0, math.inf)
        _check_range("the number of rounds", self.rounds, 1, _MOST_ROUNDS)
        _check_positive("the precision", self.rule.precision)
        _check_positive("the timeout", self.rule.timeout_s)
        if self.budget_s is not None:
            _check_positive("the time budget", self.budget_s)

    def method(self, mode: Mode, cache: Cache, fill: str = "no") -> Method:
        """Return the method of a case."""
        return Method(
            mode,
            cache,
            self.warmup_s,
            self.rule,
            blocker=self.blocker,
            rounds=self.rounds,
            fill=fill,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpec(Spec):
    """How fast kernels move the memory of the device."""

    bench: ClassVar[str] = "memory"

    operations: tuple[str, ...] = OPERATIONS
    sizes_bytes: tuple[int, ...] | None = None  # of each buffer; None is around the L2 cache
    mode: Mode | None = None  # None is batch; isolated on a simulated device
    cache: Cache = "hot"  # shows the capacity of the L2 cache

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        _check_names("operation", self.operations, OPERATIONS)
        _check_sizes(self.sizes_bytes, WIDTH_BYTES)
        _check_method(self.mode, self.cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySpec(Spec):
    """How fast the driver copies, between host and device, within the device, and to others."""

    bench: ClassVar[str] = "copy"

    directions: tuple[str, ...] | None = None  # None is all that the machine has
    sizes_bytes: tuple[int, ...] | None = None  # of each copy
    mode: Mode | None = (
        None  # None is host for pageable memory, whose copies block the host, else isolated
    )
    cache: Cache | None = None  # None is rotate within the device, else hot: the link is slower

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        if self.directions is not None:
            _check_names("direction", self.directions, DIRECTIONS)
        _check_sizes(self.sizes_bytes, _WORD_BYTES)
        _check_method(self.mode or "isolated", self.cache)
        if self.mode == "graph" and any(map(is_pageable, self.directions or ())):
            raise InputError(
                "copies of pageable memory wait for the host, and cannot be in a graph",
                hint="leave out --mode graph, or name other directions",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec(Spec):
    """How long launching, waiting and creating events and streams take."""

    bench: ClassVar[str] = "launch"

    calls: tuple[str, ...] = CALLS

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        _check_names("call", self.calls, CALLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocSpec(Spec):
    """How long it takes to allocate memory and to free it again.

    ``others`` make further allocators, by name.
    """

    bench: ClassVar[str] = "alloc"

    allocators: tuple[str, ...] | None = None  # the driver's and others', by name; None is all
    others: Mapping[str, Opener] = field(default_factory=dict)
    sizes_bytes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        if self.allocators is not None:
            _check_names("allocator", self.allocators, (*DRIVER_ALLOCATORS, *self.others))
        if taken := sorted(set(self.others) & set(DRIVER_ALLOCATORS)):
            raise InputError(f"{taken[0]!r} is the name of an allocator of the driver")
        _check_sizes(self.sizes_bytes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSpec(Spec):
    """What graphs cost to make and to launch, and what they save."""

    bench: ClassVar[str] = "graph"

    topologies: tuple[str, ...] = TOPOLOGIES
    kinds: tuple[str, ...] = ("kernel",)  # of the nodes
    nodes: tuple[int, ...] | None = None  # in a graph
    steps: tuple[str, ...] = STEPS

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        _check_names("topology", self.topologies, TOPOLOGIES)
        _check_names("kind of node", self.kinds, NODE_KINDS)
        _check_names("step", self.steps, STEPS)
        _check_some("nodes", self.nodes)
        for count in self.nodes or ():
            _check_range("the number of nodes", count, 1, _MOST_NODES)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSpec(Spec):
    """How fast libraries multiply matrices.

    ``library`` is measured; the samples of ``baselines`` are interleaved, on data of the same values. A
    product that one of several libraries does not offer is a result without figures; if nothing can be
    measured, that is an error.
    """

    bench: ClassVar[str] = "gemm"

    warmup_s: float = _HEAVY_WARMUP_S
    gemms: tuple[Gemm, ...]
    settings: GemmSettings = field(default_factory=GemmSettings)
    library: Library = "cublaslt"
    baselines: tuple[Library, ...] = ()
    fill: str = "uniform"
    mode: Mode = "batch"
    cache: Cache = "rotate"
    # Algorithms that replace the library's choice, and names of GEMMs: "llama3-8b qkv".
    algorithms: Mapping[Gemm, Algorithm] = field(default_factory=dict)
    shapes: Mapping[Gemm, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        if not self.gemms:
            raise InputError("no product was asked", hint="write for example 4096")
        _check_names("library", (self.library, *self.baselines), LIBRARIES)
        if twice := [
            name for name in self.baselines if (self.library, *self.baselines).count(name) > 1
        ]:
            raise InputError(f"{twice[0]} is to be compared with itself")
        _check_names("fill", (self.fill,), FILLS)
        _check_range("the workspace", self.settings.workspace_bytes, 0, math.inf)
        _check_method(self.mode, self.cache)
        if self.algorithms and self.library != "cublaslt":
            raise InputError(
                f"algorithms are cublaslt's, and {self.library} is to be measured",
                hint="leave out --library",
            )


def is_pageable(direction: str) -> bool:
    """Return whether a direction copies pageable host memory."""
    return direction.startswith("pageable")


def _check_sizes(sizes_bytes: tuple[int, ...] | None, unit_bytes: int) -> None:
    _check_some("sizes", sizes_bytes)
    for size_bytes in sizes_bytes or ():
        if size_bytes <= 0:
            raise InputError(
                f"a size of {size_bytes} bytes was asked, and there must be something to measure",
                hint="write for example 64MiB",
            )
        if size_bytes % unit_bytes:
            lower = max(size_bytes // unit_bytes, 1) * unit_bytes
            raise InputError(
                f"a size of {size_bytes} bytes was asked, which is no multiple of {unit_bytes}",
                hint=f"{lower} is one",
            )


def _check_names(what: str, names: Collection[str], known: tuple[str, ...]) -> None:
    hint = f"there are {', '.join(known)}"
    if not names:
        raise InputError(f"no {what} was asked", hint=hint)
    for name in names:
        if name not in known:
            raise InputError(f"no such {what}: {name!r}", hint=hint)


def _check_method(mode: str | None, cache: str | None) -> None:
    if mode is not None:
        _check_names("mode", (mode,), _MODES)
    if cache is not None:
        _check_names("cache", (cache,), get_args(Cache))


def _check_some(what: str, values: Collection[int] | None) -> None:
    if values is not None and not values:
        raise InputError(f"the list of {what} is empty", hint="leave it out to have the usual ones")


def _check_positive(what: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{what} is {value:g}, and must be a number above 0")


def _check_range(what: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most or math.isnan(value):
        bound = f"at least {least:,}" if math.isinf(most) else f"from {least:,} to {most:,}"
        seen = f"{value:,}" if isinstance(value, int) else f"{value:g}"
        raise InputError(f"{what} is {seen}, and must be {bound}")
