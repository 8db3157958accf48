"""The arrays that a generator fills: in device memory, or in numpy for the same numbers on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import index
from typing import Any, Protocol, TypeAlias

import numpy as np

from cudakit.api.kernel_calls import stream_of
from cudakit.errors import UsageError
from cudakit.gpu.api import LEGACY, Gpu, Ptr, Stream
from cudakit.gpu.api.arrays import contiguous_strides
from cudakit.gpu.api.elements import BF16, decode
from cudakit.gpu.arrays import operand_of
from cudakit.gpu.device_array import DeviceArray, order_streams
from cudakit.kernels.random import Draw, RandomKernels, fill_on_host
from cudakit.kernels.random_values import Counter

Shape: TypeAlias = int | Sequence[int]


@dataclass(frozen=True, slots=True)
class Output:
    """The array that one call fills and returns."""

    array: Any
    dtype: str
    element_count: int
    size_bytes: int
    ptr: Ptr  # Address of the elements; 0 in host memory.
    stream: Stream  # Stream of the call; LEGACY in host memory.


class RandomMemory(Protocol):
    """Memory in which a generator allocates and fills arrays."""

    def output(self, shape: Shape | None, dtype: str | None, out: Any, stream: object) -> Output:
        """Return ``out``, or a new array of a shape and dtype.

        Raises UsageError if ``out`` cannot be filled, or differs from a shape or dtype that is not None.
        """

    def fill(self, output: Output, draw: Draw, start: Counter) -> Any:
        """Fill the array with the random numbers of one call, and return it."""


class DeviceMemory:
    """The memory of one device. Kernels are compiled at the first call."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._kernels: RandomKernels | None = None

    def output(self, shape: Shape | None, dtype: str | None, out: Any, stream: object) -> Output:
        if out is not None:
            return self._output_of(out, shape, dtype, stream)
        calling_stream = self._uncaptured_stream(stream, "")
        array = DeviceArray(self._gpu, str(dtype), _check_shape(shape), calling_stream)
        return Output(array, array.dtype, array.size, array.nbytes, Ptr(array.ptr), calling_stream)

    def fill(self, output: Output, draw: Draw, start: Counter) -> Any:
        if self._kernels is None:
            self._kernels = RandomKernels(self._gpu)
        self._kernels.fill(output.ptr, draw, start, output.stream)
        if isinstance(output.array, DeviceArray):
            output.array.record_use(output.stream)
            output.array.stream = output.stream
        return output.array

    def _output_of(
        self, out: Any, shape: Shape | None, dtype: str | None, stream: object
    ) -> Output:
        gpu, operand = self._gpu, operand_of(out, "out")
        view = operand.view
        if operand.device != (gpu if gpu.simulated else _ordinal(gpu)):
            raise UsageError(
                f"out is in memory of {_gpu_name(operand.device)}, the generator is on {_gpu_name(gpu)}",
                hint="create the generator with the device of the array",
            )
        if view.read_only:
            raise UsageError(
                "out is read-only, as arrays of JAX are, and tensors that require grad",
                hint="pass tensor.detach(), or a shape for a new array",
            )
        item_bytes = _item_bytes(view.dtype)
        if view.ptr % item_bytes:
            raise UsageError(f"out is misaligned: {view.dtype} at address {view.ptr:#x}")
        _check_layout(view.shape, view.strides, item_bytes)
        _check_output_type(view.shape, shape, view.dtype, dtype)
        calling_stream = self._uncaptured_stream(stream, operand.library)
        if operand.stream is not None:
            order_streams(gpu, Stream(operand.stream), calling_stream)
        size_bytes = view.size * item_bytes
        return Output(out, view.dtype, view.size, size_bytes, view.ptr, calling_stream)

    def _uncaptured_stream(self, stream: object, library: str) -> Stream:
        """Return the stream of a call. Raises UsageError during a capture of the stream."""
        calling_stream = stream_of(stream, self._gpu, library)
        if self._gpu.capture_id(calling_stream) is not None:
            raise UsageError(
                "the stream is being captured, and each replay would repeat the same numbers",
                hint="draw into an array before the graph is launched, and read the array in the graph",
            )
        return calling_stream


class HostMemory:
    """Host memory: numpy computes the numbers that the kernels compute."""

    def output(self, shape: Shape | None, dtype: str | None, out: Any, stream: object) -> Output:
        if stream is not None:
            raise UsageError('a generator with device="numpy" has no streams')
        if out is None:
            storage_dtype = "float32" if dtype == "bfloat16" else str(dtype)
            array = np.empty(_check_shape(shape), storage_dtype)
            return Output(array, str(dtype), array.size, array.nbytes, Ptr(0), LEGACY)
        if not isinstance(out, np.ndarray):
            raise UsageError(
                f'out is {type(out).__name__}, not a numpy array, as device="numpy" needs',
                hint="create the generator without device to fill arrays on the GPU",
            )
        if not out.flags.writeable:
            raise UsageError("out is read-only")
        _check_layout(out.shape, out.strides, out.itemsize)
        _check_output_type(out.shape, shape, out.dtype.name, dtype)
        return Output(out, out.dtype.name, out.size, out.nbytes, Ptr(0), LEGACY)

    def fill(self, output: Output, draw: Draw, start: Counter) -> Any:
        elements = output.array.reshape(-1)
        if output.dtype == "bfloat16" and output.array.dtype == np.float32:
            # numpy has no bfloat16: float32 represents all bfloat16 values exactly.
            bfloat16_bits = np.empty(draw.count, draw.storage)
            fill_on_host(bfloat16_bits, draw, start)
            elements[:] = decode(bfloat16_bits, BF16)
        else:
            fill_on_host(elements.view(draw.storage), draw, start)
        return output.array


@cache
def _item_bytes(dtype: str) -> int:
    return BF16.size_bytes if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _check_shape(shape: Shape | None) -> tuple[int, ...]:
    """Return a shape as a tuple. Raises UsageError unless it has non-negative integers."""
    if shape is None:
        raise UsageError("neither a shape nor out is given")
    try:
        extents = tuple(map(index, shape if isinstance(shape, Sequence) else (shape,)))
    except TypeError:
        extents = (-1,)
    if min(extents, default=0) < 0:
        raise UsageError(
            f"a shape has integers of at least 0, not {shape!r:.60}", hint="pass an array as out="
        )
    if math.prod(extents) >= 1 << 62:
        raise UsageError(f"an array of shape {extents} does not fit in memory")
    return extents


def _check_layout(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> None:
    expected_strides = contiguous_strides(shape, item_bytes)
    if strides == expected_strides or not math.prod(shape):
        return
    stride_pairs = zip(strides, expected_strides, strict=True)
    if any(
        extent > 1 and stride != expected_stride
        for extent, (stride, expected_stride) in zip(shape, stride_pairs, strict=True)
    ):
        raise UsageError(
            f"out is not contiguous: shape {shape}, strides {strides} bytes",
            hint="pass a contiguous array, and copy from it",
        )


def _check_output_type(
    shape: tuple[int, ...],
    expected_shape: Shape | None,
    dtype: str,
    expected_dtype: str | None,
) -> None:
    if expected_shape is not None and shape != _check_shape(expected_shape):
        raise UsageError(f"out has shape {shape}, not {_check_shape(expected_shape)}")
    if expected_dtype is not None and dtype != expected_dtype:
        raise UsageError(f"out has dtype {dtype}, not {expected_dtype}")


def _ordinal(gpu: Gpu) -> int:
    return int(getattr(gpu, "ordinal", 0))


def _gpu_name(device: Gpu | int) -> str:
    return f"cuda:{device}" if isinstance(device, int) else str(getattr(device, "name", device))
