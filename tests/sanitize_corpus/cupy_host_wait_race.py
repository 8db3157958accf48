"""The host waits for a stream before the kernel is put there, and then hands its array to another stream."""

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

first.synchronize()
with first:
    numbers += 1
with second:
    # WRONG: the host has waited for what was there before the kernel.
    numbers *= 2
cupy.cuda.Device().synchronize()
