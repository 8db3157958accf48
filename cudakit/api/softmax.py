"""``cudakit.softmax``: softmax over the last axis of an array, in one kernel."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

from cudakit.api.kernel_calls import KernelCall, KernelsByDevice
from cudakit.arrays.elementwise import ResultType, check_overlaps, element_bytes
from cudakit.arrays.launch_plan import arguments_of
from cudakit.arrays.softmax import plan_softmax
from cudakit.errors import UsageError
from cudakit.gpu.api.arrays import ArrayView, contiguous_strides
from cudakit.gpu.arrays import operand_of
from cudakit.gpu.fast_call import FastCall


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


@cache
def _shared_call() -> _SoftmaxCall:
    """Return the one callable of the process, so that all calls share its prepared launches."""
    return _SoftmaxCall()


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
        kernels = self._kernels.kernels_of(call.gpu)
        call.launch(kernels, plan, arguments_of(plan, [view.ptr, output_view.ptr]))
        call.set_stream((out,))
        call.prepare_fast_call(
            self, kernels, plan, inputs=(x,), outputs=(out,), new_outputs=new_outputs, results=[1]
        )
        return out


def _rows_of(view: ArrayView, name: str) -> ArrayView:
    """Return an array of more than two dimensions as the matrix of its rows.

    Raises UsageError if the array is not contiguous.
    """
    if len(view.shape) <= 2:
        return view
    expected_strides = contiguous_strides(view.shape, element_bytes(view))
    if any(
        extent > 1 and stride != expected_stride
        for extent, stride, expected_stride in zip(
            view.shape, view.strides, expected_strides, strict=True
        )
    ):
        raise UsageError(
            f"{name} has {len(view.shape)} dimensions and is not contiguous", hint="copy the array"
        )
    column_count = view.shape[-1]
    shape = (math.prod(view.shape[:-1]), column_count)
    return replace(view, shape=shape, strides=contiguous_strides(shape, element_bytes(view)))
