"""A kernel reads counters to which another stream adds atomically."""

import numpy as np
from numba import cuda


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
double[1, 32, second](counters, doubled)  # WRONG: counts in the making
cuda.synchronize()
