"""The operations of expressions: operand types, the function in CUDA C++ and the function in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from cudakit.errors import UsageError

# --- Element types of expressions, and the rules for the type of a result -------------------------
#
# The rules are PyTorch's ("Type promotion", torch.Tensor attributes): the category (bool, integer, float,
# complex) comes first, so that an integer array never widens a float array, and a Python number never widens
# an array of its category. float16 and bfloat16 are computed in float32.


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


def _promote_dtypes(first: DType, second: DType) -> DType:
    if first.category > second.category:
        first, second = second, first
    if second.category == COMPLEX:
        has_float64 = "float64" in (first.name, second.name)
        return complex_of(_FLOAT64 if has_float64 else _wider_dtype(first, second))
    if first.category < second.category:
        return second
    if second.category == FLOAT:
        return _wider_dtype(first, second)
    common = DTYPES.get(np.promote_types(first.name, second.name).name)
    if common is None or common.category > second.category:
        raise UsageError(
            f"{first} and {second} have no common integer type",
            hint="convert one operand, as in int64(x)",
        )
    return common


def _wider_dtype(first: DType, second: DType) -> DType:
    """Return the wider of two types; float32 for float16 with bfloat16, neither of which holds the other."""
    if first.size_bytes != second.size_bytes:
        return max(first, second, key=lambda dtype: dtype.size_bytes)
    return first if first is second else _FLOAT32


_BOOL = DTYPES["bool"]


@dataclass(frozen=True, slots=True)
class Signature:
    """The types of an operation for certain operands."""

    operands: tuple[DType, ...]
    result: ValueType


# A rule returns the types of an operation for the types of its operands.
TypeRule = Callable[[Sequence[ValueType]], Signature]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of expressions, which has the name of its function in the CUDA C++ prelude."""

    name: str
    arity: int
    type_rule: TypeRule
    numpy_function: Callable[..., Any]
    # Categories of operands after promotion that the operation accepts.
    categories: frozenset[int] = frozenset({BOOL, INTEGER, FLOAT})

    def signature(self, types: Sequence[ValueType]) -> Signature:
        """Return the types for operands. Raises UsageError if the operation does not support an operand."""
        signature = self.type_rule(types)
        for operand in signature.operands:
            if operand.category not in self.categories:
                raise UsageError(f"{self.name} does not support operands of type {operand}")
        return signature


def _common_rule(types: Sequence[ValueType]) -> Signature:
    """Operands and the result have the common type."""
    common_type = promote(types)
    return Signature((common_type.dtype,) * len(types), common_type)


def _float_rule(types: Sequence[ValueType]) -> Signature:
    """Operands and the result have the common type, or float32 instead of integers."""
    common_type = promote(types)
    dtype = float_of(common_type.dtype)
    return Signature((dtype,) * len(types), ValueType(dtype, common_type.is_weak))


def _predicate_rule(types: Sequence[ValueType]) -> Signature:
    """Operands have the common type, the result is bool."""
    return Signature((promote(types).dtype,) * len(types), ValueType(_BOOL))


def _logical_rule(types: Sequence[ValueType]) -> Signature:
    """Operands are converted to bool, and the result is bool."""
    return Signature((_BOOL,) * len(types), ValueType(_BOOL))


def _real_rule(types: Sequence[ValueType]) -> Signature:
    """The result has the type of the operand's real part."""
    common_type = promote(types)
    return Signature(
        (common_type.dtype,), ValueType(real_of(common_type.dtype), common_type.is_weak)
    )


def _selection_rule(types: Sequence[ValueType]) -> Signature:
    """The first operand is a condition; the others and the result have their common type."""
    common_type = promote(types[1:])
    return Signature((_BOOL, common_type.dtype, common_type.dtype), common_type)


def _cast_rule(dtype: DType) -> TypeRule:
    return lambda types: Signature((types[0].dtype,), ValueType(dtype))


def _vectorize(function: Callable[[float], float]) -> Callable[[Any], Any]:
    """Return a numpy function for a function of Python's math module."""

    def apply(values: Any) -> Any:
        values = np.asarray(values)
        return np.vectorize(function, otypes=[values.dtype])(values)

    return apply


def _only(kinds: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that returns values of other kinds of numpy dtypes unchanged."""
    return lambda values: function(values) if np.asarray(values).dtype.kind in kinds else values


def _power(base: Any, exponent: Any) -> Any:
    if np.asarray(base).dtype.kind not in "iu":
        return np.power(base, exponent)
    # numpy raises ValueError for negative exponents of integers; on the device such a power is 0, 1 or -1.
    power_of_one_or_zero = np.where(
        np.abs(base) == 1, np.where(np.asarray(exponent) % 2, base, 1), 0
    )
    nonnegative_power = np.power(base, np.maximum(exponent, 0))
    return np.where(np.asarray(exponent) < 0, power_of_one_or_zero, nonnegative_power).astype(
        np.asarray(base).dtype
    )


def _subtract(first: Any, second: Any) -> Any:
    is_bool = np.asarray(first).dtype == bool
    return np.logical_xor(first, second) if is_bool else np.subtract(first, second)


_ANY_CATEGORY = frozenset({BOOL, INTEGER, FLOAT, COMPLEX})
_NUMBERS = frozenset({INTEGER, FLOAT})
_FLOATS = frozenset({FLOAT})
_FLOATS_AND_COMPLEX = frozenset({FLOAT, COMPLEX})
_BITS = frozenset({BOOL, INTEGER})
_INTEGERS = frozenset({INTEGER})

_FLOAT_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda value: np.asarray(1, np.asarray(value).dtype) / np.sqrt(value),
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "erf": _vectorize(math.erf),
    "erfc": _vectorize(math.erfc),
}
_ROUNDING_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "trunc": np.trunc,
}

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("add", 2, _common_rule, np.add, _ANY_CATEGORY),
        Operation("subtract", 2, _common_rule, _subtract, _ANY_CATEGORY),
        Operation("multiply", 2, _common_rule, np.multiply, _ANY_CATEGORY),
        Operation("divide", 2, _float_rule, np.divide, _FLOATS_AND_COMPLEX),
        Operation("floor_divide", 2, _common_rule, np.floor_divide, _NUMBERS),
        Operation("remainder", 2, _common_rule, np.remainder, _NUMBERS),
        Operation("power", 2, _common_rule, _power, _NUMBERS),
        Operation("negative", 1, _common_rule, _only("iufc", np.negative), _ANY_CATEGORY),
        Operation("positive", 1, _common_rule, lambda value: value, _ANY_CATEGORY),
        Operation("abs", 1, _real_rule, np.abs, _ANY_CATEGORY),
        Operation("sign", 1, _common_rule, _only("iufc", np.sign)),
        Operation("bitwise_and", 2, _common_rule, np.bitwise_and, _BITS),
        Operation("bitwise_or", 2, _common_rule, np.bitwise_or, _BITS),
        Operation("bitwise_xor", 2, _common_rule, np.bitwise_xor, _BITS),
        Operation("invert", 1, _common_rule, np.invert, _BITS),
        Operation("left_shift", 2, _common_rule, np.left_shift, _INTEGERS),
        Operation("right_shift", 2, _common_rule, np.right_shift, _INTEGERS),
        Operation("equal", 2, _predicate_rule, np.equal, _ANY_CATEGORY),
        Operation("not_equal", 2, _predicate_rule, np.not_equal, _ANY_CATEGORY),
        Operation("less", 2, _predicate_rule, np.less),
        Operation("less_equal", 2, _predicate_rule, np.less_equal),
        Operation("greater", 2, _predicate_rule, np.greater),
        Operation("greater_equal", 2, _predicate_rule, np.greater_equal),
        Operation("logical_and", 2, _logical_rule, np.logical_and),
        Operation("logical_or", 2, _logical_rule, np.logical_or),
        Operation("logical_not", 1, _logical_rule, np.logical_not),
        Operation("where", 3, _selection_rule, np.where, _ANY_CATEGORY),
        Operation("minimum", 2, _common_rule, np.minimum),
        Operation("maximum", 2, _common_rule, np.maximum),
        Operation("atan2", 2, _float_rule, np.arctan2, _FLOATS),
        Operation("hypot", 2, _float_rule, np.hypot, _FLOATS),
        Operation("copysign", 2, _float_rule, np.copysign, _FLOATS),
        Operation("isnan", 1, _predicate_rule, np.isnan),
        Operation("isinf", 1, _predicate_rule, np.isinf),
        Operation("isfinite", 1, _predicate_rule, np.isfinite),
        Operation("real", 1, _real_rule, np.real, _ANY_CATEGORY),
        Operation("imag", 1, _real_rule, np.imag, _ANY_CATEGORY),
        Operation("conj", 1, _common_rule, np.conjugate, _ANY_CATEGORY),
        *(
            Operation(name, 1, _float_rule, function, _FLOATS)
            for name, function in _FLOAT_FUNCTIONS.items()
        ),
        *(
            Operation(name, 1, _common_rule, _only("f", function))
            for name, function in _ROUNDING_FUNCTIONS.items()
        ),
    )
}
# Conversions are operations, too: they have the name of a dtype, and no function of numpy.
CASTS = {
    name: Operation(name, 1, _cast_rule(dtype), lambda value: value, _ANY_CATEGORY)
    for name, dtype in DTYPES.items()
}
# Functions with the names that they have in an expression.
FUNCTIONS: dict[str, Operation] = {
    **OPERATIONS,
    **CASTS,
    "min": OPERATIONS["minimum"],
    "max": OPERATIONS["maximum"],
}
