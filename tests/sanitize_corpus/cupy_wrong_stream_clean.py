"""A stream waits for one of two others: the one whose result it reads."""

import cupy

first, second, third = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
numbers, others = cupy.ones(10_000, "f4"), cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
with second:
    others += 1
third.wait_event(first.record())
with third:
    doubled = numbers * 2
cupy.cuda.Device().synchronize()
