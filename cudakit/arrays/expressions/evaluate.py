"""Evaluation of expressions in numpy, for simulated devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.arrays.expressions.dtypes import COMPLEX, DType
from cudakit.arrays.expressions.typed import (
    Cast,
    TypedAssignment,
    TypedCall,
    TypedConstant,
    TypedName,
    TypedNode,
)
from cudakit.gpu.api.elements import BF16, decode

Values = npt.NDArray[Any]


def evaluate(
    assignments: Sequence[TypedAssignment], inputs: Mapping[str, Values]
) -> dict[str, Values]:
    """Return the value of each assigned name; inputs and results have the compute dtypes."""
    values = dict(inputs)
    with np.errstate(all="ignore"):  # the device reports no floating-point exceptions either
        for assignment in assignments:
            values[assignment.target] = evaluate_value(assignment.value, values)
    return values


def evaluate_value(node: TypedNode, values: Mapping[str, Values]) -> Values:
    """Return the value of one node."""
    match node:
        case TypedName(name):
            return values[name]
        case TypedConstant(value, dtype):
            return np.asarray(value).astype(dtype.compute)
        case Cast(operand, dtype):
            return convert_values(evaluate_value(operand, values), dtype)
        case TypedCall(operation, operands, dtype):
            arguments = [evaluate_value(operand, values) for operand in operands]
            return np.asarray(operation.numpy_function(*arguments)).astype(dtype.compute)


def convert_values(values: Values, dtype: DType) -> Values:
    """Return values converted to a dtype, and rounded to it, in the dtype's compute type."""
    return from_storage(to_storage(values, dtype), dtype)


def to_storage(values: Values, dtype: DType) -> Values:
    """Return values as the bits of array elements."""
    with np.errstate(all="ignore"):
        if dtype.name == "bfloat16":
            return round_to_bfloat16(values.astype(np.float32))
        if values.dtype.kind == "c" and dtype.category != COMPLEX:
            values = values.real
        return values.astype(dtype.storage)


def from_storage(bits: Values, dtype: DType) -> Values:
    """Return array elements in the dtype in which values are computed."""
    if dtype.name == "bfloat16":
        return decode(bits, BF16).astype(np.float32)
    return bits.astype(dtype.compute)


def round_to_bfloat16(values: Values) -> Values:
    """Return the bits of the nearest bfloat16 values, ties to even; a NaN stays a NaN."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded_words = words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))
    bits = (rounded_words >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits).reshape(values.shape)
