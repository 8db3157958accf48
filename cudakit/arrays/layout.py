"""Layouts of arrays in kernels: broadcasting, merged dimensions and vector widths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.errors import UsageError

MAX_DIMENSIONS = 16
_VECTOR_BYTES = 16
_MAX_VECTOR = 8  # maximum number of elements of a vector; 16 if every element is one byte


@dataclass(frozen=True, slots=True)
class Layout:
    """The merged dimensions of broadcast arrays, the innermost first.

    ``strides`` has a tuple of byte distances for each array, one for each dimension; 0 repeats an element.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """The number of elements of the broadcast shape."""
        return math.prod(self.sizes)


def broadcast_shape(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the common shape of arrays, as numpy broadcasts. Raises UsageError that names the arrays."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        shape_descriptions = ", ".join(
            f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True)
        )
        raise UsageError(
            f"the shapes do not broadcast: {shape_descriptions}",
            hint="sizes of a dimension must be equal or 1, counted from the last dimension",
        ) from None


def merged_layout(
    shape: tuple[int, ...], arrays: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Layout:
    """Broadcast arrays, given as shape and strides, to a shape; merge dimensions if all arrays allow it.

    Raises UsageError if more than MAX_DIMENSIONS dimensions remain.
    """
    strides = [broadcast_strides(shape, *array) for array in arrays]
    sizes: list[int] = []
    merged_strides: list[list[int]] = [[] for _ in arrays]
    for axis in reversed(range(len(shape))):
        if shape[axis] == 1:
            continue
        axis_strides = [array[axis] for array in strides]
        if sizes and all(
            axis_strides[index] == merged_strides[index][-1] * sizes[-1]
            for index in range(len(arrays))
        ):
            sizes[-1] *= shape[axis]
            continue
        sizes.append(shape[axis])
        for index, stride in enumerate(axis_strides):
            merged_strides[index].append(stride)
    if len(sizes) > MAX_DIMENSIONS:
        raise UsageError(
            f"the arrays have {len(sizes)} dimensions that cannot be merged, at most "
            f"{MAX_DIMENSIONS} are supported",
            hint="make the arrays contiguous",
        )
    if not sizes:
        return Layout((1,), tuple((0,) for _ in arrays))
    return Layout(tuple(sizes), tuple(map(tuple, merged_strides)))


def broadcast_strides(
    target_shape: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the strides of an array that is broadcast to a shape; a repeated dimension has stride 0."""
    added_dimensions = len(target_shape) - len(shape)
    array_strides = tuple(
        0 if extent == 1 else stride for extent, stride in zip(shape, strides, strict=True)
    )
    return (0,) * added_dimensions + array_strides


def vector_width(
    layout: Layout, addresses: Sequence[int], element_sizes_bytes: Sequence[int]
) -> int:
    """Return the number of adjacent elements that a thread can load from every array at once.

    Every array must be contiguous or constant along the innermost dimension. With several dimensions, no
    vector may cross the end of the innermost one.
    """
    largest_width = 16 if max(element_sizes_bytes) == 1 else _MAX_VECTOR
    width = min(largest_width, _VECTOR_BYTES // min(element_sizes_bytes))
    while width > 1 and not _allows_width(layout, addresses, element_sizes_bytes, width):
        width //= 2
    return width


def _allows_width(
    layout: Layout, addresses: Sequence[int], element_sizes_bytes: Sequence[int], vector_size: int
) -> bool:
    if len(layout.sizes) > 1 and layout.sizes[0] % vector_size:
        return False
    for address, strides, element_bytes in zip(
        addresses, layout.strides, element_sizes_bytes, strict=True
    ):
        if strides[0] == 0:
            continue
        alignment = min(vector_size * element_bytes, _VECTOR_BYTES)
        is_aligned = all(offset % alignment == 0 for offset in (address, *strides[1:]))
        if strides[0] != element_bytes or not is_aligned:
            return False
    return True
