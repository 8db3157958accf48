"""Bandwidth: kernels that are bound by memory, with accesses of 16 bytes.

Copy, scale and triad are those of STREAM (J. D. McCalpin, "Memory Bandwidth and Machine Balance in Current
High Performance Computers", 1995).
"""

from __future__ import annotations

import numpy as np

from cudakit.arrays.launch import LoadedKernels, cuda_source
from cudakit.errors import UsageError
from cudakit.gpu.api import Kernels, Ptr, Stream
from cudakit.gpu.api.arrays import Launch, host_kernel

WIDTH_BYTES = 16
SENTINEL = 0x6B8B4567  # an arbitrary word, which benchmark data is unlikely to produce
# With one vector per thread in blocks of 256, an H200 copies device memory at 4268 GB/s; with four vectors
# per thread at 4020 GB/s, and with cuMemcpyAsync at 4230 GB/s.
_THREADS = 256
_VECTOR_FLOATS = 4  # number of floats of a vector

SOURCE = cuda_source("bandwidth.cu")

_NAMES = ("copy", "read", "write", "scale", "triad")


class Bandwidth(LoadedKernels):
    """The bandwidth kernels of one device. Sizes are bytes of one buffer.

    Raises UsageError for a size that is not a multiple of 16. A size of 0 launches nothing.
    """

    def __init__(self, gpu: Kernels) -> None:
        super().__init__(gpu, SOURCE, [f"cudakit_{name}" for name in _NAMES])

    def copy(self, destination: Ptr, source: Ptr, size_bytes: int, stream: Stream) -> None:
        """Copy ``size_bytes`` bytes."""
        self._launch("cudakit_copy", size_bytes, stream, destination, source)

    def read(self, sink: Ptr, source: Ptr, size_bytes: int, stream: Stream) -> None:
        """Read ``size_bytes``; write SENTINEL to ``sink`` if the XOR of the words of a vector is SENTINEL."""
        self._launch("cudakit_read", size_bytes, stream, sink, source, np.uint32(SENTINEL))

    def write(self, destination: Ptr, word: int, size_bytes: int, stream: Stream) -> None:
        """Fill ``size_bytes`` with a 32-bit word."""
        self._launch("cudakit_write", size_bytes, stream, destination, np.uint32(word))

    def scale(
        self, destination: Ptr, source: Ptr, factor: float, size_bytes: int, stream: Stream
    ) -> None:
        """Write ``factor * source`` in fp32. Reads and writes ``size_bytes`` each."""
        self._launch("cudakit_scale", size_bytes, stream, destination, source, np.float32(factor))

    def triad(
        self, destination: Ptr, b: Ptr, c: Ptr, factor: float, size_bytes: int, stream: Stream
    ) -> None:
        """Write ``b + factor * c`` in fp32, rounded once. Each of the three arrays has ``size_bytes``."""
        self._launch("cudakit_triad", size_bytes, stream, destination, b, c, np.float32(factor))

    def _launch(self, name: str, size_bytes: int, stream: Stream, *args: Ptr | np.generic) -> None:
        vector_count, remainder = divmod(size_bytes, WIDTH_BYTES)
        if remainder:
            raise UsageError(
                f"{name} needs a multiple of {WIDTH_BYTES} bytes, not {size_bytes}",
                hint=f"round the size to {vector_count * WIDTH_BYTES} bytes",
            )
        block_count = -(-vector_count // _THREADS)
        if block_count:
            all_args = (*args, np.uint64(vector_count))
            self.launch(name, all_args, stream, grid=block_count, block=_THREADS)


@host_kernel("cudakit_copy")
def _copy(launch: Launch, destination: Ptr, source: Ptr, element_count: np.uint64) -> None:
    word_count = 2 * int(element_count)
    launch.write(destination, np.uint64, word_count)[:] = launch.read(source, np.uint64, word_count)


@host_kernel("cudakit_read")
def _read(
    launch: Launch, sink: Ptr, source: Ptr, sentinel: np.uint32, element_count: np.uint64
) -> None:
    vectors = launch.read(source, np.uint32, _VECTOR_FLOATS * int(element_count)).reshape(
        -1, _VECTOR_FLOATS
    )
    if (np.bitwise_xor.reduce(vectors, axis=1) == sentinel).any():
        launch.write(sink, np.uint32)[:] = sentinel


@host_kernel("cudakit_write")
def _write(launch: Launch, destination: Ptr, word: np.uint32, element_count: np.uint64) -> None:
    launch.write(destination, np.uint32, _VECTOR_FLOATS * int(element_count))[:] = word


@host_kernel("cudakit_scale")
def _scale(
    launch: Launch, destination: Ptr, source: Ptr, factor: np.float32, element_count: np.uint64
) -> None:
    float_count = _VECTOR_FLOATS * int(element_count)
    launch.write(destination, np.float32, float_count)[:] = factor * launch.read(
        source, np.float32, float_count
    )


@host_kernel("cudakit_triad")
def _triad(
    launch: Launch, destination: Ptr, b: Ptr, c: Ptr, factor: np.float32, element_count: np.uint64
) -> None:
    float_count = _VECTOR_FLOATS * int(element_count)
    # The product is exact in fp64, so only the sum is rounded, as in a fused multiply-add.
    product = np.float64(factor) * launch.read(c, np.float32, float_count)
    launch.write(destination, np.float32, float_count)[:] = (
        launch.read(b, np.float32, float_count) + product
    )
