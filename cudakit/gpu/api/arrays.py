"""Views of device arrays, in the form that kernels take: address, dtype, shape and strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from cudakit.gpu.api.values import Ptr


@dataclass(frozen=True, slots=True)
class ArrayView:
    """An array in device memory, without ownership of the memory."""

    ptr: Ptr
    dtype: str  # name of the dtype in numpy
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # distance between elements in bytes, for each dimension
    read_only: bool = False

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...], element_bytes: int) -> tuple[int, ...]:
    """Return the strides in bytes of a C-contiguous array."""
    strides = []
    stride = element_bytes
    for extent in reversed(shape):
        strides.append(stride)
        stride *= max(extent, 1)
    return tuple(reversed(strides))


def byte_range(view: ArrayView, element_bytes: int) -> tuple[int, int]:
    """Return the first address of an array and the address after its last byte; strides may be negative."""
    first_offset, end_offset = _byte_offsets(view.shape, view.strides, element_bytes)
    return view.ptr + first_offset, view.ptr + end_offset


@lru_cache(maxsize=4096)
def _byte_offsets(
    shape: tuple[int, ...], strides: tuple[int, ...], element_bytes: int
) -> tuple[int, int]:
    """Return the offsets of the first byte of an array and of the byte after its last one."""
    if 0 in shape:
        return 0, 0
    offsets = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    first_offset = sum(offset for offset in offsets if offset < 0)
    last_offset = sum(offset for offset in offsets if offset > 0)
    return first_offset, last_offset + element_bytes


# --- Element types of buffers, and the conversion between values and bits --------------------------

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format that is not a base type of numpy or CUDA C++."""

    mantissa_bits: int
    bias: int  # exponent bias
    largest_value: float  # largest finite value, to which larger values are clamped


@dataclass(frozen=True, slots=True)
class Element:
    """An element type: ``code`` identifies it in kernels, ``storage_dtype`` is its numpy dtype in memory."""

    name: str
    code: int
    storage_dtype: np.dtype[Any]
    format: Format | None = None

    @property
    def size_bytes(self) -> int:
        """The size of an element."""
        return self.storage_dtype.itemsize

    @property
    def is_integer(self) -> bool:
        """Whether the elements are integers."""
        return self.format is None and self.storage_dtype.kind == "i"


# Binary16 is defined in IEEE 754-2019; bfloat16 is the upper half of binary32; both fp8
# formats are defined in "FP8 Formats for Deep Learning" (arXiv 2209.05433).
FP64 = Element("fp64", 0, np.dtype(np.float64))
FP32 = Element("fp32", 1, np.dtype(np.float32))
FP16 = Element("fp16", 2, np.dtype(np.uint16), Format(10, 15, 65504.0))
BF16 = Element("bf16", 3, np.dtype(np.uint16), Format(7, 127, 255 * 2.0**120))
FP8_E4M3 = Element("fp8_e4m3", 4, np.dtype(np.uint8), Format(3, 7, 448.0))
FP8_E5M2 = Element("fp8_e5m2", 5, np.dtype(np.uint8), Format(2, 15, 57344.0))
INT8 = Element("int8", 6, np.dtype(np.int8))
INT32 = Element("int32", 7, np.dtype(np.int32))

ELEMENTS = {
    element.name: element for element in (FP64, FP32, FP16, BF16, FP8_E4M3, FP8_E5M2, INT8, INT32)
}


def encode(values: npt.ArrayLike, element: Element) -> Bits:
    """Round values to an element type, ties to even; return their bits.

    Types narrower than fp32 are rounded twice, first to fp32, as in the kernels.
    """
    fp64_values = np.asarray(values, np.float64)
    if element.format is not None:
        return _round_to_format(
            fp64_values.astype(np.float32), element.format, element.storage_dtype
        )
    if element.is_integer:
        integer_limits = np.iinfo(element.storage_dtype)
        return np.rint(np.clip(fp64_values, integer_limits.min, integer_limits.max)).astype(
            element.storage_dtype
        )
    return fp64_values.astype(element.storage_dtype)


def decode(bits: Bits, element: Element) -> Floats:
    """Return the exact values of bits as fp64."""
    if element.format is None:
        return bits.astype(np.float64)
    if element is BF16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if element is FP16:
        fp16_values: npt.NDArray[np.float16] = bits.view(np.float16)
        return fp16_values.astype(np.float64)
    value_table = _fp8_values(element.format, has_infinity=element is FP8_E5M2)
    return value_table.take(bits)


def _round_to_format(
    values: npt.NDArray[np.float32], target_format: Format, dtype: np.dtype[Any]
) -> Bits:
    magnitude = np.minimum(np.abs(values).astype(np.float64), target_format.largest_value)
    min_exponent = 1 - target_format.bias  # exponent of subnormal values and zero
    exponent = np.where(
        magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, min_exponent), min_exponent
    )
    significand = np.rint(np.ldexp(magnitude, target_format.mantissa_bits - exponent)).astype(
        np.int64
    )
    sign = np.signbit(values).astype(np.int64) << (8 * dtype.itemsize - 1)
    code = (
        (exponent.astype(np.int64) + target_format.bias - 1) << target_format.mantissa_bits
    ) + significand
    bits: Bits = (sign | code).astype(dtype)
    return bits


def _fp8_values(fp8_format: Format, *, has_infinity: bool) -> Floats:
    """Return the value of each byte of an fp8 format; codes above the largest value are NaN."""
    code = np.arange(128)
    fraction = code & ((1 << fp8_format.mantissa_bits) - 1)
    exponent = code >> fp8_format.mantissa_bits
    implicit_bit = np.where(exponent > 0, 1 << fp8_format.mantissa_bits, 0)
    scale_exponent = np.maximum(exponent, 1) - fp8_format.bias - fp8_format.mantissa_bits
    values = np.ldexp((implicit_bit + fraction).astype(np.float64), scale_exponent)
    values[values > fp8_format.largest_value] = np.nan
    if has_infinity:
        values[exponent == exponent.max()] = np.where(
            fraction[exponent == exponent.max()], np.nan, np.inf
        )
    return np.concatenate([values, -values])


# --- Host kernels: Python functions that replace kernels on a simulated device ---------------------
#
#     @host_kernel("saxpy")
#     def saxpy(launch: Launch, y: Ptr, x: Ptr, a: np.float32, n: np.int32) -> None:
#         launch.update(y, np.float32, n)[:] += a * launch.read(x, np.float32, n)
#
# One call of a host kernel performs the work of all threads of a launch. Real devices ignore host kernels.

HostKernel: TypeAlias = Callable[..., None]
_F = TypeVar("_F", bound=HostKernel)

# The decorator adds the kernels when a module with host kernels is imported.
_REGISTERED_KERNELS: dict[str, HostKernel] = {}


def host_kernel(name: str) -> Callable[[_F], _F]:
    """Return a decorator that makes simulated devices call a function in place of the kernels with a name.

    The function is called with a Launch and the kernel's arguments: pointers as addresses, numbers as numpy
    scalars.
    """

    def register(function: _F) -> _F:
        _REGISTERED_KERNELS[name] = function
        return function

    return register


def registered_kernels() -> Mapping[str, HostKernel]:
    """Return every registered host kernel by the name of its kernel."""
    return MappingProxyType(_REGISTERED_KERNELS)


class Launch(Protocol):
    """A running launch: its shape, and its access to simulated memory.

    Arrays are views of device memory that start at an address: ``count`` elements, ``step_bytes`` apart or
    by default adjacent. Access to unallocated memory fails the launch, as on a device.
    """

    @property
    def threads(self) -> int:
        """The number of threads of all blocks."""

    @property
    def begin_ns(self) -> int:
        """The virtual time at which the kernel began."""

    @property
    def begin_cycles(self) -> int:
        """The cycle counters of the SMs when the kernel began."""

    def read(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        """Return a read-only view of elements that the kernel reads."""

    def write(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        """Return a view of elements that the kernel overwrites completely, without reading."""

    def update(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        """Return a view of elements that the kernel reads and writes."""

    def atomic(
        self, ptr: int, dtype: npt.DTypeLike, count: int = 1, *, step_bytes: int = 0
    ) -> npt.NDArray[Any]:
        """Return a view of elements that the kernel accesses by atomic operations only."""

    def busy(self, nanoseconds: int) -> None:
        """Add to the duration of the kernel, which otherwise is that of its memory accesses."""

    def poll(
        self, is_done: Callable[[], bool], timeout_ns: int, on_timeout: Callable[[], None]
    ) -> None:
        """Keep the kernel running until ``is_done()`` is true, as a kernel that polls memory does.

        After ``timeout_ns`` of virtual time, ``on_timeout`` is called and the kernel ends.
        """
