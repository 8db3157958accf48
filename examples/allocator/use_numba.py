"""Allocate arrays of Numba with cudakit, launch a kernel on these, and print the memory statistics."""

import numpy as np
from numba import cuda

import cudakit

allocator = cudakit.CachingAllocator()
allocator.record_history()
cuda.set_memory_manager(cudakit.numba_memory_manager(allocator))  # before Numba initializes CUDA


@cuda.jit
def add(total, numbers):
    i = cuda.grid(1)
    if i < numbers.size:
        total[i] += numbers[i]


total = cuda.to_device(np.zeros(1 << 20, dtype="f4"))
for number in range(10):
    numbers = cuda.to_device(np.full(1 << 20, number, dtype="f4"))
    add[1 << 12, 256](total, numbers)
assert (total.copy_to_host() == sum(range(10))).all()

statistics = allocator.statistics()
print(f"allocations: {statistics['allocation.all.allocated']}")
print(f"at most {statistics['allocated_bytes.all.peak'] / 2**20:.1f} MiB allocated")
print(f"{statistics['reserved_bytes.all.current'] / 2**20:.1f} MiB reserved")
allocator.save_snapshot("allocator-numba.pickle")
