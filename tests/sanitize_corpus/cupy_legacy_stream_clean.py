"""Kernels of two ordinary streams have one of the legacy default stream between them, which orders all."""

import cupy

first, second = (cupy.cuda.Stream() for _ in range(2))
numbers, others = cupy.ones(10_000, "f4"), cupy.ones(10_000, "f4")
cupy.cuda.Device().synchronize()

with first:
    numbers += 1
others *= 2
with second:
    numbers += others
cupy.cuda.Device().synchronize()
