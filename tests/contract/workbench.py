"""A device with the contract tests' kernels, and helper functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, Argument, Dim3, Event, Gpu, Kernel, Ptr, Stream
from cudakit.gpu.driver_errors import Status

ONE_THREAD: Dim3 = (1, 1, 1)
INT_BYTES = 4
# Much longer than enqueuing a few calls, so that unordered work runs first.
LONG_NS = 50_000_000

NAMES = ("add", "store", "move", "gather", "spin")


@contextmanager
def refused(status: Status) -> Iterator[pytest.ExceptionInfo[CudaError]]:
    """Expect a CudaError with this status."""
    with pytest.raises(CudaError) as caught:
        yield caught
    assert caught.value.name == f"CUDA_ERROR_{status.name}"
    assert caught.value.code == status


class Workbench:
    """A device under test."""

    def __init__(self, gpu: Gpu, image: bytes) -> None:
        self.gpu = gpu
        self.module = gpu.load(image)
        self.kernels: dict[str, Kernel] = {name: gpu.kernel(self.module, name) for name in NAMES}

    def launch(
        self,
        name: str,
        *args: Argument,
        stream: Stream = LEGACY,
        grid: Dim3 = ONE_THREAD,
        block: Dim3 = ONE_THREAD,
    ) -> None:
        self.gpu.launch(self.kernels[name], grid, block, args, stream)

    def add(self, ptr: Ptr, count: int, amount: int, stream: Stream = LEGACY) -> None:
        self.launch(
            "add",
            ptr,
            np.int32(count),
            np.int32(amount),
            stream=stream,
            grid=(4, 1, 1),
            block=(64, 1, 1),
        )

    def store(self, address: Ptr, value: int, stream: Stream) -> None:
        self.launch("store", address, np.int32(value), stream=stream)

    def move(self, destination: Ptr, source: Ptr, stream: Stream) -> None:
        self.launch("move", destination, source, stream=stream)

    def spin(self, stream: Stream, nanoseconds: int = LONG_NS) -> None:
        self.launch("spin", np.uint64(nanoseconds), stream=stream)

    def ints(self, *values: int) -> Ptr:
        """Allocate integers on the device."""
        ptr = self.gpu.malloc(INT_BYTES * len(values))
        self.write(ptr, np.array(values, dtype=np.int32))
        return ptr

    def write(self, ptr: Ptr, values: npt.NDArray[Any], stream: Stream = LEGACY) -> None:
        pinned = self.gpu.host_malloc(values.nbytes)
        self.gpu.host_view(pinned, values.nbytes)[:] = values.tobytes()
        self.gpu.copy(ptr, pinned, values.nbytes, stream)
        self.gpu.sync_stream(stream)
        self.gpu.host_free(pinned)

    def read_bytes(self, ptr: Ptr, size_bytes: int) -> bytes:
        """Wait for all work, and read device memory."""
        self.gpu.sync()
        pinned = self.gpu.host_malloc(size_bytes)
        self.gpu.copy(pinned, ptr, size_bytes, LEGACY)
        self.gpu.sync_stream(LEGACY)
        content = bytes(self.gpu.host_view(pinned, size_bytes))
        self.gpu.host_free(pinned)
        return content

    def read(self, ptr: Ptr, count: int = 1) -> list[int]:
        return [
            int(value) for value in np.frombuffer(self.read_bytes(ptr, INT_BYTES * count), np.int32)
        ]

    def recorded(self, stream: Stream, *, timing: bool = True) -> Event:
        event = self.gpu.event(timing=timing)
        self.gpu.record(event, stream)
        return event
