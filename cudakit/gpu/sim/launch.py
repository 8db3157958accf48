"""The launch of a kernel that runs on the host: its threads and its checked access to simulated memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.gpu.api import Dim3
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.sim.schedule import Poll
from cudakit.gpu.sim.space import Bytes, Span
from cudakit.trace.events import Access
from cudakit.trace.kinds import AccessMode


@dataclass(slots=True)
class SimLaunch:
    """Implements ``api.host_kernels.Launch`` on the memory of a simulated device."""

    name: str
    grid: Dim3
    block: Dim3
    shared_bytes: int
    span: Callable[[int, int, str], Span]
    begin_ns: int = 0  # virtual time at which the launch begins
    clock_khz: int = 1_000_000  # SM clock
    busy_ns: int = 0
    poll_loop: Poll | None = None
    accesses: list[Access] = field(default_factory=list)
    _range_copies: list[tuple[Span, Bytes]] = field(default_factory=list)

    @property
    def threads(self) -> int:
        return prod(self.grid) * prod(self.block)

    def read(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        array = self._view(ptr, np.dtype(dtype), int(count), step_bytes, AccessMode.READ)
        array.flags.writeable = False
        return array

    def write(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        return self._view(ptr, np.dtype(dtype), int(count), step_bytes, AccessMode.WRITE)

    def update(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        return self._view(
            ptr, np.dtype(dtype), int(count), step_bytes, AccessMode.READ | AccessMode.WRITE
        )

    def atomic(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        mode = AccessMode.READ | AccessMode.WRITE | AccessMode.ATOMIC
        return self._view(ptr, np.dtype(dtype), int(count), step_bytes, mode)

    def busy(self, nanoseconds: int) -> None:
        self.busy_ns += int(nanoseconds)

    def poll(
        self, is_done: Callable[[], bool], timeout_ns: int, on_timeout: Callable[[], None]
    ) -> None:
        self.poll_loop = Poll(is_done, timeout_ns, on_timeout)

    @property
    def begin_cycles(self) -> int:
        return self.begin_ns * self.clock_khz // 1_000_000

    def finish(self) -> None:
        """Write back the copies of ranges that span several regions."""
        for span, copy in self._range_copies:
            span.scatter(copy)

    def _view(
        self, ptr: int, dtype: np.dtype[Any], count: int, step_bytes: int, mode: AccessMode
    ) -> npt.NDArray[Any]:
        if count <= 0:
            return np.empty(0, dtype)
        element_step_bytes = step_bytes or dtype.itemsize
        if ptr % dtype.alignment or element_step_bytes % dtype.alignment:
            access_text = f"{self.name} uses {ptr:#x} as {dtype}, step {element_step_bytes}"
            raise cuda_error(Status.MISALIGNED_ADDRESS, detail=access_text)
        size_bytes = element_step_bytes * (count - 1) + dtype.itemsize
        span = self.span(ptr, size_bytes, self.name)
        content = span.gather()
        if len(span.parts) > 1 and mode != AccessMode.READ:
            self._range_copies.append((span, content))
        is_strided = element_step_bytes != dtype.itemsize
        self.accesses.append(
            Access(
                ptr,
                ptr + size_bytes,
                mode,
                stride_bytes=element_step_bytes if is_strided else 0,
                count=count if is_strided else 0,
            )
        )
        return np.ndarray((count,), dtype, content, strides=(element_step_bytes,))
