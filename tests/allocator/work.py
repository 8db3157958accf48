"""An allocator on a simulated GPU with busy streams."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
from allocator import invariants

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.upstream import GpuUpstream
from cudakit.gpu.api import Stream
from cudakit.gpu.sim import Launch, Sim

_SOURCE = 'extern "C" __global__ void spin(unsigned long long nanoseconds) {}'
_LONG_NS = 1_000_000_000
_ONE = (1, 1, 1)


def _spin(launch: Launch, nanoseconds: np.uint64) -> None:
    launch.busy(int(nanoseconds))


class Work:
    """A simulated GPU, its allocator, and work for its streams."""

    def __init__(self, capacity_bytes: int = 1 << 30, **options: Any) -> None:
        self.gpu = Sim(capacity_bytes=capacity_bytes, host_kernels={"spin": _spin})
        self._spin = self.gpu.kernel(self.gpu.load(self.gpu.compile(_SOURCE)), "spin")
        self.allocator = DeviceCachingAllocator(GpuUpstream(self.gpu), **options)

    def stream(self) -> Stream:
        return self.gpu.stream(blocking=False)

    def busy(self, stream: Stream, times: int = 1) -> None:
        """Keep a stream busy for a second of virtual time or more."""
        self.gpu.launch(self._spin, _ONE, _ONE, (np.uint64(times * _LONG_NS),), stream)

    def __enter__(self) -> Work:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            invariants.check(self.allocator)
        self.gpu.close()
