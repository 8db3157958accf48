"""A kernel reads what a fill on another stream wrote, and waits for it."""

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

numbers.data.memset_async(0, numbers.nbytes, first)
second.wait_event(first.record())
with second:
    roots = cupy.sqrt(numbers)
cupy.cuda.Device().synchronize()
