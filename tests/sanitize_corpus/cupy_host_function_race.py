"""A function of the host says that the stream has got to it; the kernel comes behind it."""

import threading

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers, reached = cupy.ones(10_000, "f4"), threading.Event()
cupy.cuda.Device().synchronize()

first.launch_host_func(lambda event: event.set(), reached)
with first:
    numbers += 1
reached.wait()
with second:
    # WRONG: the function ran before the kernel.
    numbers *= 2
cupy.cuda.Device().synchronize()
