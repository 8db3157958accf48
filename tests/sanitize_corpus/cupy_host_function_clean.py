"""A function of the host says that the kernel before it is done, and the host waits to be told."""

import threading

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers, reached = cupy.ones(10_000, "f4"), threading.Event()
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
first.launch_host_func(lambda event: event.set(), reached)
reached.wait()
with second:
    numbers *= 2
cupy.cuda.Device().synchronize()
