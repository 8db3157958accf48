"""Poison: a pattern in output buffers that shows which elements were not written.

No result equals the pattern: as floating point it is NaN, and as an integer -2139062144, which sums of
products of 8-bit integers do not reach with fewer than 130 560 terms.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from cudakit.arrays.launch import LoadedKernels, cuda_source
from cudakit.gpu.api import Argument, ComputeDevice, Ptr, Stream
from cudakit.gpu.api.arrays import Element, Launch, host_kernel
from cudakit.gpu.api.gemm import Matrix

_NAN_BYTE, _INTEGER_BYTE = 0xFF, 0x80
_COUNTS_BYTES = 16

SOURCE = cuda_source("poison.cu")


class PoisonCounts(NamedTuple):
    """Numbers of elements of matrices and of their padding."""

    unwritten: int  # number of elements of matrices that are still poison
    overwritten: int  # number of elements of padding that are no longer poison


class Poison:
    """The poison kernel of one device, and its buffers."""

    def __init__(self, gpu: ComputeDevice) -> None:
        self._gpu = gpu
        with ExitStack() as cleanup:
            self._kernels = LoadedKernels(gpu, SOURCE, ["cudakit_count_poison"])
            cleanup.callback(self._kernels.close)
            self._device_counts = gpu.malloc(_COUNTS_BYTES)
            cleanup.callback(gpu.free, self._device_counts)
            self._host_counts = gpu.host_malloc(_COUNTS_BYTES)
            cleanup.callback(gpu.host_free, self._host_counts)
            self._cleanup = cleanup.pop_all()

    def fill(self, matrix_address: Ptr, element: Element, count: int, stream: Stream) -> None:
        """Enqueue a fill of ``count`` elements with poison."""
        self._gpu.fill(matrix_address, poison_byte(element), count * element.size_bytes, stream)

    def count(
        self, matrix_address: Ptr, matrix: Matrix, pitch: int, matrices: int, stream: Stream
    ) -> PoisonCounts:
        """Count remaining and overwritten poison in ``matrices`` matrices; synchronizes the stream.

        Matrices are ``pitch`` elements apart, and ``matrices * pitch`` elements were filled with poison.
        """
        gpu, element_bytes = self._gpu, matrix.element.size_bytes
        gpu.fill(self._device_counts, 0, _COUNTS_BYTES, stream)
        pattern = int.from_bytes(bytes([poison_byte(matrix.element)]) * element_bytes, "little")
        sizes = (matrix.rows, matrix.leading, matrix.elements, pitch, pitch * matrices)
        numbers = map(np.uint64, (pattern, *sizes))
        args: list[Argument] = [self._device_counts, matrix_address, *numbers]
        args.append(np.int32(element_bytes))
        self._kernels.launch_over("cudakit_count_poison", pitch * matrices, args, stream)
        gpu.copy(self._host_counts, self._device_counts, _COUNTS_BYTES, stream)
        gpu.sync_stream(stream)
        return PoisonCounts(*gpu.host_view(self._host_counts, _COUNTS_BYTES).cast("Q"))

    def close(self) -> None:
        """Free the buffers and unload the kernel."""
        self._cleanup.close()


def poison_byte(element: Element) -> int:
    """Return the byte of which the poison of a type consists."""
    return _INTEGER_BYTE if element.is_integer else _NAN_BYTE


@host_kernel("cudakit_count_poison")
def _count(
    launch: Launch,
    counts_address: Ptr,
    matrices: Ptr,
    pattern: np.uint64,
    rows: np.uint64,
    leading: np.uint64,
    elements: np.uint64,
    pitch: np.uint64,
    count: np.uint64,
    element_bytes: np.int32,
) -> None:
    unsigned_type = np.dtype(f"u{element_bytes}")
    poison = launch.read(matrices, unsigned_type, int(count)).reshape(
        -1, int(pitch)
    ) == unsigned_type.type(pattern)
    matrix_elements = poison[:, : int(elements)].reshape(-1, int(leading))[:, : int(rows)]
    unwritten_count = np.count_nonzero(matrix_elements)
    overwritten_count = (poison.size - np.count_nonzero(poison)) - (
        matrix_elements.size - unwritten_count
    )
    launch.atomic(counts_address, np.uint64, 2)[:] += np.array(
        [unwritten_count, overwritten_count], np.uint64
    )
