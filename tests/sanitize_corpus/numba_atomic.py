"""race: A kernel reads counters to which another stream adds atomically.

fixed: Two kernels on two streams add to the same counters atomically.
"""

import sys

import numpy as np
from numba import cuda

race = sys.argv[1] == "race"


@cuda.jit
def count(counters):
    cuda.atomic.add(counters, cuda.threadIdx.x % 32, 1)


@cuda.jit
def double(counters, doubled):
    doubled[cuda.threadIdx.x] = counters[cuda.threadIdx.x] * 2


first, second = cuda.stream(), cuda.stream()
counters = cuda.to_device(np.zeros(32, np.int32))
doubled = cuda.to_device(np.zeros(32, np.int32))
cuda.synchronize()

count[4, 256, first](counters)
if race:
    double[1, 32, second](counters, doubled)  # WRONG: the counts are incomplete
else:
    count[4, 256, second](counters)
cuda.synchronize()
