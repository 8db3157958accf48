"""race: Two sums on two streams are written to the same element.

fixed: Two sums on two streams are written to adjacent elements of one array.
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
    # WRONG if race: the first sum writes the same element.
    cupy.sum(numbers[1], out=totals[0 if race else 1])
cupy.cuda.Device().synchronize()
