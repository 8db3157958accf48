"""The base class of compiled kernels: calls like an earlier one are launched in C, without Python code.

Without the extension ``_fast_call``, every call is performed in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cudakit.gpu.api import Kernel, Ptr, Stream
from cudakit.gpu.dlpack import DLPACK_CUDA

if TYPE_CHECKING:
    from cudakit.gpu.cuda.device import Cuda

_DRIVER_FUNCTIONS = (
    "cuLaunchKernel",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuStreamIsCapturing",
)


class SlowCall:
    """A callable whose calls are all performed by its method ``_call``."""

    def __call__(self, *arguments: object, **named_arguments: object) -> Any:
        return self._call(*arguments, **named_arguments)

    def _call(self, *arguments: object, **named_arguments: object) -> Any:
        raise NotImplementedError

    def _configure(self, input_count: int, output_count: int, /) -> None:
        """Set the number of arguments, and of outputs that ``out`` provides."""

    def _prepare(self, *_: object) -> bool:
        """Return False: no call can be launched without Python code."""
        return False


if TYPE_CHECKING:
    FastCall = SlowCall
else:
    try:
        from cudakit.gpu._fast_call import FastCall
    except ImportError:
        FastCall = SlowCall


def prepare_call(
    fast_call: FastCall,
    gpu: Cuda,
    kernel: Kernel,
    *,
    inputs: Sequence[object],
    outputs: Sequence[object],
    allocates: bool,
    results: Sequence[int],
    parameters: Sequence[tuple[str, int, np.generic | None]],
    blocks: int,
    threads: int,
    stream: Stream,
    scratch: Ptr,
) -> None:
    """Prepare a launch on a real device, so that equal calls run without Python code.

    If ``allocates`` is true, each call allocates its outputs. ``results`` are the indices of the returned
    operands, inputs before outputs. Each of the ``parameters`` of the kernel is a kind of ``_fast_call.c``,
    the index of an operand, and the value of a constant.
    """
    if not _load_driver():
        return
    fast_call._prepare(
        tuple(inputs),
        tuple(outputs),
        allocates,
        tuple(results),
        tuple(
            (kind, operand, b"" if constant is None else constant.tobytes())
            for kind, operand, constant in parameters
        ),
        gpu.kernels.function_address(kernel),
        int(gpu.context.handle),
        gpu.ordinal,
        blocks,
        threads,
        int(stream),
        int(scratch),
    )


@cache
def _load_driver() -> bool:
    """Pass the driver's functions to the extension; return whether both are available."""
    try:
        from cudakit.gpu._fast_call import use_driver

        driver = ctypes.CDLL("libcuda.so.1")
        functions = [getattr(driver, name) for name in _DRIVER_FUNCTIONS]
    except (ImportError, OSError, AttributeError):
        return False
    launch, get_context, push_context, pop_context, is_capturing = (
        ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions
    )
    use_driver(launch, get_context, push_context, pop_context, is_capturing, DLPACK_CUDA)
    return True
