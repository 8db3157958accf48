"""Two sums on two streams are written to the same cell."""

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers, totals = cupy.ones((2, 100_000), "f4"), cupy.zeros(2, "f4")
cupy.cuda.Device().synchronize()

with first:
    cupy.sum(numbers[0], out=totals[0])
with second:
    # WRONG: the cell is the first sum's.
    cupy.sum(numbers[1], out=totals[0])
cupy.cuda.Device().synchronize()
