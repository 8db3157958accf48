"""race: Two slices of bytes overlap by one byte at an odd address.

fixed: Two slices of bytes meet in the middle of a word, without shared bytes.
"""

import sys

import cupy

race = sys.argv[1] == "race"

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.zeros(2003, "u1")
cupy.cuda.Device().synchronize()

with first:
    numbers[:1001] += cupy.uint8(1)
with second:
    # WRONG if race: byte 1000 is in both.
    numbers[(1000 if race else 1001) :] += cupy.uint8(2)
cupy.cuda.Device().synchronize()
