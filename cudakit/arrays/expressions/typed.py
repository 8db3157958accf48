"""Type inference: expressions with the type of every value, and every conversion as a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from cudakit.arrays.expressions.dtypes import (
    COMPLEX,
    FLOAT,
    DType,
    ValueType,
    can_store,
    weak_type,
)
from cudakit.arrays.expressions.operations import CASTS, Operation
from cudakit.arrays.expressions.parse import Assignment, Call, Constant, Name, Node, Program
from cudakit.errors import UsageError


@dataclass(frozen=True, slots=True)
class TypedName:
    """An input, or the value of an earlier assignment."""

    name: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class TypedConstant:
    """A number of the dtype that its operation requires."""

    value: bool | int | float | complex
    dtype: DType


@dataclass(frozen=True, slots=True)
class TypedCall:
    """An operation; its operands have the dtypes that the operation requires."""

    operation: Operation
    operands: tuple[TypedNode, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Cast:
    """A conversion to another dtype."""

    operand: TypedNode
    dtype: DType


TypedNode: TypeAlias = TypedName | TypedConstant | TypedCall | Cast


@dataclass(frozen=True, slots=True)
class TypedAssignment:
    """An assignment, and the dtype of its value."""

    target: str
    value: TypedNode
    dtype: DType


def infer(program: Program, inputs: Mapping[str, ValueType]) -> tuple[TypedAssignment, ...]:
    """Return the typed assignments of a program for the types of its inputs.

    Raises UsageError with the source line for operands that an operation does not support.
    """
    type_by_name = dict(inputs)
    assignments = []
    for assignment in program.assignments:
        value, value_type = infer_value(program, assignment.value, type_by_name)
        type_by_name[assignment.target] = ValueType(value_type.dtype)
        assignments.append(TypedAssignment(assignment.target, value, value_type.dtype))
    return tuple(assignments)


def infer_value(
    program: Program, node: Node, type_by_name: Mapping[str, ValueType]
) -> tuple[TypedNode, ValueType]:
    """Return the typed tree of one node, and its type."""
    match node:
        case Name(name):
            return TypedName(name, type_by_name[name].dtype), type_by_name[name]
        case Constant(value):
            value_type = weak_type(value)
            return TypedConstant(value, value_type.dtype), value_type
        case Call(operation, operands, position):
            typed_operands = [infer_value(program, operand, type_by_name) for operand in operands]
            try:
                signature = operation.signature([value_type for _, value_type in typed_operands])
            except UsageError as error:
                raise program.error(error.message, position, hint=error.hint) from None
            converted_operands = tuple(
                convert(operand, dtype)
                for (operand, _), dtype in zip(typed_operands, signature.operands, strict=True)
            )
            if operation.name in CASTS:
                if (
                    converted_operands[0].dtype.category
                    == COMPLEX
                    > signature.result.dtype.category
                ):
                    raise program.error(
                        f"{operation.name} cannot convert a complex value",
                        position,
                        hint="take real(...), imag(...) or abs(...) of the value",
                    )
                return Cast(converted_operands[0], signature.result.dtype), signature.result
            return TypedCall(
                operation, converted_operands, signature.result.dtype
            ), signature.result


def convert(node: TypedNode, dtype: DType) -> TypedNode:
    """Return a node converted to a dtype, or the same node if it has the dtype."""
    if node.dtype is dtype:
        return node
    if isinstance(node, TypedConstant):
        return TypedConstant(node.value, dtype)
    # A float16 value in an operation of float32 is a float already: no instruction is needed.
    if node.dtype.compute_type == dtype.compute_type and dtype.category == FLOAT:
        return _relabel(node, dtype)
    return Cast(node, dtype)


def check_stores(
    program: Program, assignments: tuple[TypedAssignment, ...], arrays: Mapping[str, DType]
) -> None:
    """Raise UsageError if the value of an output cannot be stored in its array."""
    final_assignments = {assignment.target: assignment for assignment in assignments}
    for name, array_dtype in arrays.items():
        if not can_store(final_assignments[name].dtype, array_dtype):
            raise program.error(
                f"{name} is {final_assignments[name].dtype}, and its array is {array_dtype}",
                _last_assignment(program, name).position,
                hint=f"convert the value, as in {name} = {array_dtype}(...)",
            )


def _last_assignment(program: Program, name: str) -> Assignment:
    return [assignment for assignment in program.assignments if assignment.target == name][-1]


def _relabel(node: TypedName | TypedCall | Cast, dtype: DType) -> TypedNode:
    """Return a node whose value has the same representation under another dtype."""
    match node:
        case TypedName(name, _):
            return TypedName(name, dtype)
        case TypedCall(operation, operands, _):
            return TypedCall(operation, operands, dtype)
        case Cast():
            # An explicit conversion to float16 must still round the value.
            return TypedCall(_KEEP_ROUNDING, (node,), dtype)


_KEEP_ROUNDING = Operation("positive", 1, CASTS["float32"].type_rule, lambda value: value)
