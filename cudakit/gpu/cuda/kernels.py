"""Kernels: compilation, loading, and launches with checked arguments."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cudakit.gpu.api import Argument, Dim3, Kernel, Module, Stream
from cudakit.gpu.compile import compile_cuda
from cudakit.gpu.compile_cache import user_cache
from cudakit.gpu.cuda.context import Context
from cudakit.gpu.cuda.driver import call_if_available, check, cu
from cudakit.gpu.cuda.streams import CudaStreams
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.handles import Handles, check_arguments

_WORD_BYTES = 8

# A kernel that uses more dynamic shared memory needs an opt-in (CUDA C++ Programming Guide,
# "Shared Memory" of each compute capability).
_SHARED_WITHOUT_OPT_IN_BYTES = 48 << 10


class _LoadedKernel(NamedTuple):
    module: Module
    name: str
    function: Any
    # Parameter sizes in bytes; None if the driver does not report them.
    parameter_sizes: tuple[int, ...] | None


class CudaKernels:
    """The modules, kernels and launches of one device."""

    def __init__(self, context: Context, streams: CudaStreams) -> None:
        self._context, self._streams = context, streams
        self._modules: Handles[Any] = Handles("module")
        self._kernels: Handles[_LoadedKernel] = Handles("kernel")

    def compile(self, source: str) -> bytes:
        return compile_cuda(source, self._context.capability, cache=user_cache(os.environ))

    def load(self, image: bytes) -> Module:
        # PTX must be null-terminated; binary images ignore trailing bytes.
        return Module(self._modules.add(self._context.call(cu.cuModuleLoadData, image + b"\0")))

    def unload(self, module: Module) -> None:
        self._context.call(cu.cuModuleUnload, self._modules.remove(module))
        self._kernels.discard(lambda loaded: loaded.module == module)

    def kernel(self, module: Module, name: str) -> Kernel:
        function = self._context.call(
            cu.cuModuleGetFunction,
            self._modules[module],
            name.encode(),
            detail=lambda: f'kernel {name}; declare it extern "C" to keep its name unmangled',
        )
        # Load the kernel now: lazy loading at its first launch would synchronize, and deadlock with a polling
        # kernel.
        self._context.in_context(call_if_available, "cuFuncLoad", function)
        return Kernel(
            self._kernels.add(
                _LoadedKernel(module, name, function, self._parameter_sizes(function))
            )
        )

    def launch(
        self,
        kernel: Kernel,
        grid: Dim3,
        block: Dim3,
        args: Sequence[Argument],
        stream: Stream,
        *,
        shared_bytes: int = 0,
    ) -> None:
        loaded_kernel = self._kernels[kernel]
        check_arguments(loaded_kernel.name, loaded_kernel.parameter_sizes, args)
        _check_shape(loaded_kernel.name, grid, block)
        if shared_bytes > _SHARED_WITHOUT_OPT_IN_BYTES:
            self._allow_shared_memory(loaded_kernel, shared_bytes)
        parameters = _kernel_params(args)  # must stay referenced until the driver returns
        self._context.call(
            cu.cuLaunchKernel,
            loaded_kernel.function,
            *grid,
            *block,
            shared_bytes,
            self._streams.handle(stream),
            ctypes.addressof(parameters),
            0,
            detail=lambda: self._describe_launch(loaded_kernel, grid, block, shared_bytes),
        )

    def function_address(self, kernel: Kernel) -> int:
        """Return the driver handle of a kernel (CUfunction) as an int."""
        return int(self._kernels[kernel].function)

    @property
    def in_use(self) -> bool:
        """Whether a module is loaded."""
        return len(self._modules) > 0

    def close(self) -> None:
        """Unload all modules."""
        self._kernels.clear()
        for module in self._modules.clear():
            self._context.in_context(cu.cuModuleUnload, module)

    def _parameter_sizes(self, function: Any) -> tuple[int, ...] | None:
        # Older drivers do not report the number of parameters: query parameters until an error.
        count_result = self._context.in_context(call_if_available, "cuFuncGetParamCount", function)
        parameter_count = check(count_result) if count_result else sys.maxsize
        sizes: list[int] = []
        while len(sizes) < parameter_count:
            parameter_info = self._context.in_context(
                call_if_available, "cuFuncGetParamInfo", function, len(sizes)
            )
            if parameter_info is None:
                return None
            if parameter_info[0]:
                break
            sizes.append(parameter_info[2])
        return tuple(sizes)

    def _allow_shared_memory(self, loaded_kernel: _LoadedKernel, shared_bytes: int) -> None:
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._context.call(
            cu.cuFuncSetAttribute,
            loaded_kernel.function,
            attribute,
            shared_bytes,
            detail=lambda: f"{shared_bytes} bytes of shared memory for {loaded_kernel.name}",
        )

    def _describe_launch(
        self, loaded_kernel: _LoadedKernel, grid: Dim3, block: Dim3, shared_bytes: int
    ) -> str:
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        max_threads = self._context.call(cu.cuFuncGetAttribute, attribute, loaded_kernel.function)
        launch_text = (
            f"{loaded_kernel.name} with grid {grid}, block {block}, {shared_bytes} bytes shared"
        )
        return f"{launch_text}; at most {max_threads} threads per block"


def _check_shape(name: str, grid: Dim3, block: Dim3) -> None:
    if min(*grid, *block) <= 0 or max(*grid, *block) >= 1 << 31:
        raise cuda_error(Status.INVALID_VALUE, detail=f"{name} with grid {grid}, block {block}")


def _kernel_params(args: Sequence[Argument]) -> ctypes.Array[ctypes.c_uint64]:
    """Return the kernelParams array of cuLaunchKernel, followed by the argument values it points to."""
    word_offsets: list[int] = []
    words: list[Any] = []
    for arg in args:
        word_offsets.append(len(words))
        words += _words(arg)
    params = (ctypes.c_uint64 * (len(word_offsets) + len(words)))()
    values_address = ctypes.addressof(params) + _WORD_BYTES * len(word_offsets)
    params[:] = [*(values_address + _WORD_BYTES * offset for offset in word_offsets), *words]
    return params


def _words(arg: Argument) -> Sequence[int]:
    if not isinstance(arg, np.generic):
        return (arg,)
    argument_bytes = arg.tobytes()
    if len(argument_bytes) <= _WORD_BYTES:
        return (int.from_bytes(argument_bytes, sys.byteorder),)
    return memoryview(argument_bytes + bytes(-len(argument_bytes) % _WORD_BYTES)).cast("Q").tolist()
