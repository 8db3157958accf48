"""Tensors that are handed over by DLPack: where they are, read from the capsule.

The structures are those of dlpack.h, version 0.8 and, before it carries a version, 1.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

# kDLCUDA and kDLCUDAManaged.
ON_DEVICE = frozenset({2, 13})
_NAME = b"dltensor"
# That nothing is to be synchronized or enqueued ("Python Specification for DLPack", stream).
_NO_STREAM = -1
# DLDataTypeCode, and what numpy calls types of that code.
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a capsule says."""

    address: int
    dtype: str  # as numpy calls it
    item_bits: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in elements; None is dense, in the order of C


def read(given: Any) -> Tensor:
    """Read what an object says of itself by DLPack; it goes on owning its memory."""
    capsule = given.__dlpack__(stream=_NO_STREAM)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    # A managed tensor begins with the tensor. The capsule keeps its name, and so frees what it holds.
    tensor = _Tensor.from_address(pointer(capsule, _NAME))
    ndim, kind = tensor.ndim, tensor.dtype
    return Tensor(
        address=(tensor.data or 0) + tensor.byte_offset,
        dtype=_name(kind.code, kind.bits, kind.lanes),
        item_bits=kind.bits * kind.lanes,
        shape=tuple(tensor.shape[:ndim]) if ndim else (),
        strides=tuple(tensor.strides[:ndim]) if ndim and tensor.strides else None,
    )


def _name(code: int, bits: int, lanes: int) -> str:
    kind = _KINDS.get(code, f"dlpack{code}_")
    name = kind if kind == "bool" else f"{kind}{bits}"
    return name if lanes == 1 else f"{name}x{lanes}"
