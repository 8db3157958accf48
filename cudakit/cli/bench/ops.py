"""The libraries of ``cudakit bench ops``: cudakit's public functions, and those that are installed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cudakit.gpu.api import Gpu, Stream
    from cudakit.gpu.api.arrays import ArrayView
    from cudakit.gpu.api.gemm import Operation
    from cudakit.gpu.device_array import DeviceArray

# Public function of cudakit for each operation that has one.
_PUBLIC_CALLS: dict[Operation, str] = {
    "add": "cudakit.elementwise('z = x + y')",
    "softmax": "cudakit.softmax",
    "sum": "cudakit.reduction('sum(x)')",
}


def ops_libraries() -> dict[str, Any]:
    """Return the libraries that ``bench ops`` measures besides its own, as arguments of its Spec."""
    from cudakit.gpu.api.gemm import ARRAY_LIBRARIES
    from cudakit.gpu.array_libraries import has_array_library

    return {
        "public_libraries": {
            operation: partial(PublicFunction, operation=operation) for operation in _PUBLIC_CALLS
        },
        "installed_libraries": tuple(filter(has_array_library, ARRAY_LIBRARIES)),
    }


class PublicFunction:
    """A public function of cudakit, called on tensors of torch if it is installed, else on DeviceArrays."""

    name = "cudakit"
    version = ""

    def __init__(self, gpu: Gpu, operation: Operation) -> None:
        from cudakit.gpu.array_libraries import has_array_library

        self._gpu = gpu
        self._function = _public_function(operation)
        # The library whose current stream the function uses; None without torch.
        self._torch: Any = (
            gpu.array_library("torch") if not gpu.simulated and has_array_library("torch") else None
        )
        # DeviceArrays of the calls, and the stream argument of the calls; both are empty if torch is used.
        self._device_arrays: list[DeviceArray] = []
        self._stream_argument: dict[str, Stream] = {}

    def describe(self, operation: Operation) -> str:
        """Return the call of the public function, and the kind of its arguments."""
        array_kind = "tensors" if self._torch else "DeviceArrays"
        return f"{_PUBLIC_CALLS[operation]} of {array_kind}"

    def bind(
        self,
        operation: Operation,  # noqa: ARG002
        inputs: Sequence[ArrayView],
        output: ArrayView,
    ) -> Callable[[], object]:
        """Return a function that calls the public function on the memory of the views."""
        from cudakit.gpu.device_array import array_over

        if self._torch:
            tensors = [self._torch.array(view) for view in inputs]
            return partial(self._function, *tensors, out=self._torch.array(output))
        *arrays, result = (array_over(self._gpu, view) for view in (*inputs, output))
        self._device_arrays += [*arrays, result]
        return lambda: self._function(*arrays, out=result, **self._stream_argument)

    def set_stream(self, stream: Stream) -> None:
        """Choose the stream of later calls: torch's current stream, or an argument of the call."""
        if self._torch:
            self._torch.set_stream(stream)
        else:
            self._stream_argument["stream"] = stream
            for array in self._device_arrays:
                array.stream = stream

    def close(self) -> None:
        """Restore the current stream of torch."""
        if self._torch:
            self._torch.close()


def _public_function(operation: Operation) -> Any:
    """Return the function of _PUBLIC_CALLS that computes an operation."""
    from cudakit.arrays.kernels import elementwise, reduction
    from cudakit.arrays.softmax import softmax

    match operation:
        case "add":
            return elementwise("z = x + y")
        case "softmax":
            return softmax
    return reduction("sum(x)")
