"""race: A kernel on a non-blocking stream runs concurrently with one on the legacy default stream.

fixed: A kernel on the legacy default stream orders the kernels of two blocking streams around it.
"""

import sys

import cupy

race = sys.argv[1] == "race"

first, second = (cupy.cuda.Stream(non_blocking=race) for _ in range(2))
numbers, others = cupy.ones(10_000, "f4"), cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
# WRONG if race: the default stream waits for blocking streams only.
others *= 2
with second:
    numbers += others
cupy.cuda.Device().synchronize()
