"""race: Two kernels read an array; a third modifies it on the stream of one, unordered with the other.

fixed: Two kernels on two streams read one array that no kernel modifies: readers need no order.
"""

import sys

import cupy

race = sys.argv[1] == "race"

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.arange(5000, dtype="f4")
cupy.cuda.Device().synchronize()

with first:
    roots = cupy.sqrt(numbers)
with second:
    squares = cupy.square(numbers)
    if race:
        # WRONG: the first stream may still be reading.
        numbers *= 2
    else:
        squares *= 2
cupy.cuda.Device().synchronize()
