"""Two kernels on two streams read one array, which nobody changes: readers need no order."""

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.arange(5000, dtype="f4")
cupy.cuda.Device().synchronize()

with first:
    roots = cupy.sqrt(numbers)
with second:
    squares = cupy.square(numbers)
    squares *= 2
cupy.cuda.Device().synchronize()
