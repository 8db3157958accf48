"""Workloads for tests: copies with optional wrong values, and kernels of given durations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from cudakit.arrays.bandwidth import Bandwidth
from cudakit.arrays.compare import Compare
from cudakit.arrays.fill import Fill
from cudakit.bench.case import Verification
from cudakit.gpu.api import LEGACY, Gpu, Kernel, Ptr, Stream
from cudakit.gpu.api.arrays import HostKernel
from cudakit.gpu.sim import Launch, Sim

FILLER = 0xFFFFFFFF


@dataclass
class Copy:
    """Copies a buffer; ``spoiled`` is a buffer set, and the number of runs after which it is overwritten."""

    size_bytes: int = 1 << 16
    spoiled: tuple[int, int] | None = None
    before_each: Callable[[], None] = lambda: None
    name: str = "copy"
    prepared: list[PreparedCopy] = field(default_factory=list)

    @property
    def axes(self) -> Mapping[str, str | int | float]:
        return {"size_bytes": self.size_bytes}

    def prepare(self, gpu: Gpu, seed: int) -> PreparedCopy:
        self.prepared.append(PreparedCopy(gpu, self, seed))
        return self.prepared[-1]


class PreparedCopy:
    operations = 0

    def __init__(self, gpu: Gpu, spec: Copy, seed: int) -> None:
        self.gpu, self.spec, self.seed = gpu, spec, seed
        self.closed = 0
        self.indices: list[int] = []
        self.sets: list[tuple[Ptr, Ptr]] = []
        self.kernels, self.compare = Bandwidth(gpu), Compare(gpu)
        self.rotate(1)

    @property
    def footprint_bytes(self) -> int:
        return 2 * self.spec.size_bytes

    @property
    def bytes_moved(self) -> int:
        return 2 * self.spec.size_bytes

    def rotate(self, sets: int) -> None:
        size_bytes = self.spec.size_bytes
        with closing(Fill(self.gpu)) as fill:
            while len(self.sets) < sets:
                target, source = self.gpu.malloc(size_bytes), self.gpu.malloc(size_bytes)
                blocks = size_bytes // 16
                fill.bits(source, blocks, LEGACY, seed=self.seed, sequence=len(self.sets))
                self.gpu.fill(target, 0xFF, size_bytes, LEGACY)
                self.sets.append((target, source))
            self.gpu.sync()

    def enqueue(self, stream: Stream, index: int) -> None:
        self.spec.before_each()
        self.indices.append(index)
        target, source = self.sets[index]
        self.kernels.copy(target, source, self.spec.size_bytes, stream)
        spoiled_set, runs = self.spec.spoiled or (-1, 0)
        if index == spoiled_set and len(self.indices) > runs:
            self.gpu.fill(target, 0, 4, stream)

    def verify(self) -> Verification:
        wrong = 0
        for target, source in self.sets:
            wrong += self.compare.count_different(target, source, self.spec.size_bytes, LEGACY)
            self.gpu.fill(target, 0xFF, self.spec.size_bytes, LEGACY)
        self.gpu.sync()
        return Verification(not wrong, float(wrong), 0.0, "the source", f"{wrong} words are wrong")

    def close(self) -> None:
        self.closed += 1
        if self.closed == 1:
            for pair in self.sets:
                for ptr in pair:
                    self.gpu.free(ptr)


SOURCE = """extern "C" __global__ void busy() {}"""


@dataclass
class Busy:
    """Launches a kernel that computes nothing and takes the duration that ``busy_device`` gives."""

    gpu: Gpu
    name: str = "busy"
    axes: Mapping[str, str | int | float] = field(default_factory=dict)
    operations: int = 0
    bytes_moved: int = 0
    footprint_bytes: int = 0
    runs: int = 0

    def __post_init__(self) -> None:
        self.kernel: Kernel = self.gpu.kernel(self.gpu.load(self.gpu.compile(SOURCE)), "busy")

    def prepare(self, gpu: Gpu, seed: int) -> Busy:  # noqa: ARG002
        return self

    def rotate(self, sets: int) -> None:
        raise AssertionError(f"{sets} sets of nothing")

    def enqueue(self, stream: Stream, index: int) -> None:  # noqa: ARG002
        self.runs += 1
        self.gpu.launch(self.kernel, (1, 1, 1), (1, 1, 1), (), stream)

    def verify(self) -> Verification:
        return Verification(True, 0.0, 0.0, "nothing")

    def close(self) -> None:
        pass


def busy_device(durations_ns: Iterable[int], **host_kernels: HostKernel) -> Sim:
    """Open a simulated device on which the runs of Busy take these durations; the last one is repeated."""
    remaining: Iterator[int] = iter(durations_ns)
    duration_ns = 0

    def busy(launch: Launch) -> None:
        nonlocal duration_ns
        duration_ns = next(remaining, duration_ns)
        launch.busy(duration_ns)

    return Sim(host_kernels={"busy": busy, **host_kernels})


def stamps_at(clocks_khz: Iterable[int]) -> HostKernel:
    """Return a timestamp kernel whose pairs of time stamps show these clocks; the last one is repeated."""
    remaining = iter(clocks_khz)
    state = {"launches": 0, "khz": 1_000_000, "begin_ns": 0}

    def timestamp(launch: Launch, stamps: Ptr, count: np.uint32) -> None:
        if state["launches"] % 2 == 0:
            state["khz"] = next(remaining, state["khz"])
            state["begin_ns"] = launch.begin_ns
        state["launches"] += 1
        passed_ns = launch.begin_ns - state["begin_ns"]
        words = launch.write(stamps, np.uint64, 2 * int(count)).reshape(-1, 2)
        words[:] = (1 + passed_ns * state["khz"] // 1_000_000, launch.begin_ns + 1)

    return timestamp
