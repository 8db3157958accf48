"""The base class of compiled kernels: calls like an earlier one are launched in C, without Python code.

Without the extension ``_fast_call``, every call is performed in Python.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from cudakit.gpu.api import Kernel, Ptr, Stream
from cudakit.gpu.device_array import DLPACK_CUDA, DeviceArray, dlpack_type

if TYPE_CHECKING:
    from cudakit.gpu.cuda.device import Cuda

_DTYPE_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)
_DRIVER_FUNCTIONS = (
    "cuLaunchKernel",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuStreamIsCapturing",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
)


class SlowCall:
    """A callable whose calls are all performed by its method ``_call``."""

    def __call__(self, *arguments: object, **named_arguments: object) -> Any:
        return self._call(*arguments, **named_arguments)

    def _call(self, *arguments: Any, **named_arguments: Any) -> Any:
        raise NotImplementedError

    def _configure(
        self, input_count: int, output_count: int, counter: LaunchCounter | None = None, /
    ) -> None:
        """Set the number of arguments, the number of outputs that a call may pass, and the counter."""

    def _prepare(self, *_: object) -> bool:
        """Return False: no call can be launched without Python code."""
        return False


class SlowCounter:
    """The position, sequence and seed of a random number generator. Several threads can use it."""

    def __init__(self) -> None:
        self._words = (0, 0, 0)
        self._is_frozen = False
        self._lock = Lock()

    def read(self) -> tuple[int, int, int]:
        """Return the position, the sequence and the seed."""
        return self._words

    def replace(self, expected: tuple[int, int, int], words: tuple[int, int, int], /) -> bool:
        """Replace the words.

        Returns False, changing nothing, if the words are not the expected ones or the counter is frozen.
        """
        with self._lock:
            is_expected = self._words == expected and not self._is_frozen
            if is_expected:
                self._words = words
        return is_expected

    def freeze(self, expected: tuple[int, int, int], /) -> bool:
        """Refuse all later changes if the words are the expected ones; return whether they are."""
        with self._lock:
            self._is_frozen = self._is_frozen or self._words == expected
        return self._is_frozen


if TYPE_CHECKING:
    FastCall = SlowCall
    LaunchCounter = SlowCounter
else:
    try:
        from cudakit.gpu._fast_call import FastCall, LaunchCounter
    except ImportError:
        FastCall, LaunchCounter = SlowCall, SlowCounter


def prepare_call(
    fast_call: FastCall,
    gpu: Cuda,
    kernel: Kernel,
    *,
    inputs: Sequence[object],
    outputs: Sequence[object],
    allocate: Callable[[int], tuple[object, ...]] | None,
    results: Sequence[int],
    parameters: Sequence[tuple[str, int, np.generic | None]],
    blocks: int,
    threads: int,
    stream: Stream,
    scratch: Ptr,
    counter_step: int = 0,
) -> None:
    """Prepare a launch on a real device, so that equal calls run without Python code.

    ``allocate`` returns new outputs for a stream; None if callers pass the outputs. ``results`` are the
    indices of the returned operands, inputs before outputs. Each of the ``parameters`` of the kernel is a
    kind of ``native/fast_call.c``, the index of an operand, and the value of a constant. Each launch adds
    ``counter_step`` to the position of the counter.
    """
    if not _load_driver():
        return
    if "cupy" in sys.modules:
        _register_cupy_arrays()
    fast_call._prepare(
        tuple(inputs),
        tuple(outputs),
        allocate,
        tuple(results),
        tuple(
            (kind, operand_index, b"" if constant is None else constant.tobytes())
            for kind, operand_index, constant in parameters
        ),
        gpu.kernels.function_address(kernel),
        int(gpu.context.handle),
        gpu.ordinal,
        blocks,
        threads,
        int(stream),
        int(scratch),
        counter_step,
    )


@cache
def _load_driver() -> bool:
    """Pass the driver's functions to the extension; return whether both are available."""
    try:
        from cudakit.gpu._fast_call import use_array_class, use_driver
        from cudakit.gpu.cuda.current import CURRENT_STREAM

        driver = ctypes.CDLL("libcuda.so.1")
        functions = [getattr(driver, name) for name in _DRIVER_FUNCTIONS]
    except (ImportError, OSError, AttributeError):
        return False
    addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
    use_driver(*addresses, DLPACK_CUDA)  # type: ignore[call-arg] # one address for each of _DRIVER_FUNCTIONS
    use_array_class(DeviceArray, "d", CURRENT_STREAM, _dtype_codes())
    return True


@cache
def _register_cupy_arrays() -> None:
    """Register the array class of CuPy, which the program imported, in the extension."""
    from cudakit.gpu._fast_call import use_array_class

    cupy = sys.modules["cupy"]
    use_array_class(cupy.ndarray, "c", cupy.cuda.get_current_stream, _dtype_codes())


@cache
def _dtype_codes() -> dict[object, int]:
    """Return DLPack's code plus 256 times the bits of each dtype, by numpy's dtype and by name."""
    codes: dict[object, int] = {}
    for name in _DTYPE_NAMES:
        code, bits = dlpack_type(name)
        codes[name] = code + 256 * bits
        if name != "bfloat16":
            codes[np.dtype(name)] = codes[name]
    return codes
