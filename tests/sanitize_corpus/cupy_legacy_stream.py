"""race: A kernel of a non-blocking stream runs beside one of the legacy default stream.

fixed: Kernels of two ordinary streams have one of the legacy default stream between them, which orders all.
"""

import sys

import cupy

race = sys.argv[1] == "race"

first, second = (cupy.cuda.Stream(non_blocking=race) for _ in range(2))
numbers, others = cupy.ones(10_000, "f4"), cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
# WRONG if race: the default stream waits for ordinary streams only.
others *= 2
with second:
    numbers += others
cupy.cuda.Device().synchronize()
