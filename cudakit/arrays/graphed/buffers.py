"""Device buffers of any library: address, size, dtype and shape."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudakit.errors import UsageError
from cudakit.gpu.api import Ptr
from cudakit.gpu.dlpack import DLPACK_DEVICES, view_of_capsule

_HINT = "pass device arrays or addresses; bind other arguments with functools.partial or a lambda"
# stream=-1 requests no synchronization ("Python Specification for DLPack").
_NO_STREAM = -1


@dataclass(frozen=True, slots=True)
class Layout:
    """The dtype, shape and contiguity of a buffer. New contents must have the same layout."""

    dtype: str  # Name of the dtype in numpy.
    shape: tuple[int, ...]
    size_bytes: int
    is_dense: bool  # Whether the buffer is C-contiguous.

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}{'' if self.is_dense else ', strided'}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer in device memory. ``layout`` is None if only the address is known."""

    ptr: Ptr
    layout: Layout | None = None


def buffer_of(argument: object, buffer_number: int) -> Buffer:
    """Return the buffer of an argument. Raises UsageError if the argument is not device memory."""
    if isinstance(argument, int) and not isinstance(argument, bool):
        return Buffer(Ptr(argument))
    read_buffer = _buffer_reader(argument)
    if read_buffer is None:
        raise UsageError(
            f"buffer {buffer_number} is not a device buffer: {_describe(argument)}", hint=_HINT
        )
    return read_buffer(argument)


def check_contents(new_buffer: Buffer, captured_buffer: Buffer, buffer_number: int) -> None:
    """Raise UsageError if the contents of ``new_buffer`` cannot be copied into the captured buffer."""
    if new_buffer.ptr == captured_buffer.ptr:
        return
    for buffer, verb in ((captured_buffer, "was captured as"), (new_buffer, "is")):
        if buffer.layout is None:
            raise UsageError(
                f"buffer {buffer_number} {verb} a plain address, whose size is unknown",
                hint="pass arrays, or fill the buffer yourself and call replay()",
            )
    if new_buffer.layout != captured_buffer.layout or (
        new_buffer.layout and not new_buffer.layout.is_dense
    ):
        raise UsageError(
            f"buffer {buffer_number} was captured as {captured_buffer.layout}, got {new_buffer.layout}",
            hint="contents must have the same dtype and shape, and be contiguous",
        )


def _buffer_reader(argument: object) -> Callable[[Any], Buffer] | None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(argument, torch.Tensor):
        # torch's __cuda_array_interface__ supports neither bfloat16 nor tensors that require grad.
        return _buffer_of_tensor if argument.is_cuda else None
    if hasattr(argument, "__cuda_array_interface__"):
        return _buffer_of_interface
    return _dlpack_reader(argument)


def _dlpack_reader(argument: object) -> Callable[[Any], Buffer] | None:
    """Return the function that reads an argument's DLPack capsule; None for host memory or without DLPack."""
    if not hasattr(argument, "__dlpack__") or not hasattr(argument, "__dlpack_device__"):
        return None
    device_kind, _ = argument.__dlpack_device__()
    return _buffer_of_dlpack if int(device_kind) in DLPACK_DEVICES else None


def _buffer_of_tensor(tensor: Any) -> Buffer:
    size_bytes = tensor.numel() * tensor.element_size()
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = Layout(dtype, tuple(tensor.shape), size_bytes, bool(tensor.is_contiguous()))
    return Buffer(Ptr(tensor.data_ptr()), layout)


def _buffer_of_interface(argument: Any) -> Buffer:
    """Read the CUDA Array Interface, version 3. An array without strides is C-contiguous."""
    interface = argument.__cuda_array_interface__
    dtype, shape = np.dtype(interface["typestr"]), tuple(map(int, interface["shape"]))
    strides = interface.get("strides")
    is_dense = strides is None or _is_dense(shape, [stride / dtype.itemsize for stride in strides])
    size_bytes = math.prod(shape) * dtype.itemsize
    return Buffer(Ptr(int(interface["data"][0])), Layout(dtype.name, shape, size_bytes, is_dense))


def _buffer_of_dlpack(argument: Any) -> Buffer:
    """Read the DLPack capsule of an object."""
    # The capsule is not consumed: it frees its tensor, and the argument keeps the memory.
    capsule = argument.__dlpack__(stream=_NO_STREAM)
    view, element_bytes = view_of_capsule(capsule)
    is_dense = _is_dense(view.shape, [stride / element_bytes for stride in view.strides])
    return Buffer(
        view.ptr,
        Layout(view.dtype, view.shape, size_bytes=view.size * element_bytes, is_dense=is_dense),
    )


def _is_dense(shape: tuple[int, ...], strides: Any) -> bool:
    """Return whether strides, in elements, describe a C-contiguous array."""
    dense_stride = 1
    for extent, stride in zip(reversed(shape), reversed(list(strides)), strict=True):
        if extent != 1 and stride != dense_stride:
            return math.prod(shape) == 0
        dense_stride *= extent
    return True


def _describe(argument: object) -> str:
    text = f"{type(argument).__module__}.{type(argument).__qualname__}".removeprefix("builtins.")
    is_on_host = isinstance(argument, np.ndarray) or hasattr(argument, "__dlpack__")
    return f"{text} in host memory" if is_on_host else text
