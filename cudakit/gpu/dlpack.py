"""DLPack: reading the capsules of other libraries, and capsules of cudakit's arrays.

The structures are those of dlpack.h; capsules have the unversioned form (DLManagedTensor), which every
library accepts.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from cudakit.gpu.api import Ptr
from cudakit.gpu.api.arrays import ArrayView, contiguous_strides

DLPACK_CUDA = 2
# Device types of device memory: kDLCUDA and kDLCUDAManaged.
DLPACK_DEVICES = frozenset({DLPACK_CUDA, 13})
_CAPSULE_NAME = b"dltensor"
# DLDataTypeCode of numpy's dtype kinds, and numpy's names of the types.
_TYPE_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_BFLOAT_CODE = 4
_TYPE_NAMES = {0: "int", 1: "uint", 2: "float", _BFLOAT_CODE: "bfloat", 5: "complex", 6: "bool"}


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


class _ManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_ManagedTensor))
_ManagedTensor._fields_ = [
    ("tensor", _Tensor),
    ("context", ctypes.c_void_p),
    ("deleter", _Deleter),
]
_CapsuleDestructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# The structure of each exported capsule, its arrays of shape and strides, and the owner of the memory, by the
# address of the structure.
_EXPORTED_TENSORS: dict[int, tuple[object, ...]] = {}


def view_of_capsule(capsule: object) -> tuple[ArrayView, int]:
    """Return the view of a capsule's tensor, and the size of its elements in bytes.

    The caller keeps the capsule or the tensor's owner alive.
    """
    tensor = _Tensor.from_address(_capsule_pointer(capsule, _CAPSULE_NAME))
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    dtype = _dtype_name(tensor.dtype)
    element_bytes = tensor.dtype.bits * tensor.dtype.lanes // 8
    strides = (
        tuple(stride * element_bytes for stride in tensor.strides[: tensor.ndim])
        if tensor.ndim and tensor.strides
        else contiguous_strides(shape, element_bytes)
    )
    ptr = Ptr((tensor.data or 0) + tensor.byte_offset)
    return ArrayView(ptr, dtype, shape, strides), element_bytes


def capsule_of(view: ArrayView, device: tuple[int, int], owner: object) -> object:
    """Return a capsule for an array; ``owner`` is kept alive until the consumer releases the tensor."""
    extents = (ctypes.c_int64 * max(len(view.shape), 1))(*view.shape)
    code, bits = dlpack_type(view.dtype)
    element_bytes = bits // 8
    strides = (ctypes.c_int64 * max(len(view.shape), 1))(
        *(stride // element_bytes for stride in view.strides)
    )
    managed_tensor = _ManagedTensor()
    managed_tensor.tensor = _Tensor(
        view.ptr, _Device(*device), len(view.shape), _DataType(code, bits, 1), extents, strides, 0
    )
    managed_tensor.deleter = _delete_tensor
    address = ctypes.addressof(managed_tensor)
    _EXPORTED_TENSORS[address] = (managed_tensor, extents, strides, owner)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new_capsule(address, _CAPSULE_NAME, ctypes.cast(_delete_capsule, ctypes.c_void_p))


def _release_tensor(managed_tensor: Any) -> None:
    """Release an exported tensor; the consumer calls this function."""
    _EXPORTED_TENSORS.pop(ctypes.addressof(managed_tensor.contents), None)


def _release_capsule(capsule_address: int) -> None:
    """Release the tensor of a capsule that no consumer took; a consumer renames the capsule."""
    is_valid = ctypes.pythonapi.PyCapsule_IsValid
    is_valid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    if is_valid(capsule_address, _CAPSULE_NAME):
        get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
            ("PyCapsule_GetPointer", ctypes.pythonapi)
        )
        _EXPORTED_TENSORS.pop(get_pointer(capsule_address, _CAPSULE_NAME), None)


# C callbacks; these objects must live as long as any capsule.
_delete_tensor = _Deleter(_release_tensor)
_delete_capsule = _CapsuleDestructor(_release_capsule)


def _capsule_pointer(capsule: object, name: bytes) -> int:
    get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    return int(get_pointer(capsule, name))


def _dtype_name(data_type: _DataType) -> str:
    """Return numpy's name of a data type, or a similar name for types that numpy does not have."""
    type_name = _TYPE_NAMES.get(data_type.code, f"dlpack{data_type.code}_")
    name = type_name if type_name == "bool" else f"{type_name}{data_type.bits}"
    return name if data_type.lanes == 1 else f"{name}x{data_type.lanes}"


def dlpack_type(dtype: str) -> tuple[int, int]:
    """Return the type code and the number of bits of a dtype's elements."""
    if dtype == "bfloat16":
        return _BFLOAT_CODE, 16
    element = np.dtype(dtype)
    return _TYPE_CODES[element.kind], 8 * element.itemsize
