"""Arrays in device memory of any library: address, dtype, shape and strides.

Arrays are read through torch's own attributes, the CUDA Array Interface (version 3) or DLPack. DLPack
capsules are read through the structures of dlpack.h, in the unversioned form (DLManagedTensor).
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudakit.errors import UsageError
from cudakit.gpu.api import Ptr

# Device types of DLPack for device memory: kDLCUDA and kDLCUDAManaged.
DLPACK_DEVICES = frozenset({2, 13})
_CAPSULE_NAME = b"dltensor"
# stream=-1 requests no synchronization ("Python Specification for DLPack").
_NO_STREAM = -1
# Type names of numpy by DLDataTypeCode.
_TYPE_NAMES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


@dataclass(frozen=True, slots=True)
class ArrayView:
    """The address and layout of an array. The object that owns the memory must outlive the view."""

    ptr: Ptr
    dtype: str  # Name of the dtype in numpy or torch, such as "float32" or "bfloat16".
    item_bytes: int  # Size of one element in bytes.
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]  # Distance of adjacent elements in each dimension, in bytes.
    is_read_only: bool = False
    # Driver handle of the stream on which the array's last work was enqueued; None if nothing is pending.
    producer_stream: int | None = None

    @property
    def element_count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """The size of all elements in bytes, without gaps."""
        return self.element_count * self.item_bytes

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are adjacent in C order. Arrays without elements are contiguous."""
        dense_stride = self.item_bytes
        for extent, stride in zip(reversed(self.shape), reversed(self.strides_bytes), strict=True):
            if extent != 1 and stride != dense_stride:
                return self.element_count == 0
            dense_stride *= extent
        return True


def view_of(array: object) -> ArrayView | None:
    """Return the view of an array in device memory; None if ``array`` is anything else.

    Reading an array enqueues no work and waits for none.
    """
    if isinstance(view := getattr(array, "__cudakit_view__", None), ArrayView):
        return view
    read = _view_reader(array)
    return None if read is None else read(array)


def require_view(array: object, name: str) -> ArrayView:
    """Return the view of an array; raises UsageError with ``name`` if it is not in device memory."""
    view = view_of(array)
    if view is None:
        raise UsageError(
            f"{name} is not an array in device memory: {describe(array)}",
            hint="pass an array of torch, CuPy, Numba, JAX or cudakit that is on the GPU",
        )
    return view


def contiguous_strides(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Return the strides in bytes of a C-contiguous array."""
    strides: list[int] = []
    stride = item_bytes
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))


def describe(argument: object) -> str:
    """Return the type of an object, and whether it is in host memory, as text for a message."""
    text = f"{type(argument).__module__}.{type(argument).__qualname__}".removeprefix("builtins.")
    on_host = isinstance(argument, np.ndarray) or hasattr(argument, "__dlpack__")
    return f"{text} in host memory" if on_host else text


def _view_reader(array: object) -> Callable[[Any], ArrayView] | None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        # torch's __cuda_array_interface__ supports neither bfloat16 nor tensors that require grad.
        return _view_of_tensor if array.is_cuda else None
    if hasattr(array, "__cuda_array_interface__"):
        return _view_of_interface
    if not hasattr(array, "__dlpack__") or not hasattr(array, "__dlpack_device__"):
        return None
    kind, _ = array.__dlpack_device__()
    return _view_of_dlpack if int(kind) in DLPACK_DEVICES else None


def _view_of_tensor(tensor: Any) -> ArrayView:
    item_bytes = tensor.element_size()
    return ArrayView(
        Ptr(tensor.data_ptr()),
        str(tensor.dtype).removeprefix("torch."),
        item_bytes,
        tuple(tensor.shape),
        tuple(stride * item_bytes for stride in tensor.stride()),
    )


def _view_of_interface(array: Any) -> ArrayView:
    """Read the CUDA Array Interface. An array without strides is C-contiguous."""
    interface = array.__cuda_array_interface__
    dtype, shape = np.dtype(interface["typestr"]), tuple(map(int, interface["shape"]))
    address, is_read_only = interface["data"]
    strides = interface.get("strides") or contiguous_strides(shape, dtype.itemsize)
    return ArrayView(
        Ptr(int(address or 0)),
        dtype.name,
        dtype.itemsize,
        shape,
        tuple(map(int, strides)),
        bool(is_read_only),
        interface.get("stream"),
    )


def _view_of_dlpack(array: Any) -> ArrayView:
    """Read the DLPack capsule of an object. An array without strides is C-contiguous."""
    capsule = array.__dlpack__(stream=_NO_STREAM)
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    # A DLManagedTensor begins with the DLTensor. Because nobody consumed the capsule, it frees the tensor.
    tensor = _DlTensor.from_address(get_pointer(capsule, _CAPSULE_NAME))
    ndim, dtype = tensor.ndim, tensor.dtype
    item_bytes = dtype.bits * dtype.lanes // 8
    shape = tuple(tensor.shape[:ndim]) if ndim else ()
    strides = (
        tuple(stride * item_bytes for stride in tensor.strides[:ndim])
        if ndim and tensor.strides
        else contiguous_strides(shape, item_bytes)
    )
    return ArrayView(
        Ptr((tensor.data or 0) + tensor.byte_offset),
        _dtype_name(dtype.code, dtype.bits, dtype.lanes),
        item_bytes,
        shape,
        strides,
    )


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
    type_name = _TYPE_NAMES.get(code, f"dlpack{code}_")
    name = type_name if type_name == "bool" else f"{type_name}{bits}"
    return name if lanes == 1 else f"{name}x{lanes}"
