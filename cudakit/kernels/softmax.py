"""Softmax over the rows of a matrix.

A row is read once: its elements stay in registers while the threads of the row combine the maximum and the
sum of exponentials (M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018). Rows
that do not fit into the registers of a block are read twice.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from cudakit.errors import UsageError
from cudakit.gpu.api.arrays import ArrayView
from cudakit.gpu.api.host_kernels import Launch, host_kernel
from cudakit.kernels.elementwise_source import VECTORS
from cudakit.kernels.expressions.cuda import PRELUDE
from cudakit.kernels.expressions.dtypes import FLOAT, DType, dtype_of
from cudakit.kernels.expressions.evaluate import from_storage, to_storage
from cudakit.kernels.launch_plan import Address, LaunchPlan
from cudakit.kernels.views import read_array, write_array

_VECTOR_BYTES = 16
_WARP = 32
_MAX_THREADS = 1024
_BLOCK = 128  # threads of a block in which each warp has its own row
_MAX_VECTORS = 8  # vectors of a row that a thread keeps in registers
_VECTORS_BEFORE_MORE_THREADS = 4

_SOURCE = r"""
typedef COMPUTE Value;
enum { WIDTH = WIDTH_VALUE, VECTORS = VECTORS_VALUE, ROW_THREADS = ROW_THREADS_VALUE };
enum { WARPS = ROW_THREADS / 32 };
typedef Vector<STORAGE, WIDTH> Elements;

// The maximum of some elements, and the sum of exp(element - maximum).
struct Normalizer { Value maximum, sum; };

__device__ Value negative_infinity() { return -(Value)__int_as_float(0x7F800000); }

// Returns the factor for a sum whose maximum is replaced by a larger one; equal infinities give 1.
__device__ Value rescale(Value maximum, Value larger) {
    return maximum == larger ? (Value)1 : op::exp(maximum - larger);
}

__device__ Normalizer combine(Normalizer a, Normalizer b) {
    const Value maximum = a.maximum > b.maximum ? a.maximum : b.maximum;
    return {maximum, a.sum * rescale(a.maximum, maximum) + b.sum * rescale(b.maximum, maximum)};
}

__device__ Normalizer combine_row(Normalizer total) {
    #pragma unroll
    for (int distance = 16; distance; distance /= 2)
        total = combine(total, {__shfl_xor_sync(0xFFFFFFFFu, total.maximum, distance),
                                __shfl_xor_sync(0xFFFFFFFFu, total.sum, distance)});
    if (WARPS == 1) return total;
    __shared__ Normalizer totals[WARPS];
    if (threadIdx.x % 32 == 0) totals[threadIdx.x / 32] = total;
    __syncthreads();
    total = totals[threadIdx.x % WARPS];
    #pragma unroll
    for (int distance = WARPS / 2; distance; distance /= 2)
        total = combine(total, {__shfl_xor_sync(0xFFFFFFFFu, total.maximum, distance),
                                __shfl_xor_sync(0xFFFFFFFFu, total.sum, distance)});
    return total;
}

__device__ void add_vector(Normalizer& total, const Elements& elements) {
    Value maximum = total.maximum;
    #pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        const Value element = load_value(elements.elements[k]);
        maximum = element > maximum ? element : maximum;
    }
    // With a finite base, exp(-infinity - base) is 0 and not NaN.
    const Value base = maximum == negative_infinity() ? (Value)0 : maximum;
    Value sum = total.sum * rescale(total.maximum, maximum);
    #pragma unroll
    for (int k = 0; k < WIDTH; ++k) sum += op::exp(load_value(elements.elements[k]) - base);
    total = {maximum, sum};
}

__device__ Elements normalized(const Elements& elements, Value maximum, Value factor) {
    Elements result;
    #pragma unroll
    for (int k = 0; k < WIDTH; ++k)
        result.elements[k] =
            stored<STORAGE>::from(op::exp(load_value(elements.elements[k]) - maximum) * factor);
    return result;
}

extern "C" __global__ void __launch_bounds__(BLOCK_VALUE) KERNEL_NAME(
    char* out, const char* in, i64 rows, i64 columns, i64 out_stride, i64 in_stride) {
    const i64 row = blockIdx.x * (i64)(BLOCK_VALUE / ROW_THREADS) + threadIdx.x / ROW_THREADS;
    if (row >= rows) return;
    const Elements* source = (const Elements*)(in + row * in_stride);
    Elements* target = (Elements*)(out + row * out_stride);
    const i64 vectors = columns / WIDTH;
    const int lane = threadIdx.x % ROW_THREADS;
    Normalizer total = {negative_infinity(), 0};
    #if VECTORS_VALUE
    Elements kept[VECTORS_VALUE];
    #pragma unroll
    for (int v = 0; v < VECTORS_VALUE; ++v)
        if (lane + v * ROW_THREADS < vectors) kept[v] = source[lane + v * ROW_THREADS];
    #pragma unroll
    for (int v = 0; v < VECTORS_VALUE; ++v)
        if (lane + v * ROW_THREADS < vectors) add_vector(total, kept[v]);
    #else
    #pragma unroll 4
    for (i64 v = lane; v < vectors; v += ROW_THREADS) add_vector(total, source[v]);
    #endif
    total = combine_row(total);
    const Value factor = (Value)1 / total.sum;
    #if VECTORS_VALUE
    #pragma unroll
    for (int v = 0; v < VECTORS_VALUE; ++v)
        if (lane + v * ROW_THREADS < vectors)
            target[lane + v * ROW_THREADS] = normalized(kept[v], total.maximum, factor);
    #else
    #pragma unroll 4
    for (i64 v = lane; v < vectors; v += ROW_THREADS)
        target[v] = normalized(source[v], total.maximum, factor);
    #endif
}
"""


def plan_softmax(output: ArrayView, values: ArrayView) -> LaunchPlan:
    """Return the launch of a softmax over the last axis; its operands are the output, then the values.

    Both arrays have one or two dimensions, and the last one is contiguous; they may be the same array. Raises
    UsageError for other arrays, and for integers and complex numbers.
    """
    dtype = dtype_of(values.dtype)
    rows, columns = (1, *values.shape)[-2:]
    _check(output, values, dtype)
    strides = [(0, *view.strides)[-2] for view in (output, values)]
    width = _VECTOR_BYTES // dtype.size_bytes
    while width > 1 and (
        columns % width
        or any(offset % (width * dtype.size_bytes) for offset in (output.ptr, values.ptr, *strides))
    ):
        width //= 2
    row_threads = _WARP
    while row_threads < _MAX_THREADS and columns > (
        row_threads * width * _VECTORS_BEFORE_MORE_THREADS
    ):
        row_threads *= 2
    vectors = -(-columns // (row_threads * width))
    block = max(row_threads, _BLOCK)
    name, source = _source(
        dtype, width, vectors if vectors <= _MAX_VECTORS else 0, row_threads, block
    )
    _register_host_kernel(name, dtype)
    sizes = (np.int64(rows), np.int64(columns), *map(np.int64, strides))
    blocks = -(-rows // (block // row_threads)) if columns else 0
    return LaunchPlan(source, name, blocks, block, (Address(0), Address(1), *sizes))


def _check(output: ArrayView, values: ArrayView, dtype: DType) -> None:
    if dtype.category != FLOAT:
        raise UsageError(f"softmax needs floating-point numbers, not {dtype}")
    if (output.dtype, output.shape) != (values.dtype, values.shape) or output.read_only:
        raise UsageError(
            f"softmax of {values.dtype} {list(values.shape)} needs a writable output of the same dtype and "
            f"shape, not {output.dtype} {list(output.shape)}"
        )
    if not 1 <= len(values.shape) <= 2 or any(
        view.strides[-1] != dtype.size_bytes and view.shape[-1] > 1 for view in (output, values)
    ):
        raise UsageError("softmax needs one or two dimensions, the last one contiguous")


def _source(
    dtype: DType, width: int, vectors: int, row_threads: int, block: int
) -> tuple[str, str]:
    """Return the name and the CUDA C++ source of the kernel."""
    body = _SOURCE
    for placeholder, value in {
        "COMPUTE": dtype.compute_type,
        "STORAGE": dtype.storage_type,
        "ROW_THREADS_VALUE": row_threads,
        "WIDTH_VALUE": width,
        "VECTORS_VALUE": vectors,
        "BLOCK_VALUE": block,
    }.items():
        body = body.replace(placeholder, str(value))
    name = f"cudakit_softmax_{sha256(body.encode()).hexdigest()[:16]}"
    return name, f"{PRELUDE}{VECTORS}{body.replace('KERNEL_NAME', name)}"


def _register_host_kernel(name: str, dtype: DType) -> None:
    """Register the numpy implementation of a kernel, for simulated devices."""

    @host_kernel(name)
    def run(
        launch: Launch,
        output: int,
        values: int,
        rows: np.int64,
        columns: np.int64,
        output_stride: np.int64,
        stride: np.int64,
    ) -> None:
        sizes = (int(columns), int(rows))
        size_bytes = dtype.size_bytes
        bits = read_array(launch, values, dtype.storage, sizes, (size_bytes, int(stride)))
        row_values = from_storage(bits, dtype)
        with np.errstate(all="ignore"):
            exponentials = np.exp(row_values - row_values.max(axis=1, keepdims=True))
            result = exponentials / exponentials.sum(axis=1, keepdims=True)
        write_array(launch, output, to_storage(result, dtype), (size_bytes, int(output_stride)))
