"""A kernel reads what a fill on another stream writes."""

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

numbers.data.memset_async(0, numbers.nbytes, first)
with second:
    # WRONG: the ones may still be there.
    roots = cupy.sqrt(numbers)
cupy.cuda.Device().synchronize()
