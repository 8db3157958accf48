"""The host asks until an event is reached, and only then enqueues what needs it."""

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
done = first.record()
while not done.done:
    pass
with second:
    numbers *= 2
cupy.cuda.Device().synchronize()
