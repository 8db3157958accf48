"""The operations of expressions: operand types, the function in CUDA C++ and the function in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudakit.arrays.expressions.dtypes import (
    BOOL,
    COMPLEX,
    DTYPES,
    FLOAT,
    INTEGER,
    DType,
    ValueType,
    float_of,
    promote,
    real_of,
)
from cudakit.errors import UsageError

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
    def infer_cast(types: Sequence[ValueType]) -> Signature:
        return Signature((types[0].dtype,), ValueType(dtype))

    return infer_cast


def _vectorize(function: Callable[[float], float]) -> Callable[[Any], Any]:
    """Return a numpy function for a function of Python's math module."""

    def apply(values: Any) -> Any:
        values = np.asarray(values)
        return np.vectorize(function, otypes=[values.dtype])(values)

    return apply


def _divide_down(dividend: Any, divisor: Any) -> Any:
    """Return the quotient rounded down; 0 for a division of integers by 0, as on the device."""
    return np.floor_divide(dividend, divisor)


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


def _shift_left(value: Any, distance: Any) -> Any:
    return np.left_shift(value, distance)


def _shift_right(value: Any, distance: Any) -> Any:
    return np.right_shift(value, distance)


def _reciprocal_square_root(value: Any) -> Any:
    return np.asarray(1, np.asarray(value).dtype) / np.sqrt(value)


def _subtract(first: Any, second: Any) -> Any:
    if np.asarray(first).dtype == bool:
        return np.logical_xor(first, second)
    return np.subtract(first, second)


def _negate(value: Any) -> Any:
    return value if np.asarray(value).dtype == bool else np.negative(value)


def _keep_value(value: Any) -> Any:
    return value


def _sign(value: Any) -> Any:
    return value if np.asarray(value).dtype == bool else np.sign(value)


def _rounding_function(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that rounds floats and returns integers unchanged."""

    def apply(values: Any) -> Any:
        return function(values) if np.asarray(values).dtype.kind == "f" else values

    return apply


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
    "rsqrt": _reciprocal_square_root,
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
        Operation("floor_divide", 2, _common_rule, _divide_down, _NUMBERS),
        Operation("remainder", 2, _common_rule, np.remainder, _NUMBERS),
        Operation("power", 2, _common_rule, _power, _NUMBERS),
        Operation("negative", 1, _common_rule, _negate, _ANY_CATEGORY),
        Operation("positive", 1, _common_rule, _keep_value, _ANY_CATEGORY),
        Operation("abs", 1, _real_rule, np.abs, _ANY_CATEGORY),
        Operation("sign", 1, _common_rule, _sign),
        Operation("bitwise_and", 2, _common_rule, np.bitwise_and, _BITS),
        Operation("bitwise_or", 2, _common_rule, np.bitwise_or, _BITS),
        Operation("bitwise_xor", 2, _common_rule, np.bitwise_xor, _BITS),
        Operation("invert", 1, _common_rule, np.invert, _BITS),
        Operation("left_shift", 2, _common_rule, _shift_left, _INTEGERS),
        Operation("right_shift", 2, _common_rule, _shift_right, _INTEGERS),
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
            Operation(name, 1, _common_rule, _rounding_function(function))
            for name, function in _ROUNDING_FUNCTIONS.items()
        ),
    )
}
# Conversions are operations, too: they have the name of a dtype, and no function of numpy.
CASTS = {
    name: Operation(name, 1, _cast_rule(dtype), _keep_value, _ANY_CATEGORY)
    for name, dtype in DTYPES.items()
}
# Functions with the names that they have in an expression.
FUNCTIONS: dict[str, Operation] = {
    **OPERATIONS,
    **CASTS,
    "min": OPERATIONS["minimum"],
    "max": OPERATIONS["maximum"],
}
