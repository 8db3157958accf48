"""Ten steps on a simulated device: each copies a batch from pageable memory, and waits for the result."""

import numpy as np

from cudakit.gpu.open import open_gpu
from cudakit.gpu.sim import host_kernel

COUNT = 1 << 16
SOURCE = """
extern "C" __global__ void scale(float* numbers, float factor, int count) {}
extern "C" __global__ void add(float* numbers, float amount, int count) {}
"""


@host_kernel("scale")
def scale(launch, numbers, factor, count):
    launch.update(numbers, np.float32, count)[:] *= factor
    launch.busy(20_000)


@host_kernel("add")
def add(launch, numbers, amount, count):
    launch.update(numbers, np.float32, count)[:] += amount
    launch.busy(5_000)


gpu = open_gpu("sim")
stream = gpu.stream()
numbers = gpu.malloc(4 * COUNT)
batch = gpu.host_malloc(4 * COUNT, pinned=False)
module = gpu.load(gpu.compile(SOURCE))
kernels = [gpu.kernel(module, name) for name in ("scale", "add")]


def step():
    gpu.copy(numbers, batch, 4 * COUNT, stream)
    for kernel in kernels * 2:
        gpu.launch(
            kernel, (256, 1, 1), (256, 1, 1), (numbers, np.float32(2), np.int32(COUNT)), stream
        )
    gpu.sync_stream(stream)


for _ in range(10):
    step()
gpu.close()
