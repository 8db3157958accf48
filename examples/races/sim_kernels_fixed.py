"""Two kernels on two streams update the same numbers, one after the other (simulated device)."""

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
added = gpu.event(timing=False)
gpu.record(added, first)
gpu.wait(second, added)
gpu.launch(kernel, (4, 1, 1), (256, 1, 1), arguments, second)

gpu.sync()
gpu.close()
