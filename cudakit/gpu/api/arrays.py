"""Views of device arrays, in the form that kernels take: address, dtype, shape and strides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from cudakit.gpu.api.values import Ptr


@dataclass(frozen=True, slots=True)
class ArrayView:
    """An array in device memory, without ownership of the memory."""

    ptr: Ptr
    dtype: str  # name of the dtype in numpy
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # distance between elements in bytes, for each dimension
    read_only: bool = False

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...], element_bytes: int) -> tuple[int, ...]:
    """Return the strides in bytes of a C-contiguous array."""
    strides = []
    stride = element_bytes
    for extent in reversed(shape):
        strides.append(stride)
        stride *= max(extent, 1)
    return tuple(reversed(strides))


def byte_range(view: ArrayView, element_bytes: int) -> tuple[int, int]:
    """Return the first address of an array and the address after its last byte; strides may be negative."""
    first_offset, end_offset = _byte_offsets(view.shape, view.strides, element_bytes)
    return view.ptr + first_offset, view.ptr + end_offset


@lru_cache(maxsize=4096)
def _byte_offsets(
    shape: tuple[int, ...], strides: tuple[int, ...], element_bytes: int
) -> tuple[int, int]:
    """Return the offsets of the first byte of an array and of the byte after its last one."""
    if 0 in shape:
        return 0, 0
    offsets = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    first_offset = sum(offset for offset in offsets if offset < 0)
    last_offset = sum(offset for offset in offsets if offset > 0)
    return first_offset, last_offset + element_bytes
