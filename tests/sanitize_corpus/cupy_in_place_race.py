"""An array is changed in place on two streams, which know nothing of one another."""

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
with second:
    # WRONG: whether one is added before or after this is left to chance.
    numbers *= 2
cupy.cuda.Device().synchronize()
