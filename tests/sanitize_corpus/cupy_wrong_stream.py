"""race: A stream waits for one of two others: not for the one whose result it reads.

fixed: A stream waits for one of two others: the one whose result it reads.
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
# WRONG if race: the array comes from the first stream.
third.wait_event((second if race else first).record())
with third:
    doubled = numbers * 2
cupy.cuda.Device().synchronize()
