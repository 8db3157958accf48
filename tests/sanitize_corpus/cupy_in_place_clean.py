"""An array is changed in place on two streams, the second of which waits for the first."""

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
second.wait_event(first.record())
with second:
    numbers *= 2
cupy.cuda.Device().synchronize()
