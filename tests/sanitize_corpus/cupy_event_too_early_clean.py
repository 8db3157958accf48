"""A stream waits for an event that is recorded behind the kernel it stands for."""

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers, results = cupy.ones(10_000, "f4"), cupy.zeros(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    cupy.multiply(numbers, 2, out=results)
done = first.record()
second.wait_event(done)
with second:
    results += 1
cupy.cuda.Device().synchronize()
