"""Arrays that cudakit allocates: memory of a real or simulated device with a dtype and a shape."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt

from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import LEGACY, Gpu, Ptr, Stream
from cudakit.gpu.api.arrays import BF16, ArrayView, contiguous_strides, decode

try:
    from cudakit.gpu._fast_call import ArrayFactory, StreamMemory

    _HAS_EXTENSION = True
except ImportError:
    _HAS_EXTENSION = False

_BFLOAT16 = "bfloat16"
_NO_SYNCHRONIZATION = -1  # a stream argument of __dlpack__
_DTYPE_KINDS = "biufc"  # kinds of numpy dtypes: bool, integers, floats and complex numbers


class DeviceArray:
    """A C-contiguous array in the memory of one device, which other libraries can use without a copy.

    ``cudakit.to_device`` and the kernels of cudakit create it. Arrays of a real device implement
    ``__cuda_array_interface__`` (version 3) and DLPack; ``torch.from_dlpack(array)`` and
    ``cupy.asarray(array)`` share its memory. The memory is freed in stream order when the last reference to
    the array is deleted.

    >>> array = cudakit.to_device([[1.0, 2.0], [3.0, 4.0]], "sim")
    >>> array.shape, array.dtype, array.nbytes
    ((2, 2), 'float64', 32)
    >>> array.copy_to_host()
    array([[1., 2.],
           [3., 4.]])
    """

    def __init__(
        self, gpu: Gpu, dtype: str, shape: tuple[int, ...], stream: Stream = LEGACY
    ) -> None:
        element_bytes = _element_bytes(dtype)
        self._gpu = gpu
        # CUDA index of the device; -1 if the device is simulated.
        self.cuda_index = -1 if gpu.simulated else int(getattr(gpu, "ordinal", 0))
        # Stream whose enqueued work writes the array, and stream in whose order the memory is freed.
        self.stream = self.allocation_stream = stream
        size_bytes = math.prod(shape) * element_bytes
        # Memory that is freed with the last reference to it; None for an array without elements.
        self._memory = _allocate(gpu, size_bytes, stream) if size_bytes else None
        # Streams other than the allocation's whose work uses the memory; None if there is none.
        self._other_streams: set[Stream] | None = None
        ptr = Ptr(self._memory.ptr if self._memory else 0)
        self.view = ArrayView(ptr, dtype, shape, contiguous_strides(shape, element_bytes))

    def record_use(self, stream: Stream) -> None:
        """Record that work on a stream uses the array: the memory of the array is freed after that work."""
        if stream == self.allocation_stream or self._memory is None:
            return
        if self._other_streams is None:
            self._other_streams = set()
            # The finalizer keeps the memory until the streams are ordered.
            finalize(
                self,
                _wait_for_streams,
                self._gpu,
                self._memory,
                self._other_streams,
                self.allocation_stream,
            )
        self._other_streams.add(stream)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements in each dimension."""
        return self.view.shape

    @property
    def dtype(self) -> str:
        """The name of the dtype in numpy, or "bfloat16"."""
        return self.view.dtype

    @property
    def strides(self) -> tuple[int, ...]:
        """The distance between elements in bytes, for each dimension."""
        return self.view.strides

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.view.size

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return self.view.size * _element_bytes(self.view.dtype)

    @property
    def ptr(self) -> int:
        """The address of the first element; 0 for an array without elements."""
        return self.view.ptr

    @property
    def gpu(self) -> Gpu:
        """The device that has the memory."""
        return self._gpu

    def copy_to_host(self, stream: Stream | None = None) -> npt.NDArray[Any]:
        """Wait for the stream, and return the elements as a numpy array; bfloat16 becomes float32."""
        storage = np.dtype(np.uint16 if self.dtype == _BFLOAT16 else self.dtype)
        host_array = np.empty(self.shape, storage)
        if self.nbytes:
            gpu, used_stream = self._gpu, self.stream if stream is None else stream
            host = gpu.host_malloc(self.nbytes)
            try:
                gpu.copy(host, self.view.ptr, self.nbytes, used_stream)
                gpu.sync_stream(used_stream)
                host_array.reshape(-1).view(np.uint8)[:] = gpu.host_view(host, self.nbytes)
            finally:
                gpu.host_free(host)
        if self.dtype == _BFLOAT16:
            return decode(host_array, BF16).astype(np.float32)
        return host_array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA Array Interface, version 3."""
        if self._gpu.simulated or self.dtype == _BFLOAT16:
            reason = "bfloat16 has no type string" if not self._gpu.simulated else "it is simulated"
            raise AttributeError(f"this array has no __cuda_array_interface__: {reason}")
        return {
            "shape": self.shape,
            "typestr": np.dtype(self.dtype).str,
            "data": (self.ptr, False),
            "strides": None,
            "stream": int(self.stream),
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type and the index of the device."""
        if self._gpu.simulated:
            raise AttributeError("arrays of a simulated device have no DLPack")
        return DLPACK_CUDA, int(getattr(self._gpu, "ordinal", 0))

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return a DLPack capsule that shares the memory, usable on a stream of the caller."""
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("only the shared memory on its own device is available")
        consumer = LEGACY if stream in (None, 0) else Stream(stream)
        if stream != _NO_SYNCHRONIZATION:
            order_streams(self._gpu, self.stream, consumer)
        return capsule_of(self.view, self.__dlpack_device__(), self)

    def __repr__(self) -> str:
        device = self._gpu.name if hasattr(self._gpu, "name") else "device"
        return f"DeviceArray({self.dtype}, {list(self.shape)}, {device})"


def array_factory(gpu: Gpu, layouts: Sequence[tuple[str, tuple[int, ...]]]) -> ArrayFactory | None:
    """Return a function of a stream that creates arrays of given dtypes and shapes without Python code.

    Returns None if the driver does not allocate the arrays of the device, or an array has no elements. The
    function raises MemoryError during a capture of the stream, and if there is no memory.
    """
    context = _CONTEXTS.get(gpu)
    if context is None or not all(math.prod(shape) for _, shape in layouts):
        return None
    cuda_index = int(getattr(gpu, "ordinal", 0))
    rows = []
    for dtype, shape in layouts:
        element_bytes = _element_bytes(dtype)
        strides = contiguous_strides(shape, element_bytes)
        rows.append((gpu, cuda_index, dtype, shape, strides, math.prod(shape) * element_bytes))
    return ArrayFactory(DeviceArray, ArrayView, context, tuple(rows))


def array_over(gpu: Gpu, view: ArrayView) -> DeviceArray:
    """Return an array over memory that the caller owns, and that must outlive the array."""
    array = DeviceArray(gpu, view.dtype, (0,))
    array.view = view
    return array


def to_device(values: npt.ArrayLike, gpu: Gpu, stream: Stream = LEGACY) -> DeviceArray:
    """Copy a host array to a device, and wait for the copy."""
    host_values = np.ascontiguousarray(values)
    if host_values.dtype.kind not in _DTYPE_KINDS:
        raise UsageError(f"arrays of dtype {host_values.dtype} are not supported")
    array = DeviceArray(gpu, host_values.dtype.name, np.shape(values), stream)
    if array.nbytes:
        host = gpu.host_malloc(array.nbytes)
        try:
            gpu.host_view(host, array.nbytes)[:] = host_values.reshape(-1).view(np.uint8).data
            gpu.copy(array.view.ptr, host, array.nbytes, stream)
            gpu.sync_stream(stream)
        finally:
            gpu.host_free(host)
    return array


def order_streams(gpu: Gpu, earlier_stream: Stream, later_stream: Stream) -> None:
    """Make a stream wait for all work that is enqueued on another stream.

    Has no effect while one of the streams is captured, because an event cannot connect a capture with other
    work: the program orders the replays of the graph.
    """
    if earlier_stream == later_stream or any(
        is_captured(gpu, stream) for stream in (earlier_stream, later_stream)
    ):
        return
    cuda_event = gpu.event(timing=False)
    try:
        gpu.record(cuda_event, earlier_stream)
        gpu.wait(later_stream, cuda_event)
    finally:
        gpu.destroy_event(cuda_event)


def is_captured(gpu: Gpu, stream: Stream) -> bool:
    """Return whether a stream is being captured; CUDA cannot capture the default stream."""
    return stream != LEGACY and gpu.capture_id(stream) is not None


@cache
def _element_bytes(dtype: str) -> int:
    """Return the size of an element in bytes."""
    if dtype == _BFLOAT16:
        return 2
    return np.dtype(dtype).itemsize


class _FinalizedMemory:
    """Memory of any device, which is freed on the stream of its allocation with the last reference to it."""

    def __init__(self, gpu: Gpu, size_bytes: int, stream: Stream) -> None:
        self.ptr = gpu.malloc(size_bytes, stream)
        finalize(self, _free, gpu, self.ptr, stream)


def use_driver_memory(gpu: Gpu, context: int) -> None:
    """Allocate arrays of a real device by the driver, without Python code.

    The streams of the device must have the handles of the driver, and the device must never be closed.
    """
    if _HAS_EXTENSION:
        _CONTEXTS[gpu] = context


# Addresses of the contexts of ``use_driver_memory``.
_CONTEXTS: dict[Gpu, int] = {}


def _allocate(gpu: Gpu, size_bytes: int, stream: Stream) -> StreamMemory | _FinalizedMemory:
    """Allocate memory in stream order. Raises CUDA_ERROR_OUT_OF_MEMORY with both sizes."""
    context = _CONTEXTS.get(gpu)
    if context is not None:
        # After a MemoryError, the allocation below fails too, and its error has the sizes.
        with suppress(MemoryError):
            return StreamMemory(context, size_bytes, stream)
    return _FinalizedMemory(gpu, size_bytes, stream)


def _wait_for_streams(
    gpu: Gpu,
    memory: object,  # noqa: ARG001 the finalizer keeps the memory
    other_streams: set[Stream],
    stream: Stream,
) -> None:
    """Make a stream wait for other streams, before the memory is freed on the stream."""
    for other_stream in other_streams:
        with suppress(CudaError):  # the stream may be destroyed, which waits for its work
            order_streams(gpu, other_stream, stream)


def _free(gpu: Gpu, ptr: Ptr, stream: Stream) -> None:
    """Free memory. A closed device, or one with a lost context, has no memory to free."""
    with suppress(CudaError):
        gpu.free(ptr, stream)


# --- DLPack: reading the capsules of other libraries, and capsules of cudakit's arrays -------------
#
# The structures are those of dlpack.h; capsules have the unversioned form (DLManagedTensor), which every
# library accepts.

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


# --- Stream handles in the form that other libraries accept ----------------------------------------


class StreamHandle(int):
    """A driver stream handle: an int that also implements ``__cuda_stream__`` of cuda.core."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol version and the handle (cuda.core, "Stream protocol")."""
        return 0, int(self)


def stream_of_cupy(cupy: Any, handle: int) -> Any:
    """Return a CuPy stream for a handle of the current device, without taking ownership.

    CuPy 14 replaces ExternalStream by Stream.from_external.
    """
    make_stream = getattr(cupy.cuda.Stream, "from_external", None) or cupy.cuda.ExternalStream
    return make_stream(StreamHandle(handle))
