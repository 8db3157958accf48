"""A third stream waits for the second, which forgot to wait for the first."""

import cupy

first, second, third = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
numbers, others = cupy.ones(10_000, "f4"), cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
with second:
    others += 1
third.wait_event(second.record())
with third:
    # WRONG: nothing leads from the first stream to this one.
    numbers += others
cupy.cuda.Device().synchronize()
