"""Strided arrays in the memory of a simulated device, for host kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.gpu.api.host_kernels import Launch

Values = npt.NDArray[Any]


def read_array(
    launch: Launch,
    address: int,
    dtype: np.dtype[Any],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
) -> Values:
    """Return the elements of an array; sizes and strides in bytes are given innermost first."""
    if 0 in sizes:
        return np.empty(sizes[::-1], dtype)
    first_address, offset, size_bytes = _byte_span(address, dtype, sizes, strides)
    content = launch.read(first_address, np.uint8, size_bytes)
    return np.ndarray(sizes[::-1], dtype, content, offset, strides[::-1])


def write_array(launch: Launch, address: int, values: Values, strides: tuple[int, ...]) -> None:
    """Store values in an array whose strides in bytes are given innermost first."""
    sizes = values.shape[::-1]
    first_address, offset, size_bytes = _byte_span(address, values.dtype, sizes, strides)
    # Between the elements of a strided array are bytes that the kernel does not overwrite.
    is_dense = size_bytes == values.size * values.itemsize
    access_memory = launch.write if is_dense else launch.update
    content = access_memory(first_address, np.uint8, size_bytes)
    np.ndarray(values.shape, values.dtype, content, offset, strides[::-1])[...] = values


def _byte_span(
    address: int, dtype: np.dtype[Any], sizes: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, int, int]:
    """Return the first address of an array, the offset of its first element, and its size in bytes."""
    extents = [(size - 1) * stride for size, stride in zip(sizes, strides, strict=True)]
    bytes_before = -sum(extent for extent in extents if extent < 0)
    bytes_after = sum(extent for extent in extents if extent > 0)
    return address - bytes_before, bytes_before, bytes_before + bytes_after + dtype.itemsize
