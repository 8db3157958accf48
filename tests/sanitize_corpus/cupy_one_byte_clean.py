"""Two slices of bytes meet in the middle of a word, and share none of them."""

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.zeros(2003, "u1")
cupy.cuda.Device().synchronize()

with first:
    numbers[:1001] += cupy.uint8(1)
with second:
    numbers[1001:] += cupy.uint8(2)
cupy.cuda.Device().synchronize()
