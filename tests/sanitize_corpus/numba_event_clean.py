"""A kernel's stream waits for an event that stands for the kernel before."""

import numpy as np
from numba import cuda


@cuda.jit
def double(numbers):
    i = cuda.grid(1)
    if i < numbers.size:
        numbers[i] *= 2


first, second = cuda.stream(), cuda.stream()
done = cuda.event(timing=False)
numbers = cuda.to_device(np.ones(2048, np.float32), stream=first)
double[8, 256, first](numbers)
done.record(first)
done.wait(second)
double[8, 256, second](numbers)
cuda.synchronize()
