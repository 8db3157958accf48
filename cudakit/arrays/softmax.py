"""Softmax over the rows of a matrix.

A row is read once: its elements stay in registers while the threads of the row combine the maximum, and then
the sum of exponentials. Rows that do not fit into the registers of a block are read twice (M. Milakov and
N. Gimelshein, "Online normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np

from cudakit.arrays.calls import KernelCall, KernelsByDevice
from cudakit.arrays.elementwise import ResultType, check_overlaps, element_bytes
from cudakit.arrays.expressions import PRELUDE, from_storage, to_storage
from cudakit.arrays.launch import Address, LaunchPlan, cuda_source, read_array, write_array
from cudakit.arrays.operations import FLOAT, DType, dtype_of
from cudakit.errors import UsageError
from cudakit.gpu.api.arrays import ArrayView, Launch, contiguous_strides, host_kernel
from cudakit.gpu.arrays import operand_of
from cudakit.gpu.fast_call import FastCall

_VECTOR_BYTES = 16
_MIN_ROW_THREADS, _MAX_THREADS = 4, 1024  # numbers of threads that share a row
_BLOCK_THREADS = 128  # number of threads of a block that has several rows
_MAX_ELEMENTS = 32  # elements that a thread keeps in registers
_VECTORS_BEFORE_MORE_THREADS = (
    2  # maximum number of vectors per thread before more threads share a row
)

_SOURCE = cuda_source("softmax.cu")


def plan_softmax(values: ArrayView, output: ArrayView) -> LaunchPlan:
    """Return the launch of a softmax over the last axis; its operands are the values, then the output.

    Both arrays have one or two dimensions, and the last one is contiguous; they may be the same array. Raises
    UsageError for other arrays, and for integers and complex numbers.
    """
    dtype = dtype_of(values.dtype)
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
    row_count, column_count = (1, *values.shape)[-2:]
    strides = [(0, *view.strides)[-2] for view in (output, values)]
    offsets = (output.ptr, values.ptr, *strides)
    width = _VECTOR_BYTES // dtype.size_bytes
    while width > 1 and (
        column_count % width or any(offset % (width * dtype.size_bytes) for offset in offsets)
    ):
        width //= 2
    row_threads = _MIN_ROW_THREADS
    while row_threads < _MAX_THREADS and column_count > (
        row_threads * width * _VECTORS_BEFORE_MORE_THREADS
    ):
        row_threads *= 2
    vector_count = -(-column_count // (row_threads * width))
    threads = max(row_threads, _BLOCK_THREADS)
    body = _SOURCE
    for placeholder, value in {
        "COMPUTE": dtype.compute_type,
        "STORAGE": dtype.storage_type,
        "ROW_THREADS_VALUE": row_threads,
        "WIDTH_VALUE": width,
        "VECTORS_VALUE": vector_count if vector_count * width <= _MAX_ELEMENTS else 0,
        "BLOCK_VALUE": threads,
    }.items():
        body = body.replace(placeholder, str(value))
    name = f"cudakit_softmax_{sha256(body.encode()).hexdigest()[:16]}"
    source = f"{PRELUDE}{body.replace('KERNEL_NAME', name)}"
    _register_host_kernel(name, dtype)
    sizes = (np.int64(row_count), np.int64(column_count), *map(np.int64, strides))
    blocks = -(-row_count // (threads // row_threads)) if column_count else 0
    return LaunchPlan(source, name, blocks, threads, (Address(1), Address(0), *sizes))


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


# --- ``cudakit.softmax``: softmax over the last axis of an array, in one kernel -------------------


def softmax(x: Any, *, out: Any = None, stream: object = None) -> Any:
    """Return the softmax over the last axis: exp(x) divided by the sum of exp(x), without overflow.

    ``x`` is a device array of floating-point numbers of any library. Its last axis is contiguous; an array
    of more than two dimensions is contiguous. ``out`` is an array of the same shape and dtype, such as
    ``x``; without ``out``, an array of the library of ``x`` is allocated. ``stream`` is a stream of any
    library or a handle; the default is the current stream of the library of ``x``. Sums of float16 and
    bfloat16 are computed in float32. The call enqueues one kernel and returns the array.

    Raises UsageError, before anything is changed, for other dtypes and layouts, arrays on several devices,
    and an output that is read-only or overlaps ``x`` in part.

    >>> x = cudakit.to_device([[0.0, 0.0], [1000.0, 1000.0]], "sim")
    >>> cudakit.softmax(x).copy_to_host().tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    return _shared_call()(x, out=out, stream=stream)


class _SoftmaxCall(FastCall):
    """The softmax kernels of all devices; equal calls are launched without Python code."""

    def __init__(self) -> None:
        self._kernels = KernelsByDevice()
        self._configure(1, 1)

    def _call(self, x: Any, *, out: Any = None, stream: object = None) -> Any:
        """Check the arrays, enqueue the kernel, and prepare the launch of equal calls."""
        call = KernelCall({"x": x} if out is None else {"x": x, "out": out}, stream)
        view = call.operands["x"]
        if not isinstance(view, ArrayView):
            raise UsageError("x is a number", hint="pass an array")
        new_outputs = None
        if out is None:
            new_outputs = (ResultType(view.dtype, view.shape),)
            out = call.new_array(view.dtype, view.shape)
        output_view = operand_of(out, "out").view
        plan = plan_softmax(_rows_of(view, "x"), _rows_of(output_view, "out"))
        check_overlaps("out", output_view, {"x": view}, {})
        return call.run(
            self,
            self._kernels,
            plan,
            (view, output_view),
            inputs=(x,),
            outputs=(out,),
            new_outputs=new_outputs,
            results=[1],
        )


# All calls of the process share the prepared launches of one callable.
_shared_call = cache(_SoftmaxCall)


def _rows_of(view: ArrayView, name: str) -> ArrayView:
    """Return an array of more than two dimensions as the matrix of its rows.

    Raises UsageError if the array is not contiguous.
    """
    if len(view.shape) <= 2:
        return view
    dense = contiguous_strides(view.shape, element_bytes(view))
    if any(
        extent > 1 and stride != dense_stride
        for extent, stride, dense_stride in zip(view.shape, view.strides, dense, strict=True)
    ):
        raise UsageError(
            f"{name} has {len(view.shape)} dimensions and is not contiguous", hint="copy the array"
        )
    shape = (math.prod(view.shape[:-1]), view.shape[-1])
    return replace(view, shape=shape, strides=contiguous_strides(shape, element_bytes(view)))
