"""A stream waits for an event that was recorded before the kernel it is meant to stand for."""

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers, results = cupy.ones(10_000, "f4"), cupy.zeros(10_000, "f4")
cupy.cuda.Device().synchronize()

# WRONG: the event stands for what is in the stream by now, which is nothing.
done = first.record()
with first:
    cupy.multiply(numbers, 2, out=results)
second.wait_event(done)
with second:
    results += 1
cupy.cuda.Device().synchronize()
