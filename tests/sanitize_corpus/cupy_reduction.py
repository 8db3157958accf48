"""race: Two sums on two streams are written to the same cell.

fixed: Two sums on two streams are written to neighbouring cells of one array.
"""

import sys

import cupy

race = sys.argv[1] == "race"

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers, totals = cupy.ones((2, 100_000), "f4"), cupy.zeros(2, "f4")
cupy.cuda.Device().synchronize()

with first:
    cupy.sum(numbers[0], out=totals[0])
with second:
    # WRONG if race: the cell is the first sum's.
    cupy.sum(numbers[1], out=totals[0 if race else 1])
cupy.cuda.Device().synchronize()
