"""Count NaN and infinite elements of buffers, with one kernel launch for each buffer."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cudakit.arrays.loaded import LoadedKernels
from cudakit.gpu.api import Argument, Kernels, Ptr, Stream
from cudakit.gpu.api.host_kernels import Launch, host_kernel

# Bytes of the two counters, of NaN and of infinite elements.
COUNTER_BYTES = 16
_VECTOR_BYTES = 16
_THREADS = 256
# Maximum number of blocks: enough to fill all GPUs; each thread then reads several vectors at once.
_MAX_BLOCKS = 2048


class _FloatFormat(NamedTuple):
    """The bits of a floating-point format: an element with all exponent bits is infinite or NaN."""

    storage_dtype: str  # Name of the unsigned numpy dtype that holds the bits.
    cuda_type: str
    exponent_mask: int
    mantissa_mask: int


_FORMATS = {
    "float64": _FloatFormat("u8", "unsigned long long", 0x7FF << 52, (1 << 52) - 1),
    "float32": _FloatFormat("u4", "unsigned int", 0xFF << 23, (1 << 23) - 1),
    "float16": _FloatFormat("u2", "unsigned short", 0x1F << 10, (1 << 10) - 1),
    "bfloat16": _FloatFormat("u2", "unsigned short", 0xFF << 7, (1 << 7) - 1),
}
FLOATS = tuple(_FORMATS)

_TEMPLATE = r"""
typedef unsigned long long u64;

template <typename T, int N>
struct alignas(16) Vector { T items[N]; };

template <typename T>
__device__ inline void inspect(T bits, T exponent, T mantissa, u64& nans, u64& infinities) {
    if ((bits & exponent) != exponent) return;
    if (bits & mantissa) ++nans; else ++infinities;
}

// Adds the counts of a warp to a counter. Few warps find an element to count.
__device__ inline void add_of_warp(u64* counter, u64 count) {
    if (!__any_sync(0xFFFFFFFFu, count != 0)) return;
    for (int distance = 16; distance; distance /= 2)
        count += __shfl_down_sync(0xFFFFFFFFu, count, distance);
    if (threadIdx.x % 32 == 0) atomicAdd(counter, count);
}

// Reads vectors of 16 bytes, and the elements before and after them one by one.
template <typename T>
__device__ inline void count_nonfinite(u64* counters, const T* data, u64 count, T exponent, T mantissa) {
    constexpr int N = 16 / sizeof(T);
    const u64 thread = blockIdx.x * (u64)blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    const u64 misaligned = (16 - (u64)data % 16) % 16 / sizeof(T);
    const u64 head = misaligned < count ? misaligned : count;
    const u64 vectors = (count - head) / N, tail = head + vectors * N;
    u64 nans = 0, infinities = 0;
    #pragma unroll 4
    for (u64 v = thread; v < vectors; v += threads) {
        const Vector<T, N> values = ((const Vector<T, N>*)(data + head))[v];
        #pragma unroll
        for (int i = 0; i < N; ++i) inspect(values.items[i], exponent, mantissa, nans, infinities);
    }
    if (thread < head) inspect(data[thread], exponent, mantissa, nans, infinities);
    if (tail + thread < count) inspect(data[tail + thread], exponent, mantissa, nans, infinities);
    add_of_warp(counters, nans);
    add_of_warp(counters + 1, infinities);
}
"""


def _kernel(name: str, float_format: _FloatFormat) -> str:
    cuda_type, exponent, mantissa = float_format[1:]
    return f"""
extern "C" __global__ void cudakit_nonfinite_{name}(u64* counters, const {cuda_type}* data, u64 count) {{
    count_nonfinite<{cuda_type}>(counters, data, count, {exponent:#x}ull, {mantissa:#x}ull);
}}
"""


SOURCE = _TEMPLATE + "".join(_kernel(*item) for item in _FORMATS.items())


class NonFiniteKernels:
    """The counting kernels of one device, loaded until ``close``."""

    def __init__(self, gpu: Kernels) -> None:
        self._kernels = LoadedKernels(gpu, SOURCE, [f"cudakit_nonfinite_{name}" for name in FLOATS])

    def count(self, counters: Ptr, data: Ptr, count: int, dtype: str, stream: Stream) -> None:
        """Add the numbers of NaN and of infinite elements to two 64-bit counters.

        ``data`` has ``count`` elements at an address that is a multiple of the element's size.
        """
        args: tuple[Argument, ...] = (counters, data, np.uint64(count))
        vector_count = -(-count * np.dtype(_FORMATS[dtype].storage_dtype).itemsize // _VECTOR_BYTES)
        block_count = min(-(-vector_count // _THREADS), _MAX_BLOCKS)
        name = f"cudakit_nonfinite_{dtype}"
        if block_count:
            self._kernels.launch(name, args, stream, grid=block_count, block=_THREADS)

    def close(self) -> None:
        """Unload the kernels, all of which must have finished."""
        self._kernels.close()


def _register_host_kernel(name: str, float_format: _FloatFormat) -> None:
    """Register the host kernel of a format for simulated devices."""

    @host_kernel(f"cudakit_nonfinite_{name}")
    def count_on_host(launch: Launch, counters: Ptr, data: Ptr, count: np.uint64) -> None:
        bits: Any = launch.read(data, float_format.storage_dtype, int(count))
        is_special = (
            bits & bits.dtype.type(float_format.exponent_mask) == float_format.exponent_mask
        )
        is_nan = is_special & (bits & bits.dtype.type(float_format.mantissa_mask) != 0)
        nan_count, special_count = np.count_nonzero(is_nan), np.count_nonzero(is_special)
        if special_count:
            new_counts = np.array([nan_count, special_count - nan_count], np.uint64)
            launch.atomic(counters, np.uint64, 2)[:] += new_counts


for _name, _format in _FORMATS.items():
    _register_host_kernel(_name, _format)
