"""Prepared launches: a kernel, its launch configuration, and the origin of each parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.errors import UsageError
from cudakit.gpu.api import Argument, Dim3, Kernel, Kernels, Module, Ptr, Stream
from cudakit.gpu.api.arrays import ArrayView, Launch

if TYPE_CHECKING:
    from cudakit.arrays.operations import DType


@cache
def cuda_source(name: str) -> str:
    """Return the CUDA C++ of a file of the folder ``cuda``."""
    # The empty line keeps the text, which is the key of compiled images in users' caches, as it was.
    return "\n" + (Path(__file__).parent / "cuda" / name).read_text("utf-8")


@dataclass(frozen=True, slots=True)
class Address:
    """A parameter that is the address of an operand."""

    operand: int  # index of the operand


@dataclass(frozen=True, slots=True)
class Scalar:
    """A parameter that is the value of a scalar operand."""

    operand: int  # index of the operand
    dtype: DType


@dataclass(frozen=True, slots=True)
class Scratch:
    """A parameter that is the address of zeroed device memory. Every launch leaves the memory zeroed."""

    size_bytes: int


NO_SCRATCH = Ptr(0)
Parameter: TypeAlias = Address | Scalar | Scratch | np.generic


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A launch without the addresses and numbers of a call."""

    source: str
    name: str  # name of the kernel in the source
    blocks: int
    threads: int  # threads of a block
    parameters: tuple[Parameter, ...]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that the launch needs."""
        return sum(
            parameter.size_bytes for parameter in self.parameters if isinstance(parameter, Scratch)
        )


def arguments_of(
    plan: LaunchPlan, operands: Sequence[complex | np.generic], scratch: Ptr = NO_SCRATCH
) -> list[Argument]:
    """Return the arguments of a launch: ``operands`` are addresses of arrays and values of scalars."""
    arguments: list[Argument] = []
    for parameter in plan.parameters:
        match parameter:
            case Address(operand):
                arguments.append(Ptr(int(np.real(operands[operand]))))
            case Scalar(operand, dtype):
                arguments.append(scalar_argument(operands[operand], dtype))
            case Scratch():
                arguments.append(scratch)
            case _:
                arguments.append(parameter)
    return arguments


def scalar_argument(value: complex | np.generic, dtype: DType) -> np.generic:
    """Return a number as an argument of the compute type of a dtype."""
    converted_value: Any = np.asarray(value).astype(dtype.compute)
    if dtype.compute.kind != "c":
        scalar: np.generic = converted_value[()]
        return scalar
    # A complex number is passed as a struct of its bytes.
    return bytes_argument(converted_value.tobytes())


def bytes_argument(content: bytes) -> np.generic:
    """Return bytes as one argument: the value of a struct."""
    return np.void(content)


class PlannedKernels:
    """The kernels of plans on one device, compiled and loaded when they are first launched."""

    def __init__(self, gpu: Kernels) -> None:
        self.gpu = gpu
        self._modules: list[Module] = []
        self._kernels: dict[tuple[str, str], Kernel] = {}

    def kernel(self, plan: LaunchPlan) -> Kernel:
        """Return the loaded kernel of a plan."""
        key = (plan.source, plan.name)
        if key not in self._kernels:
            module = self.gpu.load(self.gpu.compile(plan.source))
            self._modules.append(module)
            self._kernels[key] = self.gpu.kernel(module, plan.name)
        return self._kernels[key]

    def launch(self, plan: LaunchPlan, arguments: Sequence[Argument], stream: Stream) -> None:
        """Enqueue a launch; a plan without blocks launches nothing."""
        if plan.blocks:
            shape: Dim3 = (plan.blocks, 1, 1)
            self.gpu.launch(self.kernel(plan), shape, (plan.threads, 1, 1), arguments, stream)

    def close(self) -> None:
        """Unload all kernels, which must have finished."""
        for module in self._modules:
            self.gpu.unload(module)
        self._modules.clear()
        self._kernels.clear()


# --- Layouts of arrays in kernels: broadcasting, merged dimensions and vector widths --------------

MAX_DIMENSIONS = 16
_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """The merged dimensions of broadcast arrays, the innermost first.

    ``strides`` has a tuple of byte distances for each array, one for each dimension; 0 repeats an element.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """The number of elements of the broadcast shape."""
        return math.prod(self.sizes)


def broadcast_shape(arrays: Mapping[str, ArrayView]) -> tuple[int, ...]:
    """Return the common shape of arrays, as numpy broadcasts. Raises UsageError that names the arrays."""
    try:
        return np.broadcast_shapes(*(view.shape for view in arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {list(view.shape)}" for name, view in arrays.items())
        raise UsageError(
            f"the shapes do not broadcast: {shapes}",
            hint="sizes of a dimension must be equal or 1, counted from the last dimension",
        ) from None


def merged_layout(
    shape: tuple[int, ...], arrays: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Layout:
    """Broadcast arrays, given as shape and strides, to a shape; merge dimensions if all arrays allow it.

    Raises UsageError if more than MAX_DIMENSIONS dimensions remain.
    """
    strides = [broadcast_strides(shape, *array) for array in arrays]
    sizes: list[int] = []
    merged_strides: list[list[int]] = [[] for _ in arrays]
    for axis in reversed(range(len(shape))):
        if shape[axis] == 1:
            continue
        axis_strides = [array[axis] for array in strides]
        if sizes and all(
            axis_strides[index] == merged_strides[index][-1] * sizes[-1]
            for index in range(len(arrays))
        ):
            sizes[-1] *= shape[axis]
            continue
        sizes.append(shape[axis])
        for index, stride in enumerate(axis_strides):
            merged_strides[index].append(stride)
    if len(sizes) > MAX_DIMENSIONS:
        raise UsageError(
            f"the arrays have {len(sizes)} dimensions that cannot be merged, at most "
            f"{MAX_DIMENSIONS} are supported",
            hint="make the arrays contiguous",
        )
    if not sizes:
        return Layout((1,), tuple((0,) for _ in arrays))
    return Layout(tuple(sizes), tuple(map(tuple, merged_strides)))


def broadcast_strides(
    target_shape: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the strides of an array that is broadcast to a shape; a repeated dimension has stride 0."""
    added_dimensions = len(target_shape) - len(shape)
    array_strides = tuple(
        0 if extent == 1 else stride for extent, stride in zip(shape, strides, strict=True)
    )
    return (0,) * added_dimensions + array_strides


def vector_width(
    layout: Layout, addresses: Sequence[int], sizes_bytes: Sequence[int], *, largest: int
) -> int:
    """Return the number of adjacent elements, at most ``largest``, that a thread can load from every array.

    ``sizes_bytes`` are those of an element. Every array must be contiguous or constant along the innermost
    dimension. With several dimensions, no vector may cross the end of the innermost one.
    """

    def is_allowed(width: int) -> bool:
        if len(layout.sizes) > 1 and layout.sizes[0] % width:
            return False
        for address, strides, size_bytes in zip(
            addresses, layout.strides, sizes_bytes, strict=False
        ):
            alignment = min(width * size_bytes, _VECTOR_BYTES)
            if strides[0] and (
                strides[0] != size_bytes
                or any(offset % alignment for offset in (address, *strides[1:]))
            ):
                return False
        return True

    width = min(largest, _VECTOR_BYTES // min(sizes_bytes))
    while width > 1 and not is_allowed(width):
        width //= 2
    return width


# --- The kernels of one source, compiled for a device and loaded ----------------------------------

_BLOCK_THREADS = 256
# Maximum number of blocks of a launch: more would cost scheduling time, and kernels stride over all elements.
_MAX_BLOCKS = 1 << 16


class LoadedKernels:
    """The kernels of one source, loaded until ``close`` or until the device is closed."""

    def __init__(self, gpu: Kernels, source: str, names: Sequence[str]) -> None:
        self.gpu = gpu
        self._module = gpu.load(gpu.compile(source))
        self._kernels = {name: gpu.kernel(self._module, name) for name in names}

    def kernel(self, name: str) -> Kernel:
        """Return a loaded kernel by name."""
        return self._kernels[name]

    def launch(
        self, name: str, args: Sequence[Argument], stream: Stream, *, grid: int = 1, block: int = 1
    ) -> None:
        """Launch a kernel by name with a one-dimensional grid."""
        shape: Dim3 = (grid, 1, 1)
        self.gpu.launch(self._kernels[name], shape, (block, 1, 1), args, stream)

    def launch_over(self, name: str, count: int, args: Sequence[Argument], stream: Stream) -> None:
        """Launch a kernel that strides over ``count`` elements; nothing is launched for 0 elements."""
        block_count = min(-(-count // _BLOCK_THREADS), _MAX_BLOCKS)
        if block_count:
            self.launch(name, args, stream, grid=block_count, block=_BLOCK_THREADS)

    def close(self) -> None:
        """Unload the kernels, all of which must have finished."""
        self.gpu.unload(self._module)


# --- Strided arrays in the memory of a simulated device, for host kernels -------------------------

Values = npt.NDArray[Any]


def read_array(
    launch: Launch,
    address: int,
    dtype: np.dtype[Any],
    sizes: Sequence[int],
    strides: Sequence[int],
) -> Values:
    """Return the elements of an array; sizes and strides in bytes are given innermost first."""
    if 0 in sizes:
        return np.empty(sizes[::-1], dtype)
    first_address, offset, size_bytes = _byte_span(address, dtype, sizes, strides)
    content = launch.read(first_address, np.uint8, size_bytes)
    return np.ndarray(sizes[::-1], dtype, content, offset, strides[::-1])


def write_array(launch: Launch, address: int, values: Values, strides: Sequence[int]) -> None:
    """Store values in an array whose strides in bytes are given innermost first."""
    sizes = values.shape[::-1]
    first_address, offset, size_bytes = _byte_span(address, values.dtype, sizes, strides)
    # Between the elements of a strided array are bytes that the kernel does not overwrite.
    is_dense = size_bytes == values.size * values.itemsize
    access_memory = launch.write if is_dense else launch.update
    content = access_memory(first_address, np.uint8, size_bytes)
    np.ndarray(values.shape, values.dtype, content, offset, strides[::-1])[...] = values


def _byte_span(
    address: int, dtype: np.dtype[Any], sizes: Sequence[int], strides: Sequence[int]
) -> tuple[int, int, int]:
    """Return the first address of an array, the offset of its first element, and its size in bytes."""
    extents = [(size - 1) * stride for size, stride in zip(sizes, strides, strict=True)]
    bytes_before = -sum(extent for extent in extents if extent < 0)
    bytes_after = sum(extent for extent in extents if extent > 0)
    return address - bytes_before, bytes_before, bytes_before + bytes_after + dtype.itemsize
