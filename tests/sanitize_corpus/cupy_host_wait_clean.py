"""The host waits for a stream, and then hands its array to another one."""

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
first.synchronize()
with second:
    numbers *= 2
cupy.cuda.Device().synchronize()
