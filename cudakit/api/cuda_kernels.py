"""Kernels in CUDA C++ that are compiled at run time, for arrays of any library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cudakit.api.kernel_calls import KernelCall, bind_arguments
from cudakit.arrays.cuda_source import (
    TEMPLATE_TYPES,
    KernelParameter,
    convert_number,
    kernel_source,
)
from cudakit.errors import UsageError
from cudakit.gpu.api import Argument, Dim3, Kernel, Ptr
from cudakit.gpu.api.arrays import ArrayView

if TYPE_CHECKING:
    from cudakit.arrays.elementwise import Operand
    from cudakit.gpu.api import Gpu


class CudaKernel:
    """A kernel in CUDA C++, which ``cudakit.kernel`` returns. Call it with a grid, a block and arguments.

    >>> cudakit.kernel("__global__ void increment(int* x) { ++*x; }").name
    'increment'
    """

    def __init__(self, text: str, name: str | None) -> None:
        self._source = kernel_source(text, name)
        self._loaded_kernels: dict[tuple[Gpu, tuple[str, ...]], Kernel] = {}

    @property
    def name(self) -> str:
        """The name of the kernel in the source."""
        return self._source.name

    def __call__(
        self,
        *arguments: object,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        shared_bytes: int = 0,
        stream: object = None,
        **named_arguments: object,
    ) -> None:
        """Enqueue the kernel. Pass an array for each pointer, a number for each other parameter.

        ``grid`` and ``block`` are numbers of blocks and threads, for up to three dimensions; ``shared_bytes``
        is the size of the dynamic shared memory. Raises UsageError for arguments that do not fit the
        parameters, and CudaError with the log of the compiler if the source does not compile.
        """
        source = self._source
        arguments_by_name = bind_arguments(
            [parameter.name for parameter in source.parameters], arguments, named_arguments
        )
        call = KernelCall(arguments_by_name, stream)
        operands = call.operands
        types = self._infer_template_types(operands)
        loaded_kernel = self._load_kernel(call.gpu, types)
        launch_arguments = [
            _convert_argument(parameter, operands[parameter.name], types)
            for parameter in source.parameters
        ]
        call.wait_for_arrays()
        call.gpu.launch(
            loaded_kernel,
            _dim3(grid, "grid"),
            _dim3(block, "block"),
            launch_arguments,
            call.stream,
            shared_bytes=shared_bytes,
        )
        call.set_stream(tuple(arguments_by_name.values()))

    def _infer_template_types(self, operands: dict[str, Operand]) -> dict[str, str]:
        """Return the dtype of each template parameter, from the arrays and numpy scalars of a call."""
        types: dict[str, str] = {}
        for parameter in self._source.parameters:
            value = operands[parameter.name]
            if parameter.type_name not in self._source.template_types:
                continue
            if isinstance(value, ArrayView | np.generic):
                dtype = value.dtype if isinstance(value, ArrayView) else value.dtype.name
                other_dtype = types.setdefault(parameter.type_name, dtype)
                if other_dtype != dtype:
                    raise UsageError(
                        f"the template parameter {parameter.type_name} is {other_dtype} and {dtype}",
                        hint="pass arrays of the same dtype",
                    )
        missing_types = [name for name in self._source.template_types if name not in types]
        if missing_types:
            raise UsageError(
                f"the type of the template parameter {missing_types[0]} is unknown",
                hint=f"pass an array for a parameter {missing_types[0]}*",
            )
        for name, dtype in types.items():
            if dtype not in TEMPLATE_TYPES:
                raise UsageError(
                    f"the template parameter {name} cannot be {dtype}",
                    hint=f"use {', '.join(TEMPLATE_TYPES)}",
                )
        return types

    def _load_kernel(self, gpu: Gpu, types: dict[str, str]) -> Kernel:
        key = (gpu, tuple(types[name] for name in self._source.template_types))
        if key not in self._loaded_kernels:
            module = gpu.load(gpu.compile(self._source.with_types(types)))
            self._loaded_kernels[key] = gpu.kernel(module, self._source.name)
        return self._loaded_kernels[key]


def kernel(source: str, name: str | None = None) -> CudaKernel:
    """Return a kernel in CUDA C++ as a function of arrays and numbers.

    The source is compiled by NVRTC at the first call for the device of the arrays, and stored in the kernel
    cache. ``name`` selects the kernel, if the source has several. A template kernel is compiled for the
    dtypes of the arrays that are passed for its type parameters. Pointers take device arrays of any library,
    other parameters take Python numbers or numpy scalars; their types are checked.

    Call it with ``grid=`` and ``block=``, and optionally ``shared_bytes=`` and ``stream=``. Raises UsageError
    for arguments that do not fit, and CudaError with the source line and the compiler's message if the source
    does not compile. On a simulated device, a host kernel of the same name runs instead.

    >>> from cudakit.gpu.sim import Sim
    >>> def scale(launch, y, a, n):
    ...     launch.update(y, "float64", n)[:] *= a
    >>> y = cudakit.to_device([1.0, 2.0, 3.0], Sim(host_kernels={"scale": scale}))
    >>> scale = cudakit.kernel(
    ...     "template <typename T> __global__ void scale(T* y, T a, int n) {"
    ...     "    const int i = blockIdx.x * blockDim.x + threadIdx.x;"
    ...     "    if (i < n) y[i] *= a;"
    ...     "}"
    ... )
    >>> scale(y, 2, 3, grid=1, block=32)
    >>> y.copy_to_host()
    array([2., 4., 6.])
    """
    return CudaKernel(source, name)


def _convert_argument(
    parameter: KernelParameter, value: Operand, types: dict[str, str]
) -> Argument:
    """Return the argument for a parameter. Raises UsageError if the value does not fit its type."""
    dtype = types.get(parameter.type_name) or parameter.dtype
    if not parameter.is_pointer:
        if isinstance(value, ArrayView):
            raise UsageError(
                f"{parameter.name} is a {parameter.type_name}, not a pointer: pass a number"
            )
        typed_parameter = parameter if dtype is None else _replace_template_type(parameter, dtype)
        return convert_number(value, typed_parameter)
    if not isinstance(value, ArrayView):
        if isinstance(value, int) and not isinstance(value, bool):
            return Ptr(value)
        raise UsageError(f"{parameter.name} is a pointer: pass an array or an address")
    if dtype is not None and value.dtype != dtype:
        raise UsageError(f"{parameter.name} points to {dtype}, and the array is {value.dtype}")
    if value.read_only and not parameter.is_const:
        raise UsageError(
            f"the array {parameter.name} is read-only, and the kernel may write it",
            hint=f"declare it const {parameter.type_name}*, or pass a writable copy",
        )
    return value.ptr


def _replace_template_type(parameter: KernelParameter, dtype: str) -> KernelParameter:
    """Return a parameter whose template type is replaced by a type of CUDA C++."""
    type_name = TEMPLATE_TYPES.get(dtype, parameter.type_name)
    return KernelParameter(parameter.name, type_name, is_pointer=False, is_const=False)


def _dim3(extent: int | Sequence[int], name: str) -> Dim3:
    """Extend one to three dimensions of a grid or block to three. Raises UsageError for other values."""
    extents = (extent,) if isinstance(extent, int) else tuple(extent)
    if not 1 <= len(extents) <= 3 or not all(isinstance(size, int) for size in extents):
        raise UsageError(f"{name} is {extent!r}, not one to three integers")
    x, y, z = (*extents, 1, 1)[:3]
    return (x, y, z)
