"""Compare: count different words of two buffers, and read a sample of elements.

The comparison runs on the device; only its result is copied to the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.arrays.launch import LoadedKernels, cuda_source
from cudakit.errors import UsageError
from cudakit.gpu.api import ComputeDevice, Ptr, Stream
from cudakit.gpu.api.arrays import Element, Floats, Launch, decode, host_kernel

_WORD_BYTES = 4

SOURCE = cuda_source("compare.cu")


class Compare(LoadedKernels):
    """Comparisons on one device. Each call is stream-ordered and synchronizes the stream."""

    def __init__(self, gpu: ComputeDevice) -> None:
        super().__init__(
            gpu, SOURCE, ("cudakit_differ", "cudakit_differ_from_word", "cudakit_gather")
        )
        self._memory = gpu

    def count_different(
        self, first_buffer: Ptr, second_buffer: Ptr, size_bytes: int, stream: Stream
    ) -> int:
        """Return the number of 32-bit words in which two buffers differ."""
        return self._count("cudakit_differ", (first_buffer, second_buffer), size_bytes, stream)

    def count_not_equal(self, ptr: Ptr, word: int, size_bytes: int, stream: Stream) -> int:
        """Return the number of 32-bit words that differ from ``word``."""
        return self._count("cudakit_differ_from_word", (ptr, np.uint32(word)), size_bytes, stream)

    def sample(
        self, ptr: Ptr, element: Element, indices: npt.NDArray[np.int64], stream: Stream
    ) -> Floats:
        """Return the elements with the given indices as fp64."""
        gpu, count, item_bytes = self._memory, len(indices), element.size_bytes
        if not count:
            return np.empty(0)
        with _scratch(gpu, count * (8 + item_bytes)) as (device, host, view):
            view[: 8 * count] = indices.astype(np.uint64).tobytes()
            gpu.copy(device, host, 8 * count, stream)
            values = Ptr(device + 8 * count)
            args = (values, ptr, device, np.uint64(count), np.int32(item_bytes))
            self.launch_over("cudakit_gather", count, args, stream)
            gpu.copy(host, values, item_bytes * count, stream)
            gpu.sync_stream(stream)
            bits: npt.NDArray[Any] = np.frombuffer(bytes(view), element.storage_dtype, count)
        return decode(bits, element)

    def _count(
        self, name: str, operands: tuple[Ptr | np.generic, ...], size_bytes: int, stream: Stream
    ) -> int:
        gpu = self._memory
        word_count, remainder = divmod(size_bytes, _WORD_BYTES)
        if remainder:
            raise UsageError(f"{size_bytes} bytes is not a whole number of 32-bit words")
        with _scratch(gpu, 8) as (device, host, view):
            gpu.fill(device, 0, 8, stream)
            self.launch_over(name, word_count, (device, *operands, np.uint64(word_count)), stream)
            gpu.copy(host, device, 8, stream)
            gpu.sync_stream(stream)
            return int(view.cast("Q")[0])


@contextmanager
def _scratch(gpu: ComputeDevice, size_bytes: int) -> Iterator[tuple[Ptr, Ptr, memoryview]]:
    """Yield device memory, and pinned host memory with its view, of one size."""
    device, host = gpu.malloc(size_bytes), gpu.host_malloc(size_bytes)
    try:
        yield device, host, gpu.host_view(host, size_bytes)
    finally:
        gpu.free(device)
        gpu.host_free(host)


@host_kernel("cudakit_differ")
def _differ(
    launch: Launch,
    mismatch_count: Ptr,
    first_buffer: Ptr,
    second_buffer: Ptr,
    word_count: np.uint64,
) -> None:
    differs = launch.read(first_buffer, np.uint32, int(word_count)) != launch.read(
        second_buffer, np.uint32, int(word_count)
    )
    _add(launch, mismatch_count, int(np.count_nonzero(differs)))


@host_kernel("cudakit_differ_from_word")
def _differ_from_word(
    launch: Launch, mismatch_count: Ptr, words: Ptr, word: np.uint32, word_count: np.uint64
) -> None:
    differs = launch.read(words, np.uint32, int(word_count)) != word
    _add(launch, mismatch_count, int(np.count_nonzero(differs)))


@host_kernel("cudakit_gather")
def _gather(
    launch: Launch,
    destination: Ptr,
    source_address: Ptr,
    indices: Ptr,
    word_count: np.uint64,
    element_bytes: np.int32,
) -> None:
    unsigned_type = np.dtype(f"u{element_bytes}")
    selected_indices = launch.read(indices, np.uint64, int(word_count))
    source = launch.read(source_address, unsigned_type, int(selected_indices.max()) + 1)
    launch.write(destination, unsigned_type, int(word_count))[:] = source[selected_indices]


def _add(launch: Launch, mismatch_count: Ptr, count: int) -> None:
    if count:
        launch.atomic(mismatch_count, np.uint64)[:] += np.uint64(count)
