"""Allocate arrays of CuPy with cudakit on three streams, and print the memory statistics."""

import cupy
import numpy as np

import cudakit

allocator = cudakit.CachingAllocator()
allocator.record_history()
cupy.cuda.set_allocator(cudakit.cupy_allocator(allocator))

host = np.random.default_rng(0).random((3, 512, 512), dtype="f4")
expected = (host @ host).sum(axis=(1, 2))

streams = [cupy.cuda.Stream(non_blocking=True) for _ in host]
sums = []
for matrix, stream in zip(host, streams, strict=True):
    with stream:
        on_device = cupy.asarray(matrix)
        sums.append((on_device @ on_device).sum())
for stream in streams:
    stream.synchronize()
results = np.array([float(value) for value in sums])
assert np.allclose(results, expected, rtol=1e-3)

statistics = allocator.statistics()
print(f"allocations: {statistics['allocation.all.allocated']}")
print(f"at most {statistics['allocated_bytes.all.peak'] / 2**20:.1f} MiB allocated")
print(f"{statistics['reserved_bytes.all.current'] / 2**20:.1f} MiB reserved")
allocator.save_snapshot("allocator-cupy.pickle")
