"""Element types of buffers, and the conversion between values and bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
