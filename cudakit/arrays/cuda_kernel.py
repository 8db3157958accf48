"""Kernels in CUDA C++ that are compiled at run time, for arrays of any library."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cudakit.arrays.calls import KernelCall, bind_arguments
from cudakit.arrays.operations import DTYPES
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
        named = bind_arguments(
            [parameter.name for parameter in source.parameters], arguments, named_arguments
        )
        call = KernelCall(named, stream)
        gpu = call.gpu
        types = self._infer_template_types(call.operands)
        key = (gpu, tuple(types[name] for name in source.template_types))
        if key not in self._loaded_kernels:
            module = gpu.load(gpu.compile(source.with_types(types)))
            self._loaded_kernels[key] = gpu.kernel(module, source.name)
        launch_arguments = [
            _convert_argument(parameter, call.operands[parameter.name], types)
            for parameter in source.parameters
        ]
        call.wait_for_arrays()
        gpu.launch(
            self._loaded_kernels[key],
            _dim3(grid, "grid"),
            _dim3(block, "block"),
            launch_arguments,
            call.stream,
            shared_bytes=shared_bytes,
        )
        call.set_stream(named.values())

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
        return _convert_number(value, parameter, dtype)
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


def _convert_number(
    value: complex | np.generic, parameter: KernelParameter, dtype: str | None
) -> np.generic:
    """Return a number in the type of a parameter. Raises UsageError if it does not fit."""
    if isinstance(value, np.generic):
        if dtype is not None and value.dtype.name != dtype:
            raise UsageError(f"{parameter.name} is a {dtype}, and the argument is a {value.dtype}")
        return value
    if dtype is None:
        raise UsageError(
            f"the type {parameter.type_name} of {parameter.name} is unknown",
            hint="pass a numpy scalar of the same size, such as numpy.float32(1)",
        )
    target_dtype = np.dtype(dtype)
    is_exact = (
        target_dtype.kind == "f" if isinstance(value, float) else not isinstance(value, complex)
    )
    if is_exact and target_dtype.kind in "iu":
        integer_limits = np.iinfo(target_dtype)
        is_exact = integer_limits.min <= int(value.real) <= integer_limits.max
    if not is_exact:
        raise UsageError(f"{value} does not fit into {parameter.name}, which is a {target_dtype}")
    number: np.generic = target_dtype.type(value)
    return number


def _dim3(extent: int | Sequence[int], name: str) -> Dim3:
    """Extend one to three dimensions of a grid or block to three. Raises UsageError for other values."""
    extents = (extent,) if isinstance(extent, int) else tuple(extent)
    if not 1 <= len(extents) <= 3 or not all(isinstance(size, int) for size in extents):
        raise UsageError(f"{name} is {extent!r}, not one to three integers")
    x, y, z = (*extents, 1, 1)[:3]
    return (x, y, z)


# --- Kernels in CUDA C++ source: their parameters, and the types of template parameters -----------
#
# A template kernel becomes a plain function for each set of types: its template parameters become typedefs,
# so that the kernel has an unmangled name.


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(
    r"(?P<template>template\s*<(?P<types>[^<>]*)>\s*)?"
    r'(?P<linkage>extern\s+"C"\s+)?'
    r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?"
    r"(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)"
)
_TEMPLATE_TYPE = re.compile(r"\s*(?:typename|class)\s+(\w+)\s*")
_QUALIFIERS = frozenset({"const", "volatile", "__restrict__", "__grid_constant__", "restrict"})

# Dtypes of the scalar types of CUDA C++ on 64-bit Linux, by the words of the type in alphabetical order,
# without a redundant "int".
_SCALARS = {
    "bool": "bool",
    "char": "int8",
    "char signed": "int8",
    "char unsigned": "uint8",
    "short": "int16",
    "short unsigned": "uint16",
    "int": "int32",
    "signed": "int32",
    "unsigned": "uint32",
    "long": "int64",
    "long long": "int64",
    "long unsigned": "uint64",
    "long long unsigned": "uint64",
    "float": "float32",
    "double": "float64",
    "size_t": "uint64",
    "ptrdiff_t": "int64",
    **{f"{name}_t": name for name in DTYPES if "int" in name},
}
# Types of CUDA C++ for template parameters; 16-bit floats would need headers of the CUDA toolkit.
TEMPLATE_TYPES = {
    name: dtype.storage_type
    for name, dtype in DTYPES.items()
    if dtype.storage_type not in ("half", "bfloat") and not name.startswith("complex")
}


@dataclass(frozen=True, slots=True)
class KernelParameter:
    """A parameter of a kernel in its source."""

    name: str
    type_name: str  # type without qualifiers; of a pointer, the type of its elements
    is_pointer: bool
    is_const: bool  # whether the elements of a pointer are constant

    @property
    def dtype(self) -> str | None:
        """The dtype of the number or of the elements; None for other types."""
        words = sorted(word for word in self.type_name.split() if word != "int")
        return _SCALARS.get(" ".join(words) or "int")


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One kernel of a source."""

    text: str
    name: str
    parameters: tuple[KernelParameter, ...]
    template_types: tuple[str, ...]  # names of the template parameters

    def with_types(self, types: Mapping[str, str]) -> str:
        """Return the source for dtypes of the template parameters; the lines keep their numbers."""

        def declare_plain_kernel(match: re.Match[str]) -> str:
            header, linkage = match["template"] or "", match["linkage"] or ""
            declarator = match[0][len(header) + len(linkage) :]
            newlines = "\n" * (header.count("\n") + linkage.count("\n"))
            if match["name"] != self.name:
                return match[0] if header else f'{newlines}extern "C" {declarator}'
            typedefs = "".join(
                f"typedef {TEMPLATE_TYPES[types[name]]} {name}; " for name in self.template_types
            )
            return f'{newlines}{typedefs}extern "C" {declarator}'

        return _KERNEL.sub(declare_plain_kernel, self.text)


def kernel_source(text: str, name: str | None = None) -> KernelSource:
    """Return a kernel of a source; ``name`` may be left out if the source has one kernel.

    Raises UsageError if the source does not have the kernel, or a template parameter is not a type.
    """
    kernels = {
        match["name"]: match for match in _KERNEL.finditer(_COMMENT.sub(_blank_comment, text))
    }
    if name is None and len(kernels) != 1:
        raise UsageError(
            f"the source has {len(kernels)} kernels{': ' if kernels else ''}{', '.join(kernels)}",
            hint="give the name of one kernel" if kernels else 'write "__global__ void name(...)"',
        )
    selected_name = name or next(iter(kernels))
    match = kernels.get(selected_name)
    if match is None:
        raise UsageError(
            f"the source has no kernel {selected_name}; its kernels are: {', '.join(kernels)}"
        )
    parameters = [parameter.strip() for parameter in match["parameters"].split(",")]
    return KernelSource(
        _COMMENT.sub(_blank_comment, text),
        selected_name,
        tuple(_parse_parameter(text) for text in parameters if text not in ("", "void")),
        tuple(_template_type(text) for text in (match["types"] or "").split(",") if text.strip()),
    )


def _blank_comment(match: re.Match[str]) -> str:
    """Return the line breaks of a comment without its text, because brackets in the text would be misread."""
    return "\n" * match[0].count("\n") or " "


def _parse_parameter(declaration: str) -> KernelParameter:
    is_pointer = "*" in declaration
    type_text, _, name = declaration.rpartition("*") if is_pointer else ("", "", declaration)
    words = [word for word in name.split() if word not in _QUALIFIERS]
    if not is_pointer:
        type_text = " ".join(words[:-1]) if len(words) > 1 else name
    type_words = [word for word in type_text.replace("*", " ").split() if word not in _QUALIFIERS]
    return KernelParameter(
        words[-1] if words else "",
        " ".join(type_words),
        is_pointer,
        "const" in type_text.split(),
    )


def _template_type(declaration: str) -> str:
    match = _TEMPLATE_TYPE.fullmatch(declaration)
    if match is None:
        raise UsageError(
            f"the template parameter {declaration.strip()!r} is not a type",
            hint="use typename parameters, and #define constants",
        )
    return match[1]
