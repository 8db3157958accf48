"""Two slices of bytes meet at an odd place, and overlap there by a single byte."""

import cupy

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.zeros(2003, "u1")
cupy.cuda.Device().synchronize()

with first:
    numbers[:1001] += cupy.uint8(1)
with second:
    # WRONG: byte 1000 is in both.
    numbers[1000:] += cupy.uint8(2)
cupy.cuda.Device().synchronize()
