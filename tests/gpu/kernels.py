"""Kernels for the simulated device, and helper functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cudakit.gpu.api import LEGACY, Argument, Kernel, Ptr, Stream
from cudakit.gpu.sim import Launch, Sim

ONE_THREAD = (1, 1, 1)
INT_BYTES = 4

SOURCE = """
extern "C" __global__ void mix(int* into, const int* from, int with) {}
extern "C" __global__ void store(int* where, int value) {}
extern "C" __global__ void spin(unsigned long long nanoseconds) {}
extern "C" __global__ void column(int* table, int rows, int columns, int value) {}
extern "C" __global__ void fail() {}
extern "C" __global__ void orphan() {}
"""


def mix(launch: Launch, destination: Ptr, source: Ptr, operand: np.int32) -> None:
    """A kernel whose result depends on the order of launches."""
    changed = launch.update(destination, np.int32)
    changed[:] = (
        changed.astype(np.int64) * 31 + launch.read(source, np.int32) + operand
    ) % 1_000_003


def store(launch: Launch, address: Ptr, value: np.int32) -> None:
    launch.write(address, np.int32)[:] = value


def spin(launch: Launch, nanoseconds: np.uint64) -> None:
    launch.busy(int(nanoseconds))


def column(launch: Launch, table: Ptr, rows: np.int32, columns: np.int32, value: np.int32) -> None:
    launch.write(table, np.int32, rows, step_bytes=INT_BYTES * int(columns))[:] = value


def fail(launch: Launch) -> None:
    raise ZeroDivisionError(launch.name)


HOST_KERNELS: Mapping[str, Callable[..., None]] = {
    "mix": mix,
    "store": store,
    "spin": spin,
    "column": column,
    "fail": fail,
}


class SimBench:
    """A simulated device with these kernels loaded."""

    def __init__(self, **options: Any) -> None:
        self.gpu = Sim(host_kernels=HOST_KERNELS, **options)
        module = self.gpu.load(self.gpu.compile(SOURCE))
        names = [*HOST_KERNELS, "orphan"]
        self.kernels: dict[str, Kernel] = {name: self.gpu.kernel(module, name) for name in names}

    def launch(self, name: str, *args: Argument, stream: Stream = LEGACY) -> None:
        self.gpu.launch(self.kernels[name], ONE_THREAD, ONE_THREAD, args, stream)

    def mix(self, destination: Ptr, source: Ptr, operand: int, stream: Stream) -> None:
        self.launch("mix", destination, source, np.int32(operand), stream=stream)

    def store(self, address: Ptr, value: int, stream: Stream = LEGACY) -> None:
        self.launch("store", address, np.int32(value), stream=stream)

    def spin(self, nanoseconds: int, stream: Stream = LEGACY) -> None:
        self.launch("spin", np.uint64(nanoseconds), stream=stream)

    def ints(self, count: int = 1) -> Ptr:
        """Allocate integers that are zero."""
        ptr = self.gpu.malloc(INT_BYTES * count)
        self.gpu.fill(ptr, 0, INT_BYTES * count, LEGACY)
        self.gpu.sync()
        return ptr

    def read(self, ptr: Ptr, count: int = 1) -> list[int]:
        """Wait for all work, and read."""
        self.gpu.sync()
        pinned = self.gpu.host_malloc(INT_BYTES * count)
        self.gpu.copy(pinned, ptr, INT_BYTES * count, LEGACY)
        self.gpu.sync()
        values = np.frombuffer(self.gpu.host_view(pinned, INT_BYTES * count), np.int32).tolist()
        self.gpu.host_free(pinned)
        return values
