"""race: Two kernels modify every second and every fourth element of one array, which overlap.

fixed: Two kernels modify the even and the odd elements of one array, through strided slices.
"""

import sys

import numpy as np
from numba import cuda

race = sys.argv[1] == "race"


@cuda.jit
def add(numbers):
    i = cuda.grid(1)
    if i < numbers.size:
        numbers[i] += 1


first, second = cuda.stream(), cuda.stream()
numbers = cuda.to_device(np.zeros(2048, np.float32))
if race:
    some, others = numbers[::2], numbers[4::4]  # WRONG: every fourth element is an even one
else:
    some, others = numbers[::2], numbers[1::2]
cuda.synchronize()

add[8, 128, first](some)
add[8, 128, second](others)
cuda.synchronize()
