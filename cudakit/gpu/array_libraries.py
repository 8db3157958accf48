"""The operations of ``cudakit bench ops`` by torch and CuPy, on memory that cudakit allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.api import LEGACY, Stream
from cudakit.gpu.api.arrays import ArrayView
from cudakit.gpu.api.gemm import ArrayLibraryName, Operation, OperationLibrary
from cudakit.gpu.device_array import stream_of_cupy
from cudakit.gpu.vendor import CudaDevice, load_cupy, load_torch

_FLOAT32_BYTES = 4
_TORCH_CALLS: Mapping[Operation, str] = MappingProxyType(
    {
        "add": "torch.add(x, y, out=z)",
        "matmul": "torch.mm(x, y, out=z)",
        "softmax": "torch.softmax(x, -1, out=z)",
        "sum": "torch.sum(x, 0, out=z)",
    }
)
_CUPY_CALLS: Mapping[Operation, str] = MappingProxyType(
    {
        "add": "cupy.add(x, y, out=z)",
        "matmul": "cupy.matmul(x, y, out=z)",
        "softmax": "cupy max, subtract, exp, sum and divide",
        "sum": "cupy.sum(x, out=z)",
    }
)


def open_array_library(cuda: CudaDevice, name: ArrayLibraryName) -> OperationLibrary:
    """Import torch or CuPy, and open it on a device.

    Raises MissingDependency with the package to install, EnvironmentUnusable if torch was built without CUDA.
    """
    return (
        TorchOperations(cuda, load_torch())
        if name == "torch"
        else CupyOperations(cuda, load_cupy())
    )


def has_array_library(name: ArrayLibraryName) -> bool:
    """Import torch or CuPy; return whether it is installed and built for CUDA."""
    try:
        load_torch() if name == "torch" else load_cupy()
    except EnvironmentUnusable:
        return False
    return True


class TorchOperations:
    """Operations by torch's functions with ``out=``, which allocate no result."""

    name = "torch"

    def __init__(self, cuda: CudaDevice, torch: Any) -> None:
        self._cuda, self._torch = cuda, torch
        self.version = str(torch.__version__)
        self._device = torch.device("cuda", cuda.ordinal)
        self._previous_stream: Any = (
            None  # Current stream of torch before set_stream; None: not changed.
        )

    def describe(self, operation: Operation) -> str:
        """Return the call of torch that computes an operation."""
        return _TORCH_CALLS[operation]

    def array(self, view: ArrayView) -> Any:
        """Return a tensor over the memory of a view, which owns no memory."""
        elements = self._torch.as_tensor(_DeviceArrayInterface(view), device=self._device)
        return elements.reshape(view.shape)

    def bind(
        self, operation: Operation, inputs: Sequence[ArrayView], output: ArrayView
    ) -> Callable[[], object]:
        """Return the call of torch for an operation on tensors over the views."""
        torch, result = self._torch, self.array(output)
        tensors = [self.array(view) for view in inputs]
        match operation:
            case "add":
                return partial(torch.add, *tensors, out=result)
            case "matmul":
                return partial(torch.mm, *tensors, out=result)
            case "softmax":
                return partial(torch.softmax, *tensors, -1, out=result)
            case "sum":
                return partial(torch.sum, *tensors, 0, out=result)

    def set_stream(self, stream: Stream) -> None:
        """Make a stream the current stream of torch."""
        torch = self._torch
        if self._previous_stream is None:
            self._previous_stream = torch.cuda.current_stream(self._device)
        if stream == LEGACY:
            torch.cuda.set_stream(torch.cuda.default_stream(self._device))
        else:
            handle = self._cuda.stream_address(stream)
            torch.cuda.set_stream(torch.cuda.ExternalStream(handle, device=self._device))

    def close(self) -> None:
        """Restore the current stream of torch. A second call has no effect."""
        if self._previous_stream is not None:
            self._torch.cuda.set_stream(self._previous_stream)
            self._previous_stream = None


class CupyOperations:
    """Operations by CuPy's functions; temporary arrays of softmax are from CuPy's memory pool."""

    name = "cupy"

    def __init__(self, cuda: CudaDevice, cupy: Any) -> None:
        self._cuda, self._cupy = cuda, cupy
        self.version = str(cupy.__version__)
        # Current device and stream of CuPy before set_stream; None: not changed.
        self._previous_device_and_stream: tuple[Any, Any] | None = None

    def describe(self, operation: Operation) -> str:
        """Return the calls of CuPy that compute an operation."""
        return _CUPY_CALLS[operation]

    def bind(
        self, operation: Operation, inputs: Sequence[ArrayView], output: ArrayView
    ) -> Callable[[], object]:
        """Return the call of CuPy for an operation on arrays over the views."""
        cupy, result = self._cupy, self._array(output)
        arrays = [self._array(view) for view in inputs]
        match operation:
            case "add":
                return partial(cupy.add, *arrays, out=result)
            case "matmul":
                return partial(cupy.matmul, *arrays, out=result)
            case "softmax":
                return partial(self._softmax, arrays[0], result)
            case "sum":
                return partial(cupy.sum, *arrays, out=result)

    def set_stream(self, stream: Stream) -> None:
        """Make a stream the current stream of CuPy, on the device of the arrays."""
        cuda = self._cupy.cuda
        if self._previous_device_and_stream is None:
            self._previous_device_and_stream = cuda.Device(), cuda.get_current_stream()
        cuda.Device(self._cuda.ordinal).use()
        handle = self._cuda.stream_address(stream)
        (cuda.Stream.null if stream == LEGACY else stream_of_cupy(self._cupy, handle)).use()

    def close(self) -> None:
        """Restore the current device and stream of CuPy. A second call has no effect."""
        if self._previous_device_and_stream is not None:
            device, stream = self._previous_device_and_stream
            stream.use()
            device.use()
            self._previous_device_and_stream = None

    def _softmax(self, values: Any, result: Any) -> None:
        """Compute a softmax over the last axis: CuPy has no function that writes it to an array."""
        cupy = self._cupy
        cupy.subtract(values, values.max(axis=-1, keepdims=True), out=result)
        cupy.exp(result, out=result)
        cupy.divide(result, result.sum(axis=-1, keepdims=True), out=result)

    def _array(self, view: ArrayView) -> Any:
        cuda = self._cupy.cuda
        size_bytes = view.size * _FLOAT32_BYTES
        memory = cuda.UnownedMemory(int(view.ptr), size_bytes, self, self._cuda.ordinal)
        return self._cupy.ndarray(view.shape, view.dtype, cuda.MemoryPointer(memory, 0))


class _DeviceArrayInterface:
    """The elements of an array of float32 in one dimension (CUDA Array Interface, version 3)."""

    def __init__(self, view: ArrayView) -> None:
        self.__cuda_array_interface__ = {
            "shape": (view.size,),
            "typestr": "<f4",
            "data": (int(view.ptr), False),
            "strides": None,
            "version": 3,
        }
