"""Device buffers of any library: address, size, dtype and shape.

DLPack capsules are read here: the structures are those of dlpack.h, version 0.8 and, before it carries a
version, 1.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudakit.errors import UsageError
from cudakit.gpu.api import Ptr

_HINT = "pass device arrays or addresses; bind other arguments with functools.partial or a lambda"
# kDLCUDA and kDLCUDAManaged.
DLPACK_DEVICES = frozenset({2, 13})
_CAPSULE_NAME = b"dltensor"
# No synchronization ("Python Specification for DLPack", stream).
_NO_STREAM = -1
# By DLDataTypeCode: numpy's names.
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


@dataclass(frozen=True, slots=True)
class Form:
    """Dtype, shape and density of a buffer, which new contents must match."""

    dtype: str  # numpy's name
    shape: tuple[int, ...]
    size_bytes: int
    dense: bool  # C-contiguous

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}{'' if self.dense else ', strided'}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Device memory; without a form, only its address is known."""

    ptr: Ptr
    form: Form | None = None


def buffer_of(given: object, place: int) -> Buffer:
    """Return the buffer given as argument number ``place``. Raises UsageError for anything else."""
    if isinstance(given, int) and not isinstance(given, bool):
        return Buffer(Ptr(given))
    read = _reader(given)
    if read is None:
        raise UsageError(f"buffer {place} is not a device buffer: {_shown(given)}", hint=_HINT)
    return read(given)


def check_contents(new: Buffer, captured: Buffer, place: int) -> None:
    """Raise UsageError if contents do not fit the captured buffer."""
    if new.ptr == captured.ptr:
        return
    for buffer, which in ((captured, "was captured as"), (new, "is")):
        if buffer.form is None:
            raise UsageError(
                f"buffer {place} {which} a plain address, whose size is unknown",
                hint="pass arrays, or fill the buffer yourself and call replay()",
            )
    if new.form != captured.form or (new.form and not new.form.dense):
        raise UsageError(
            f"buffer {place} was captured as {captured.form}, got {new.form}",
            hint="contents must have the same dtype and shape, and be contiguous",
        )


def _reader(given: object) -> Callable[[Any], Buffer] | None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        # The array interface of torch supports neither bfloat16 nor tensors that require a gradient.
        return _of_torch if given.is_cuda else None
    if hasattr(given, "__cuda_array_interface__"):
        return _of_interface
    return _dlpack_reader(given)


def _dlpack_reader(given: object) -> Callable[[Any], Buffer] | None:
    """Return the reader for device memory that supports DLPack."""
    if not hasattr(given, "__dlpack__") or not hasattr(given, "__dlpack_device__"):
        return None
    kind, _ = given.__dlpack_device__()
    return _of_dlpack if int(kind) in DLPACK_DEVICES else None


def _of_torch(tensor: Any) -> Buffer:
    size_bytes = tensor.numel() * tensor.element_size()
    dtype = str(tensor.dtype).removeprefix("torch.")
    form = Form(dtype, tuple(tensor.shape), size_bytes, bool(tensor.is_contiguous()))
    return Buffer(Ptr(tensor.data_ptr()), form)


def _of_interface(given: Any) -> Buffer:
    """Read the CUDA Array Interface (Numba documentation, version 3): without strides it is dense."""
    interface = given.__cuda_array_interface__
    dtype, shape = np.dtype(interface["typestr"]), tuple(map(int, interface["shape"]))
    strides = interface.get("strides")
    dense = strides is None or _is_dense(shape, [stride / dtype.itemsize for stride in strides])
    size_bytes = math.prod(shape) * dtype.itemsize
    return Buffer(Ptr(int(interface["data"][0])), Form(dtype.name, shape, size_bytes, dense))


def _of_dlpack(given: Any) -> Buffer:
    """Read the DLPack capsule of an object, which keeps its memory: without strides it is dense."""
    capsule = given.__dlpack__(stream=_NO_STREAM)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    # A managed tensor begins with the tensor. The unrenamed capsule frees its tensor itself.
    tensor = _DlTensor.from_address(pointer(capsule, _CAPSULE_NAME))
    ndim, kind = tensor.ndim, tensor.dtype
    shape = tuple(tensor.shape[:ndim]) if ndim else ()
    strides = tensor.strides[:ndim] if ndim and tensor.strides else None
    form = Form(
        _dtype_name(kind.code, kind.bits, kind.lanes),
        shape,
        size_bytes=math.prod(shape) * kind.bits * kind.lanes // 8,
        dense=strides is None or _is_dense(shape, strides),
    )
    return Buffer(Ptr((tensor.data or 0) + tensor.byte_offset), form)


def _is_dense(shape: tuple[int, ...], strides: Any) -> bool:
    """Return whether strides, in elements, are those of a C-contiguous array."""
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(list(strides)), strict=True):
        if extent != 1 and stride != expected:
            return math.prod(shape) == 0
        expected *= extent
    return True


def _shown(given: object) -> str:
    text = f"{type(given).__module__}.{type(given).__qualname__}".removeprefix("builtins.")
    on_host = isinstance(given, np.ndarray) or hasattr(given, "__dlpack__")
    return f"{text} in host memory" if on_host else text


class _DlDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32))


class _DlDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DlDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DlDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _dtype_name(code: int, bits: int, lanes: int) -> str:
    kind = _KINDS.get(code, f"dlpack{code}_")
    name = kind if kind == "bool" else f"{kind}{bits}"
    return name if lanes == 1 else f"{name}x{lanes}"
