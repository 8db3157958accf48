"""The kernels of the contract in numpy; tests/contract/kernels.py has the same in CUDA C++."""

from __future__ import annotations

import numpy as np

from cudakit.gpu.api import Ptr
from cudakit.gpu.sim import Launch, twin


@twin("add")
def add(launch: Launch, data: Ptr, count: np.int32, amount: np.int32) -> None:
    launch.update(data, np.int32, count)[:] += amount


@twin("store")
def store(launch: Launch, where: Ptr, value: np.int32) -> None:
    launch.write(where, np.int32)[:] = value


@twin("move")
def move(launch: Launch, to: Ptr, from_: Ptr) -> None:
    launch.write(to, np.int32)[:] = launch.read(from_, np.int32)


@twin("gather")
def gather(launch: Launch, out: Ptr, *numbers: np.generic) -> None:
    launch.write(out, np.float64, len(numbers))[:] = numbers


@twin("spin")
def spin(launch: Launch, nanoseconds: np.uint64) -> None:
    launch.busy(int(nanoseconds))
