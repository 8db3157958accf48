"""A stream waits for an event that was recorded twice: the last record before the wait counts."""

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers, done = cupy.ones(10_000, "f4"), cupy.cuda.Event()
cupy.cuda.Device().synchronize()

first.record(done)
with first:
    numbers += 1
first.record(done)
second.wait_event(done)
with second:
    numbers *= 2
cupy.cuda.Device().synchronize()
