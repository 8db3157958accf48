"""Allocate buffers of cuda.core with cudakit, launch a kernel on these, and print the memory statistics."""

import numpy as np
from cuda.core import (
    Device,
    LaunchConfig,
    LegacyPinnedMemoryResource,
    Program,
    ProgramOptions,
    launch,
)

import cudakit

COUNT = 1 << 20
SOURCE = """
extern "C" __global__ void fill(float *numbers, float value, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        numbers[i] = value;
}
"""

device = Device(0)
device.set_current()
stream = device.create_stream()

resource = cudakit.CachingMemoryResource(0)
resource.allocator.record_history()
device.memory_resource = resource  # device.allocate now uses this resource

program = Program(SOURCE, "c++", ProgramOptions(arch=f"sm_{device.arch}"))
kernel = program.compile("cubin").get_kernel("fill")
config = LaunchConfig(grid=COUNT // 256, block=256)

result = LegacyPinnedMemoryResource().allocate(4 * COUNT)
for value in range(10):
    with device.allocate(4 * COUNT, stream=stream) as numbers:  # every step reuses the same memory
        launch(stream, config, kernel, numbers, np.float32(value), np.int32(COUNT))
        numbers.copy_to(result, stream=stream)
stream.sync()
assert (np.from_dlpack(result).view("f4") == 9).all()

statistics = resource.statistics()
print(f"allocations: {statistics['allocation.all.allocated']}")
print(f"at most {statistics['allocated_bytes.all.peak'] / 2**20:.1f} MiB allocated")
print(f"{statistics['reserved_bytes.all.current'] / 2**20:.1f} MiB reserved")
resource.allocator.save_snapshot("allocator-cuda-core.pickle")
