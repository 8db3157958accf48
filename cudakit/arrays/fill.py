"""Fill: random and constant values that are generated on the device.

Element i of a sequence depends on the seed, the sequence, i and whether the type is fp64, but not on the
grid. A Philox block generates four elements, or two of fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.arrays import random_values
from cudakit.arrays.launch import LoadedKernels, cuda_source
from cudakit.errors import UsageError
from cudakit.gpu.api import Kernels, Ptr, Stream
from cudakit.gpu.api.arrays import (
    ELEMENTS,
    FP64,
    INT8,
    Element,
    HostKernel,
    Launch,
    encode,
    host_kernel,
)

_WORDS_PER_BLOCK = 4
# Number of blocks that a host kernel computes at once: temporary arrays are large compared with the result.
_HOST_BLOCKS = 1 << 18
_STEP = 2.0**-23  # distance between the uniform values that one word generates
_FP64_STEP = 2.0**-52  # distance between the uniform values that two words generate

SOURCE = cuda_source("philox.cuh") + cuda_source("fill.cu")

_NAMES = ("bits", "uniform", "normal", "integers", "constant")
_ELEMENT_BY_CODE = {element.code: element for element in ELEMENTS.values()}


class Fill(LoadedKernels):
    """The fill kernels of one device. A fill of 0 elements launches nothing."""

    def __init__(self, gpu: Kernels) -> None:
        super().__init__(gpu, SOURCE, [f"cudakit_fill_{name}" for name in _NAMES])

    def bits(
        self,
        destination: Ptr,
        blocks: int,
        stream: Stream,
        *,
        seed: int,
        sequence: int = 0,
        first: int = 0,
    ) -> None:
        """Write the Philox blocks of a sequence, 16 bytes each, from block ``first``."""
        numbers = map(np.uint64, (blocks, first, sequence, seed))
        self.launch_over("cudakit_fill_bits", blocks, (destination, *numbers), stream)

    def uniform(
        self,
        destination: Ptr,
        count: int,
        element: Element,
        stream: Stream,
        *,
        seed: int,
        sequence: int = 0,
        scale: float | None = None,
    ) -> None:
        """Write uniform values in (-scale, scale), rounded to the type; the default is 1, or 127 for int8."""
        factor = scale if scale is not None else 127.0 if element is INT8 else 1.0
        self._random("uniform", destination, count, element, factor, sequence, seed, stream)

    def normal(
        self,
        destination: Ptr,
        count: int,
        element: Element,
        stream: Stream,
        *,
        seed: int,
        sequence: int = 0,
        scale: float | None = None,
    ) -> None:
        """Write normal values with mean 0 and standard deviation ``scale``: by default 1, or 32 for int8."""
        factor = scale if scale is not None else 32.0 if element is INT8 else 1.0
        self._random("normal", destination, count, element, factor, sequence, seed, stream)

    def integers(
        self,
        destination: Ptr,
        count: int,
        element: Element,
        stream: Stream,
        *,
        low: int,
        high: int,
        seed: int,
        sequence: int = 0,
    ) -> None:
        """Write integers in [low, high], a range of at most 2 ** 32 numbers."""
        value_count = high - low + 1
        if not 0 < value_count <= 1 << 32:
            raise UsageError(
                f"[{low}, {high}] has {value_count} integers; the range must have 1 to 2 ** 32"
            )
        args = (
            destination,
            np.uint64(count),
            np.int32(element.code),
            np.int64(low),
            np.uint64(value_count),
            np.uint64(sequence),
            np.uint64(seed),
        )
        self.launch_over("cudakit_fill_integers", -(-count // 4), args, stream)

    def constant(
        self, destination: Ptr, count: int, element: Element, stream: Stream, *, value: float
    ) -> None:
        """Write one value to all elements."""
        args = (destination, np.uint64(count), np.int32(element.code), np.float64(value))
        self.launch_over("cudakit_fill_constant", count, args, stream)

    def _random(
        self,
        name: str,
        destination: Ptr,
        count: int,
        element: Element,
        scale: float,
        sequence: int,
        seed: int,
        stream: Stream,
    ) -> None:
        numbers = (np.uint64(count), np.int32(element.code), np.float64(scale))
        args = (destination, *numbers, np.uint64(sequence), np.uint64(seed))
        block_count = -(-count // _elements_per_block(element))
        self.launch_over(f"cudakit_fill_{name}", block_count, args, stream)


def uniform_values(
    count: int, element: Element, sequence: int, seed: int, first_block: int = 0
) -> npt.NDArray[Any]:
    """Return the values in (-1, 1) that ``Fill.uniform`` scales and rounds."""
    words = _words(count, element, sequence, seed, first_block)
    if element is FP64:
        wide_words = words.view(np.int64)
        return (((wide_words >> 11) | 1) * _FP64_STEP)[:count]
    return (((words.view(np.int32) >> 8) | 1) * _STEP)[:count]


def normal_values(
    count: int, element: Element, sequence: int, seed: int, first_block: int = 0
) -> npt.NDArray[Any]:
    """Return the values with mean 0 and standard deviation 1 that ``Fill.normal`` scales and rounds."""
    words = _words(count, element, sequence, seed, first_block)
    if element is FP64:
        integer_pairs, unit = (words.view(np.uint64) >> np.uint64(11)).reshape(-1, 2), 2.0**-53
    else:
        integer_pairs, unit = words.reshape(-1, 2), 2.0**-32
    radius = np.sqrt(-2.0 * np.log((integer_pairs[:, 0] + 1.0) * unit))
    angle = 2.0 * np.pi * (integer_pairs[:, 1] * unit)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:count]


def _elements_per_block(element: Element) -> int:
    return 2 if element is FP64 else _WORDS_PER_BLOCK


def _words(
    count: int, element: Element, sequence: int, seed: int, first_block: int
) -> npt.NDArray[np.uint32]:
    block_count = -(-count // _elements_per_block(element))
    return random_values.philox(first_block, block_count, sequence, seed).reshape(-1)


@host_kernel("cudakit_fill_bits")
def _bits(
    launch: Launch,
    destination: Ptr,
    count: np.uint64,
    first: np.uint64,
    sequence: np.uint64,
    seed: np.uint64,
) -> None:
    words = launch.write(destination, np.uint32, int(count) * _WORDS_PER_BLOCK)
    for begin in range(0, int(count), _HOST_BLOCKS):
        block_count = min(_HOST_BLOCKS, int(count) - begin)
        blocks = random_values.philox(int(first) + begin, block_count, int(sequence), int(seed))
        words[begin * _WORDS_PER_BLOCK :][: blocks.size] = blocks.reshape(-1)


def _host_random(values: Callable[[int, Element, int, int, int], npt.NDArray[Any]]) -> HostKernel:
    def fill(
        launch: Launch,
        destination: Ptr,
        count: np.uint64,
        type_: np.int32,
        scale: np.float64,
        sequence: np.uint64,
        seed: np.uint64,
    ) -> None:
        element = _ELEMENT_BY_CODE[int(type_)]
        written_values = launch.write(destination, element.storage_dtype, int(count))
        elements_per_chunk = _HOST_BLOCKS * _elements_per_block(element)
        for begin in range(0, int(count), elements_per_chunk):
            element_count = min(elements_per_chunk, int(count) - begin)
            first_block = begin // _elements_per_block(element)
            unscaled_values = values(element_count, element, int(sequence), int(seed), first_block)
            written_values[begin : begin + element_count] = encode(scale * unscaled_values, element)

    return fill


host_kernel("cudakit_fill_uniform")(_host_random(uniform_values))
host_kernel("cudakit_fill_normal")(_host_random(normal_values))


@host_kernel("cudakit_fill_integers")
def _integers(
    launch: Launch,
    destination: Ptr,
    count: np.uint64,
    type_: np.int32,
    low: np.int64,
    value_count: np.uint64,
    sequence: np.uint64,
    seed: np.uint64,
) -> None:
    words = random_values.philox(
        0, -(-int(count) // _WORDS_PER_BLOCK), int(sequence), int(seed)
    ).reshape(-1)
    offsets = (words[: int(count)] * value_count >> np.uint64(32)).astype(np.int64)
    _write(launch, destination, _ELEMENT_BY_CODE[int(type_)], low + offsets)


@host_kernel("cudakit_fill_constant")
def _constant(
    launch: Launch, destination: Ptr, count: np.uint64, type_: np.int32, value: np.float64
) -> None:
    _write(launch, destination, _ELEMENT_BY_CODE[int(type_)], np.full(int(count), value))


def _write(launch: Launch, destination: Ptr, element: Element, values: npt.NDArray[Any]) -> None:
    launch.write(destination, element.storage_dtype, len(values))[:] = encode(values, element)
