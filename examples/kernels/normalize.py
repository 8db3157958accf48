"""Normalize the rows of a matrix with a reduction and two fused expressions, and compare with numpy."""

from __future__ import annotations

import sys

import numpy as np

import cudakit

device = sys.argv[1] if len(sys.argv) > 1 else 0
rows, columns = 64, 1000

row_mean = cudakit.reduction("mean(x)", axis=1, keepdims=True)
row_variance = cudakit.reduction("mean((x - m) * (x - m))", axis=1, keepdims=True)
normalize = cudakit.elementwise("z = (x - m) / sqrt(v + 1e-5); is_outlier = abs(z) > 3")

values = np.random.default_rng(0).normal(5, 2, (rows, columns)).astype(np.float32)
x = cudakit.to_device(values, device)
mean = row_mean(x)
z, is_outlier = normalize(x, mean, row_variance(x, mean))

expected = (values - values.mean(1, keepdims=True)) / np.sqrt(values.var(1, keepdims=True) + 1e-5)
error = np.abs(z.copy_to_host() - expected).max()
print(
    f"largest difference from numpy: {error:.1e}, values with |z| > 3: {is_outlier.copy_to_host().sum()}"
)
assert error < 1e-4
