"""The operations of reductions: how values are combined, and in which types."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudakit.arrays.expressions.dtypes import BOOL, DTYPES, FLOAT, INTEGER, DType, float_of


@dataclass(frozen=True, slots=True)
class Reducer:
    """A reduction: the operation that combines two values, and the types that it uses."""

    name: str
    operation: str  # name of the operation in the CUDA C++ prelude
    # Function that returns the identity element of a dtype: 0 for sums.
    identity: Callable[[DType], complex]
    accumulator: Callable[[DType], DType]
    numpy_function: Callable[..., Any]


def _sum_type(dtype: DType) -> DType:
    """Return the type of a sum: integers are added in 64 bits."""
    if dtype.category > INTEGER:
        return dtype
    return DTYPES["uint64" if dtype.name.startswith("u") else "int64"]


def _same_type(dtype: DType) -> DType:
    return dtype


def _bool_type(dtype: DType) -> DType:  # noqa: ARG001
    return DTYPES["bool"]


def _constant_identity(value: complex) -> Callable[[DType], complex]:
    return lambda dtype: value  # noqa: ARG005


def _largest_value(dtype: DType) -> complex:
    """Return the largest value of a dtype."""
    if dtype.category == FLOAT:
        return math.inf
    return True if dtype.category == BOOL else int(np.iinfo(dtype.storage).max)


def _smallest_value(dtype: DType) -> complex:
    """Return the smallest value of a dtype."""
    if dtype.category == FLOAT:
        return -math.inf
    return False if dtype.category == BOOL else int(np.iinfo(dtype.storage).min)


REDUCERS = {
    reducer.name: reducer
    for reducer in (
        Reducer("sum", "add", _constant_identity(0), _sum_type, np.sum),
        Reducer("prod", "multiply", _constant_identity(1), _sum_type, np.prod),
        Reducer("mean", "add", _constant_identity(0), float_of, np.sum),
        Reducer("min", "minimum", _largest_value, _same_type, np.min),
        Reducer("max", "maximum", _smallest_value, _same_type, np.max),
        Reducer("any", "logical_or", _constant_identity(False), _bool_type, np.any),
        Reducer("all", "logical_and", _constant_identity(True), _bool_type, np.all),
    )
}
