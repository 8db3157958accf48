"""race: A stream waits for one of two streams, but reads the result of the other.

fixed: A stream waits for the stream whose result it reads.
"""

import sys

import cupy

race = sys.argv[1] == "race"

first, second, third = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
numbers, others = cupy.ones(10_000, "f4"), cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
with second:
    others += 1
# WRONG if race: the first stream computes the array.
third.wait_event((second if race else first).record())
with third:
    doubled = numbers * 2
cupy.cuda.Device().synchronize()
