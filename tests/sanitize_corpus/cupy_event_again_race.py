"""A stream waits for an event whose record comes only after the wait: a later record changes nothing."""

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers, done = cupy.ones(10_000, "f4"), cupy.cuda.Event()
cupy.cuda.Device().synchronize()

first.record(done)
with first:
    numbers += 1
second.wait_event(done)
# WRONG: too late, the wait was for the record before.
first.record(done)
with second:
    numbers *= 2
cupy.cuda.Device().synchronize()
