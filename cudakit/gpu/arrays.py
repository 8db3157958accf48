"""Arrays of any library as views, the current streams of libraries, and new arrays of the same library.

No library is imported: torch and CuPy are used only if the program imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cudakit.errors import UsageError
from cudakit.gpu.api import LEGACY, Gpu, Ptr, Stream
from cudakit.gpu.api.arrays import ArrayView, contiguous_strides
from cudakit.gpu.device_array import (
    DLPACK_DEVICES,
    DeviceArray,
    array_factory,
    is_captured,
    stream_of_cupy,
    use_driver_memory,
    view_of_capsule,
)

if TYPE_CHECKING:
    from cudakit.gpu.cuda.device import Cuda

_HINT = (
    "pass arrays of torch, CuPy, Numba or JAX, or copy a numpy array with cudakit.to_device(array)"
)
_NO_SYNCHRONIZATION = -1  # the stream argument of __dlpack__ that requests no synchronization
_LIBRARIES_WITH_IMMUTABLE_ARRAYS = ("jax", "jaxlib")


@dataclass(frozen=True, slots=True)
class DeviceOperand:
    """An array of any library, its device, and the stream on which its contents are computed."""

    view: ArrayView
    device: Gpu | int  # a simulated device, or the CUDA index of a real one
    library: str = ""  # "torch", "cupy" or ""
    # Stream whose enqueued work writes the array; None if the library keeps no such stream.
    stream: int | None = None


@cache
def shared_device(ordinal: int) -> Cuda:
    """Return the device of this process that kernels share; it stays open until the process ends."""
    from cudakit.gpu.cuda.device import Cuda

    gpu = Cuda(ordinal, foreign_streams=True)
    use_driver_memory(gpu, int(gpu.context.handle))
    return gpu


def operand_of(array: Any, name: str) -> DeviceOperand:
    """Return the view of an array. Raises UsageError with the argument's name for other objects."""
    if isinstance(array, DeviceArray):
        device = array.gpu if array.cuda_index < 0 else array.cuda_index
        return DeviceOperand(array.view, device, stream=int(array.stream))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _operand_of_tensor(array, name)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        view = ArrayView(Ptr(array.data.ptr), array.dtype.name, array.shape, array.strides)
        return DeviceOperand(view, int(array.device.id), "cupy")
    if hasattr(array, "__cuda_array_interface__"):
        return _operand_of_interface(array, name)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _operand_of_dlpack(array, name)
    raise _not_an_array_error(array, name)


def current_stream(library: str, ordinal: int) -> int:
    """Return the handle of the current stream of a library, or of cudakit."""
    if library == "torch":
        return int(sys.modules["torch"].cuda.current_stream(ordinal).cuda_stream) or LEGACY
    if library == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream(ordinal).ptr) or LEGACY
    from cudakit.gpu.cuda.current import current_stream as current_stream_of_cudakit

    return current_stream_of_cudakit()


def new_array(
    library: str,
    gpu: Gpu,
    dtype: str,
    shape: tuple[int, ...],
    stream: Stream,
    *,
    is_current_stream: bool = False,
) -> Any:
    """Return an uninitialized array of a library, for use on a stream.

    If ``is_current_stream`` is true, the stream already is the current stream of the library.
    """
    ordinal = int(getattr(gpu, "ordinal", 0))
    if library == "torch":
        torch = sys.modules["torch"]
        with nullcontext() if is_current_stream else _torch_stream(torch, stream, ordinal):
            return torch.empty(shape, dtype=getattr(torch, dtype), device=f"cuda:{ordinal}")
    if library == "cupy" and dtype != "bfloat16":
        cupy = sys.modules["cupy"]
        if is_current_stream and cupy.cuda.runtime.getDevice() == ordinal:
            return cupy.empty(shape, dtype)
        with cupy.cuda.Device(ordinal), stream_of_cupy(cupy, stream):
            return cupy.empty(shape, dtype)
    if is_captured(gpu, stream):
        raise UsageError(
            "an output cannot be allocated while the stream is captured", hint="pass out="
        )
    return DeviceArray(gpu, dtype, shape, stream)


def array_allocator(
    library: str, gpu: Gpu, layouts: Sequence[tuple[str, tuple[int, ...]]]
) -> Callable[[int], tuple[object, ...]]:
    """Return a function that allocates arrays of given dtypes and shapes on a library's current stream.

    The function takes the handle of the stream. Arrays of CuPy are allocated on CuPy's current device.
    """
    if library == "cupy" and all(dtype != "bfloat16" for dtype, _ in layouts):
        make_array = sys.modules["cupy"].ndarray
        numpy_layouts = [(shape, np.dtype(dtype)) for dtype, shape in layouts]
        return lambda stream: tuple([make_array(*layout) for layout in numpy_layouts])  # noqa: ARG005
    if library != "torch" and (factory := array_factory(gpu, layouts)):
        return factory
    return lambda stream: tuple(
        [
            new_array(library, gpu, dtype, shape, Stream(stream), is_current_stream=True)
            for dtype, shape in layouts
        ]
    )


def _torch_stream(torch: Any, stream: Stream, ordinal: int) -> Any:
    """Return a context in which torch allocates memory for a stream."""
    if stream == LEGACY:
        return torch.cuda.stream(torch.cuda.default_stream(ordinal))
    return torch.cuda.stream(torch.cuda.ExternalStream(int(stream), device=ordinal))


def _operand_of_tensor(tensor: Any, name: str) -> DeviceOperand:
    if not tensor.is_cuda:
        raise _not_an_array_error(tensor, name, f"a torch tensor on {tensor.device}")
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError(
            f"{name} is a tensor with a pending conjugation or negation",
            hint="pass tensor.resolve_conj().resolve_neg()",
        )
    element_bytes = tensor.element_size()
    view = ArrayView(
        Ptr(tensor.data_ptr()),
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        tuple(stride * element_bytes for stride in tensor.stride()),
        # A write would be hidden from autograd.
        read_only=tensor.requires_grad,
    )
    return DeviceOperand(view, int(tensor.device.index or 0), "torch")


def _operand_of_interface(array: Any, name: str) -> DeviceOperand:
    """Read the CUDA Array Interface, version 3."""
    interface = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise UsageError(f"{name} has a mask, which is not supported")
    dtype, shape = np.dtype(interface["typestr"]), tuple(map(int, interface["shape"]))
    strides = interface.get("strides") or contiguous_strides(shape, dtype.itemsize)
    address, read_only = interface["data"]
    library = type(array).__module__.partition(".")[0]
    view = ArrayView(
        Ptr(int(address or 0)),
        dtype.name,
        shape,
        tuple(map(int, strides)),
        read_only=bool(read_only) or library in _LIBRARIES_WITH_IMMUTABLE_ARRAYS,
    )
    stream = interface.get("stream")
    ordinal = _ordinal_of(view.ptr, name) if view.ptr else _current_ordinal()
    return DeviceOperand(view, ordinal, stream=None if stream is None else int(stream))


def _operand_of_dlpack(array: Any, name: str) -> DeviceOperand:
    device_type, ordinal = array.__dlpack_device__()
    if int(device_type) not in DLPACK_DEVICES:
        raise _not_an_array_error(array, name, f"{_type_name(array)} in host memory")
    # The capsule is not consumed: it releases its tensor, while the array keeps the memory.
    view, _ = view_of_capsule(array.__dlpack__(stream=_NO_SYNCHRONIZATION))
    return DeviceOperand(view, int(ordinal))


def _ordinal_of(ptr: int, name: str) -> int:
    """Return the CUDA index of the device that has an address."""
    from cudakit.gpu.cuda.driver import cu, initialize

    initialize()
    attribute = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    status, ordinal = cu.cuPointerGetAttribute(attribute, ptr)
    if status:
        raise UsageError(f"{name} is not in device memory: address {ptr:#x}", hint=_HINT)
    return int(ordinal)


def _current_ordinal() -> int:
    from cudakit.gpu.cuda.current import current_device

    return current_device()


def _not_an_array_error(value: object, name: str, description: str = "") -> UsageError:
    actual_description = description or _type_name(value)
    return UsageError(f"{name} is not a device array, but {actual_description}", hint=_HINT)


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
