"""Two kernels on two streams add to the same counters atomically."""

import numpy as np
from numba import cuda


@cuda.jit
def count(counters):
    cuda.atomic.add(counters, cuda.threadIdx.x % 32, 1)


first, second = cuda.stream(), cuda.stream()
counters = cuda.to_device(np.zeros(32, np.int32))
cuda.synchronize()

count[4, 256, first](counters)
count[4, 256, second](counters)
cuda.synchronize()
