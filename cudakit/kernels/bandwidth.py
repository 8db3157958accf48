"""Bandwidth: kernels that only move memory, 16 bytes per access.

Copy, scale and triad are those of STREAM (J. D. McCalpin, "Memory Bandwidth and Machine Balance in Current
High Performance Computers", 1995).
"""

from __future__ import annotations

import numpy as np

from cudakit.errors import UsageError
from cudakit.gpu.api import Kernels, Ptr, Stream
from cudakit.gpu.api.host_kernels import Launch, host_kernel
from cudakit.kernels.loaded import LoadedKernels

WIDTH_BYTES = 16
SENTINEL = 0x6B8B4567  # arbitrary
# With one vector per thread in blocks of 256, an H200 copies device memory at 4268 GB/s, against 4020 with
# four vectors and 4230 by cuMemcpyAsync.
_THREADS = 256
_LANES = 4  # floats of a vector

SOURCE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

#define MINE const u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; if (i >= count) return;

extern "C" __global__ void cudakit_copy(uint4* to, const uint4* from, u64 count) {
    MINE
    __stcs(to + i, __ldcs(from + i));
}

// The value hardly ever occurs, but the compiler must keep all reads to find out.
extern "C" __global__ void cudakit_read(u32* sink, const uint4* from, u32 sought, u64 count) {
    MINE
    const uint4 v = __ldcs(from + i);
    if ((v.x ^ v.y ^ v.z ^ v.w) == sought) *sink = sought;
}

extern "C" __global__ void cudakit_write(uint4* to, u32 word, u64 count) {
    MINE
    __stcs(to + i, make_uint4(word, word, word, word));
}

extern "C" __global__ void cudakit_scale(float4* to, const float4* from, float factor, u64 count) {
    MINE
    const float4 v = __ldcs(from + i);
    __stcs(to + i, make_float4(factor * v.x, factor * v.y, factor * v.z, factor * v.w));
}

extern "C" __global__ void cudakit_triad(
    float4* to, const float4* b, const float4* c, float factor, u64 count) {
    MINE
    const float4 v = __ldcs(b + i), w = __ldcs(c + i);
    __stcs(to + i, make_float4(fmaf(factor, w.x, v.x), fmaf(factor, w.y, v.y),
                               fmaf(factor, w.z, v.z), fmaf(factor, w.w, v.w)));
}
"""

_NAMES = ("copy", "read", "write", "scale", "triad")


class Bandwidth:
    """The bandwidth kernels of one device. Sizes are bytes of one buffer, multiples of 16.

    Raises UsageError for another size. A size of 0 launches nothing.
    """

    def __init__(self, gpu: Kernels) -> None:
        self._kernels = LoadedKernels(gpu, SOURCE, [f"cudakit_{name}" for name in _NAMES])

    def copy(self, to: Ptr, from_: Ptr, size_bytes: int, stream: Stream) -> None:
        """Copy: read and write ``size_bytes`` each."""
        self._launch("cudakit_copy", size_bytes, stream, to, from_)

    def read(self, sink: Ptr, from_: Ptr, size_bytes: int, stream: Stream) -> None:
        """Read; ``sink`` becomes SENTINEL if the exclusive or of a vector's four words is SENTINEL."""
        self._launch("cudakit_read", size_bytes, stream, sink, from_, np.uint32(SENTINEL))

    def write(self, to: Ptr, word: int, size_bytes: int, stream: Stream) -> None:
        """Write a 32-bit word repeatedly."""
        self._launch("cudakit_write", size_bytes, stream, to, np.uint32(word))

    def scale(self, to: Ptr, from_: Ptr, factor: float, size_bytes: int, stream: Stream) -> None:
        """Write ``factor * from_`` in fp32: read and write ``size_bytes`` each."""
        self._launch("cudakit_scale", size_bytes, stream, to, from_, np.float32(factor))

    def triad(
        self, to: Ptr, b: Ptr, c: Ptr, factor: float, size_bytes: int, stream: Stream
    ) -> None:
        """Write ``b + factor * c``, fused, in fp32: read ``size_bytes`` twice, write it once."""
        self._launch("cudakit_triad", size_bytes, stream, to, b, c, np.float32(factor))

    def close(self) -> None:
        """Unload the kernels."""
        self._kernels.close()

    def _launch(self, name: str, size_bytes: int, stream: Stream, *args: Ptr | np.generic) -> None:
        vectors, rest = divmod(size_bytes, WIDTH_BYTES)
        if rest:
            raise UsageError(
                f"{name} moves {WIDTH_BYTES} bytes at a time, and {size_bytes} bytes were asked",
                hint=f"round to {vectors * WIDTH_BYTES}",
            )
        blocks = -(-vectors // _THREADS)
        if blocks:
            given = (*args, np.uint64(vectors))
            self._kernels.launch(name, given, stream, grid=blocks, block=_THREADS)


@host_kernel("cudakit_copy")
def _copy(launch: Launch, to: Ptr, from_: Ptr, count: np.uint64) -> None:
    words = 2 * int(count)
    launch.write(to, np.uint64, words)[:] = launch.read(from_, np.uint64, words)


@host_kernel("cudakit_read")
def _read(launch: Launch, sink: Ptr, from_: Ptr, sought: np.uint32, count: np.uint64) -> None:
    vectors = launch.read(from_, np.uint32, _LANES * int(count)).reshape(-1, _LANES)
    if (np.bitwise_xor.reduce(vectors, axis=1) == sought).any():
        launch.write(sink, np.uint32)[:] = sought


@host_kernel("cudakit_write")
def _write(launch: Launch, to: Ptr, word: np.uint32, count: np.uint64) -> None:
    launch.write(to, np.uint32, _LANES * int(count))[:] = word


@host_kernel("cudakit_scale")
def _scale(launch: Launch, to: Ptr, from_: Ptr, factor: np.float32, count: np.uint64) -> None:
    floats = _LANES * int(count)
    launch.write(to, np.float32, floats)[:] = factor * launch.read(from_, np.float32, floats)


@host_kernel("cudakit_triad")
def _triad(launch: Launch, to: Ptr, b: Ptr, c: Ptr, factor: np.float32, count: np.uint64) -> None:
    floats = _LANES * int(count)
    # The product is exact in fp64, and only the sum is rounded: as a fused operation, except for ties.
    product = np.float64(factor) * launch.read(c, np.float32, floats)
    launch.write(to, np.float32, floats)[:] = launch.read(b, np.float32, floats) + product
