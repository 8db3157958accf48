"""The contract tests' kernels in numpy, equivalent to those in tests/contract/kernels.py."""

from __future__ import annotations

import numpy as np

from cudakit.gpu.api import Ptr
from cudakit.gpu.sim import Launch, host_kernel


@host_kernel("add")
def add(launch: Launch, data: Ptr, count: np.int32, amount: np.int32) -> None:
    launch.update(data, np.int32, count)[:] += amount


@host_kernel("store")
def store(launch: Launch, address: Ptr, value: np.int32) -> None:
    launch.write(address, np.int32)[:] = value


@host_kernel("move")
def move(launch: Launch, destination: Ptr, source: Ptr) -> None:
    launch.write(destination, np.int32)[:] = launch.read(source, np.int32)


@host_kernel("gather")
def gather(launch: Launch, target: Ptr, *numbers: np.generic) -> None:
    launch.write(target, np.float64, len(numbers))[:] = numbers


@host_kernel("spin")
def spin(launch: Launch, nanoseconds: np.uint64) -> None:
    launch.busy(int(nanoseconds))
