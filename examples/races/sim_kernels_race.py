"""Two kernels on two streams update the same numbers (simulated device, where all accesses are exact).

Each kernel runs as a Python function that changes simulated memory as the kernel would change device memory.
"""

import numpy as np

from cudakit.gpu.open import open_gpu
from cudakit.gpu.sim import host_kernel

COUNT = 1000
SOURCE = 'extern "C" __global__ void add(float* numbers, float amount, int count) {}'


@host_kernel("add")
def add(launch, numbers, amount, count):
    launch.update(numbers, np.float32, count)[:] += amount


gpu = open_gpu("sim")
first, second = gpu.stream(), gpu.stream()
numbers = gpu.malloc(4 * COUNT)
kernel = gpu.kernel(gpu.load(gpu.compile(SOURCE)), "add")
arguments = (numbers, np.float32(1), np.int32(COUNT))

gpu.launch(kernel, (4, 1, 1), (256, 1, 1), arguments, first)
# WRONG: the second stream does not wait for the first.
gpu.launch(kernel, (4, 1, 1), (256, 1, 1), arguments, second)

gpu.sync()
gpu.close()
