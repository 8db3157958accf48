"""Element types of expressions, and the rules for the type of a result.

The rules are PyTorch's ("Type promotion", torch.Tensor attributes): the category (bool, integer, float,
complex) comes first, so that an integer array never widens a float array, and a Python number never widens
an array of its category. float16 and bfloat16 are computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from cudakit.errors import UsageError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type of device arrays."""

    name: str  # name of the dtype in numpy
    category: int  # BOOL, INTEGER, FLOAT or COMPLEX
    storage_type: str  # CUDA C++ type of an element in memory
    compute_type: str  # CUDA C++ type in which values are computed
    storage: np.dtype[Any]  # numpy dtype of the bits in memory
    compute: np.dtype[Any]  # numpy dtype in which the simulated device computes values

    @property
    def size_bytes(self) -> int:
        """The size of an element in memory, in bytes."""
        return self.storage.itemsize

    def __str__(self) -> str:
        return self.name


# Categories of dtypes, in the order of type promotion.
BOOL, INTEGER, FLOAT, COMPLEX = range(4)

_INTEGER_TYPES = {
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
}


def _numpy_dtype(name: str, category: int, cuda_type: str) -> DType:
    return DType(name, category, cuda_type, cuda_type, np.dtype(name), np.dtype(name))


DTYPES = {
    dtype.name: dtype
    for dtype in (
        _numpy_dtype("bool", BOOL, "bool"),
        *(_numpy_dtype(name, INTEGER, cuda_type) for name, cuda_type in _INTEGER_TYPES.items()),
        DType("float16", FLOAT, "half", "float", np.dtype("float16"), np.dtype("float32")),
        DType("bfloat16", FLOAT, "bfloat", "float", np.dtype("uint16"), np.dtype("float32")),
        _numpy_dtype("float32", FLOAT, "float"),
        _numpy_dtype("float64", FLOAT, "double"),
        _numpy_dtype("complex64", COMPLEX, "complex<float>"),
        _numpy_dtype("complex128", COMPLEX, "complex<double>"),
    )
}
_FLOAT32, _FLOAT64 = DTYPES["float32"], DTYPES["float64"]
_DEFAULTS = (DTYPES["bool"], DTYPES["int64"], _FLOAT32, DTYPES["complex64"])


@dataclass(frozen=True, slots=True)
class ValueType:
    """The type of a value in an expression."""

    dtype: DType
    is_weak: bool = False  # whether the value is a Python number, which adapts to the arrays


def dtype_of(name: str) -> DType:
    """Return the DType of a dtype name. Raises UsageError for a type that kernels do not support."""
    try:
        return DTYPES[name]
    except KeyError:
        raise UsageError(
            f"arrays of dtype {name} are not supported", hint=f"use {', '.join(DTYPES)}"
        ) from None


def weak_type(number: complex) -> ValueType:
    """Return the type of a Python number: bool, int, float or complex."""
    categories = {bool: BOOL, int: INTEGER, float: FLOAT, complex: COMPLEX}
    return ValueType(_DEFAULTS[categories[type(number)]], is_weak=True)


def promote(types: Sequence[ValueType]) -> ValueType:
    """Return the common type of the operands of an operation."""
    strong_dtypes = [value_type.dtype for value_type in types if not value_type.is_weak]
    category = max(value_type.dtype.category for value_type in types)
    if not strong_dtypes:
        return ValueType(_DEFAULTS[category], is_weak=True)
    common_dtype = reduce(_promote_dtypes, strong_dtypes)
    if category <= common_dtype.category:
        return ValueType(common_dtype)
    if category == COMPLEX:
        return ValueType(complex_of(common_dtype))
    return ValueType(_DEFAULTS[category])


def float_of(dtype: DType) -> DType:
    """Return the type of a real function's result: float32 for integers, the same type for floats."""
    return dtype if dtype.category >= FLOAT else _FLOAT32


def real_of(dtype: DType) -> DType:
    """Return the type of the real part of a value."""
    if dtype.category != COMPLEX:
        return dtype
    return _FLOAT64 if dtype.name == "complex128" else _FLOAT32


def complex_of(dtype: DType) -> DType:
    """Return the complex type that holds the values of a type."""
    return DTYPES["complex128" if dtype.name in ("float64", "complex128") else "complex64"]


def can_store(value_dtype: DType, array_dtype: DType) -> bool:
    """Return whether an array may store values of a dtype: its category must not be lower."""
    return value_dtype.category <= array_dtype.category


def _promote_dtypes(first_dtype: DType, second_dtype: DType) -> DType:
    if first_dtype.category > second_dtype.category:
        first_dtype, second_dtype = second_dtype, first_dtype
    if second_dtype.category == COMPLEX:
        has_float64 = "float64" in (first_dtype.name, second_dtype.name)
        return complex_of(_FLOAT64 if has_float64 else _wider_dtype(first_dtype, second_dtype))
    if first_dtype.category < second_dtype.category:
        return second_dtype
    if second_dtype.category == FLOAT:
        return _wider_dtype(first_dtype, second_dtype)
    common_dtype = np.promote_types(first_dtype.name, second_dtype.name)
    if (
        common_dtype.name not in DTYPES
        or DTYPES[common_dtype.name].category > second_dtype.category
    ):
        raise UsageError(
            f"{first_dtype} and {second_dtype} have no common integer type",
            hint="convert one operand, as in int64(x)",
        )
    return DTYPES[common_dtype.name]


def _wider_dtype(first_dtype: DType, second_dtype: DType) -> DType:
    """Return the wider of two types; float32 for float16 with bfloat16, neither of which holds the other."""
    if first_dtype.size_bytes != second_dtype.size_bytes:
        return max(first_dtype, second_dtype, key=lambda dtype: dtype.size_bytes)
    return first_dtype if first_dtype is second_dtype else _FLOAT32
