"""Count values in bins with a template kernel in CUDA C++, and compare with numpy."""

from __future__ import annotations

import sys

import numpy as np

import cudakit
from cudakit.gpu.sim import Launch, Sim

SOURCE = """
template <typename T>
__global__ void histogram(unsigned* bins, const T* values, T width, int bin_count, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const int bin = (int)(values[i] / width);
        if (bin >= 0 && bin < bin_count) atomicAdd(&bins[bin], 1u);
    }
}
"""


def histogram_on_host(
    launch: Launch, bins: int, values: int, width: np.generic, bin_count: np.int32, n: np.int32
) -> None:
    """Compute the same counts in numpy, for the simulated device."""
    indices = (launch.read(values, width.dtype, n) / width).astype(int)
    counts = np.bincount(indices, minlength=bin_count)[:bin_count]
    launch.atomic(bins, np.uint32, bin_count)[:] += counts.astype(np.uint32)


is_simulated = sys.argv[1:] == ["sim"]
device = Sim(host_kernels={"histogram": histogram_on_host}) if is_simulated else 0
values = np.random.default_rng(0).random(100_000, np.float32)
x = cudakit.to_device(values, device)
bins = cudakit.to_device(np.zeros(10, np.uint32), device)

cudakit.kernel(SOURCE)(bins, x, np.float32(0.1), 10, x.size, grid=64, block=256)

counts = bins.copy_to_host()
print("values per bin:", *counts)
assert counts.sum() == values.size
