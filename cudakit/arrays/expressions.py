"""Expressions of ``cudakit.elementwise``: parsed as Python, typed, and evaluated in numpy."""

from __future__ import annotations

import ast
import math
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.arrays.launch import cuda_source
from cudakit.arrays.operations import (
    BOOL,
    CASTS,
    COMPLEX,
    FLOAT,
    FUNCTIONS,
    OPERATIONS,
    DType,
    Operation,
    ValueType,
    can_store,
    weak_type,
)
from cudakit.errors import UsageError
from cudakit.gpu.api.arrays import BF16, decode

# --- Parsing of expressions: Python assignments become trees of operations ------------------------
#
# An expression is a sequence of assignments, one on each line or separated by semicolons. Python's parser
# reads it, so precedence and literals are Python's.

_BINARY_OPERATIONS = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder",
    ast.Pow: "power",
    ast.BitAnd: "bitwise_and",
    ast.BitOr: "bitwise_or",
    ast.BitXor: "bitwise_xor",
    ast.LShift: "left_shift",
    ast.RShift: "right_shift",
}
_UNARY_OPERATIONS = {
    ast.USub: "negative",
    ast.UAdd: "positive",
    ast.Invert: "invert",
    ast.Not: "logical_not",
}
_COMPARISONS = {
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}
_LOGICAL_OPERATIONS = {ast.And: "logical_and", ast.Or: "logical_or"}
_MAX_DEPTH = 100  # Python's recursion limit is 1000, and each level of a tree takes several calls.


@dataclass(frozen=True, slots=True)
class Position:
    """A position in the source of an expression, for error messages."""

    line: int  # counted from 1
    column: int  # counted from 0


@dataclass(frozen=True, slots=True)
class Name:
    """An array, a scalar argument, or a value that an earlier assignment computed."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A number in the source."""

    value: bool | int | float | complex


@dataclass(frozen=True, slots=True)
class Call:
    """An operation on operands."""

    operation: Operation
    operands: tuple[Node, ...]
    position: Position


Node: TypeAlias = Name | Constant | Call


@dataclass(frozen=True, slots=True)
class Assignment:
    """One assignment of an expression."""

    target: str
    value: Node
    position: Position


@dataclass(frozen=True, slots=True)
class Program:
    """A parsed expression."""

    text: str
    assignments: tuple[Assignment, ...]
    inputs: tuple[str, ...]  # names that are read before they are assigned, in order of first use
    outputs: tuple[str, ...]  # names of the results, in order of first assignment

    @property
    def updated_inputs(self) -> tuple[str, ...]:
        """Names of arrays that the expression reads and overwrites."""
        return tuple(name for name in self.outputs if name in self.inputs)

    @property
    def new_outputs(self) -> tuple[str, ...]:
        """Names of outputs that are not read: these arrays can be allocated by the call."""
        return tuple(name for name in self.outputs if name not in self.inputs)

    def error(self, message: str, position: Position, *, hint: str = "") -> UsageError:
        """Return an error whose message shows the source line and marks the position."""
        return source_error(self.text, message, position, hint=hint)


def source_error(text: str, message: str, position: Position, *, hint: str = "") -> UsageError:
    """Return an error whose message shows the source line and marks the position."""
    lines = text.splitlines() or [""]
    line = lines[min(position.line, len(lines)) - 1]
    return UsageError(
        f"{message}\n  line {position.line}: {line}\n  {' ' * len(f'line {position.line}: ')}"
        f"{' ' * position.column}^",
        hint=hint,
    )


def parse(text: str, outputs: Sequence[str] | None = None) -> Program:
    """Parse an expression. ``outputs`` are the names to store; by default, all that are assigned.

    Raises UsageError with the source line for text that is not a valid expression.
    """
    source = textwrap.dedent(text).strip("\n")
    parser = _Parser(source)
    assignments = parser.parse_assignments()
    inputs = tuple(parser.inputs)
    assigned_names = tuple(dict.fromkeys(assignment.target for assignment in assignments))
    if outputs is None:
        return Program(source, assignments, inputs, assigned_names)
    if isinstance(outputs, str):
        outputs = (outputs,)
    unassigned_names = [name for name in outputs if name not in assigned_names]
    if unassigned_names or not outputs:
        raise UsageError(
            f"outputs are {', '.join(unassigned_names) or 'empty'}, but the expression assigns "
            f"{', '.join(assigned_names)}"
        )
    return Program(source, assignments, inputs, tuple(dict.fromkeys(outputs)))


@dataclass(frozen=True, slots=True)
class ParsedReduction:
    """A parsed expression that contains one reduction."""

    program: Program  # text and inputs; it has no assignments
    name: str  # name of the reduction, such as "sum"
    element: Node  # the value that is reduced, for each element
    result: Node  # the value to store, in which REDUCED stands for the reduced value


def parse_reduction(text: str, reduction_names: Collection[str]) -> ParsedReduction:
    """Parse an expression with one call of a function of ``reduction_names``, such as ``sqrt(sum(x * x))``.

    Raises UsageError with the source line for text that is not a valid expression.
    """
    source = textwrap.dedent(text).strip()
    parser = _Parser(source, reductions=reduction_names)
    result = parser.parse_single_value()
    if parser.reduction is None:
        raise UsageError(
            f"the expression {source!r} has no reduction",
            hint=f"reductions: {', '.join(reduction_names)}",
        )
    name, element = parser.reduction
    names_outside = sorted({*_names_in(result)} - {REDUCED})
    if names_outside:
        raise UsageError(
            f"{', '.join(names_outside)} is used outside of {name}(...)",
            hint="only the reduced value and constants may be used there",
        )
    return ParsedReduction(Program(source, (), tuple(parser.inputs), ()), name, element, result)


# The name of the reduced value in the tree of a result; it is no identifier, so it hides no input.
REDUCED = "<reduced value>"


def _names_in(node: Node) -> Iterator[str]:
    """Yield the names in a tree."""
    match node:
        case Name(name):
            yield name
        case Call(_, operands):
            for operand in operands:
                yield from _names_in(operand)


class _Parser:
    """Converts Python's syntax trees to expressions; ``inputs`` are names that are read before assignment."""

    def __init__(self, text: str, reductions: Collection[str] = ()) -> None:
        self._text = text
        self._reductions = reductions
        # Name and operand of the reduction; None before it is parsed.
        self.reduction: tuple[str, Node] | None = None
        self.inputs: dict[str, None] = {}
        self._assigned_names: set[str] = set()

    def parse_assignments(self) -> tuple[Assignment, ...]:
        statements = self._parse_python().body
        if not statements:
            raise UsageError("the expression is empty", hint='write assignments, as in "z = x + y"')
        return tuple(self._convert_assignment(statement) for statement in statements)

    def parse_single_value(self) -> Node:
        statements = self._parse_python().body
        if len(statements) != 1 or not isinstance(statements[0], ast.Expr):
            raise UsageError(
                f"not a single expression: {self._text!r}", hint='write it as in "sum(x * y)"'
            )
        return self._convert_node(statements[0].value, 0)

    def _parse_python(self) -> ast.Module:
        try:
            return ast.parse(self._text)
        except SyntaxError as error:
            position = Position(error.lineno or 1, max((error.offset or 1) - 1, 0))
            raise source_error(self._text, f"invalid syntax: {error.msg}", position) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise UsageError(f"the expression cannot be parsed: {error}") from None

    def _convert_assignment(self, statement: ast.stmt) -> Assignment:
        position = _position(statement)
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value):
                node = self._convert_node(value, 0)
            case ast.AugAssign(target=ast.Name(id=target), op=operator, value=value):
                old_value = self._convert_name(target)
                operands = (old_value, self._convert_node(value, 0))
                node = Call(OPERATIONS[_BINARY_OPERATIONS[type(operator)]], operands, position)
            case _:
                raise self._source_error("only assignments to a name are allowed", statement)
        if target in FUNCTIONS:
            raise self._source_error(f"{target} is the name of a function", statement)
        self._assigned_names.add(target)
        return Assignment(target, node, position)

    def _convert_node(self, node: ast.expr, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise self._source_error(
                f"the expression is nested more than {_MAX_DEPTH} levels deep", node
            )
        match node:
            case ast.Name(id=name):
                return self._convert_name(name)
            case ast.Constant(value=bool() | int() | float() | complex() as value):
                if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                    raise self._source_error("the integer does not fit into 64 bits", node)
                return Constant(value)
            case ast.BoolOp(op=operator, values=values):
                operation = OPERATIONS[_LOGICAL_OPERATIONS[type(operator)]]
                return _join_operands(operation, self._convert_all(values, depth), _position(node))
            case ast.Compare(left=left, ops=operators, comparators=comparators):
                compared = pairwise(self._convert_all([left, *comparators], depth))
                if any(type(operator) not in _COMPARISONS for operator in operators):
                    raise self._source_error(
                        "only the comparisons == != < <= > >= are supported", left
                    )
                # ``a < b < c`` is ``a < b and b < c``.
                comparisons = [
                    Call(OPERATIONS[_COMPARISONS[type(operator)]], pair, _position(left))
                    for operator, pair in zip(operators, compared, strict=True)
                ]
                return _join_operands(OPERATIONS["logical_and"], comparisons, _position(left))
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if (
                name in self._reductions
            ):
                element = self._convert_node(argument, depth + 1)
                if self.reduction is not None:
                    raise self._source_error("an expression may have only one reduction", node)
                self.reduction = (name, element)
                return Name(REDUCED)
            case ast.Call(func=ast.Name(id=name), args=operands, keywords=[]):
                operation = self._function(name, len(operands), node)
            case ast.BinOp(left=left, op=operator, right=right) if (
                type(operator) in _BINARY_OPERATIONS
            ):
                operation = OPERATIONS[_BINARY_OPERATIONS[type(operator)]]
                operands = [left, right]
            case ast.UnaryOp(op=operator, operand=operand):
                operation, operands = OPERATIONS[_UNARY_OPERATIONS[type(operator)]], [operand]
            case ast.IfExp(test=test, body=body, orelse=alternative):
                operation, operands = OPERATIONS["where"], [test, body, alternative]
            case _:
                raise self._source_error("this syntax is not supported in expressions", node)
        return Call(operation, tuple(self._convert_all(operands, depth)), _position(node))

    def _function(self, name: str, argument_count: int, node: ast.expr) -> Operation:
        operation = FUNCTIONS.get(name)
        if operation is None:
            raise self._source_error(
                f"unknown function {name}", node, hint=f"functions: {', '.join(sorted(FUNCTIONS))}"
            )
        if argument_count != operation.arity:
            raise self._source_error(
                f"{name} takes {operation.arity} arguments, got {argument_count}", node
            )
        return operation

    def _convert_all(self, nodes: Sequence[ast.expr], depth: int) -> list[Node]:
        return [self._convert_node(node, depth + 1) for node in nodes]

    def _convert_name(self, name: str) -> Name:
        if name not in self._assigned_names:
            self.inputs[name] = None
        return Name(name)

    def _source_error(self, message: str, node: ast.AST, *, hint: str = "") -> UsageError:
        return source_error(self._text, message, _position(node), hint=hint)


def _join_operands(operation: Operation, operands: Sequence[Node], position: Position) -> Node:
    """Return one tree for an operation on any number of operands, grouped from the left."""
    return reduce(lambda left, right: Call(operation, (left, right), position), operands)


def _position(node: ast.AST) -> Position:
    return Position(getattr(node, "lineno", 1), getattr(node, "col_offset", 0))


# --- Type inference: expressions with the type of every value, and every conversion as a node -----


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
                operand = converted_operands[0]
                if operand.dtype.category == COMPLEX > signature.result.dtype.category:
                    raise program.error(
                        f"{operation.name} cannot convert a complex value",
                        position,
                        hint="take real(...), imag(...) or abs(...) of the value",
                    )
                return Cast(operand, signature.result.dtype), signature.result
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
        if isinstance(node, Cast):
            # An explicit conversion to float16 must still round the value.
            return TypedCall(_KEEP_ROUNDING, (node,), dtype)
        return replace(node, dtype=dtype)
    return Cast(node, dtype)


def check_stores(
    program: Program, assignments: tuple[TypedAssignment, ...], arrays: Mapping[str, DType]
) -> None:
    """Raise UsageError if the value of an output cannot be stored in its array."""
    for name, array_dtype in arrays.items():
        index = max(index for index, stored in enumerate(assignments) if stored.target == name)
        dtype = assignments[index].dtype
        if not can_store(dtype, array_dtype):
            raise program.error(
                f"{name} is {dtype}, and its array is {array_dtype}",
                program.assignments[index].position,
                hint=f"convert the value, as in {name} = {array_dtype}(...)",
            )


_KEEP_ROUNDING = Operation("positive", 1, CASTS["float32"].type_rule, lambda value: value)


# --- Evaluation of expressions in numpy, for simulated devices ------------------------------------

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


# --- CUDA C++ of typed expressions -----------------------------------------------------------------

# NVRTC declares the mathematical functions for float and double; headers are not needed.
PRELUDE = cuda_source("prelude.cuh")


def cuda_text(node: TypedNode, names: Mapping[str, str]) -> str:
    """Return a C++ expression for a typed tree; ``names`` maps names of the expression to C++ variables."""
    match node:
        case TypedName(name):
            return names[name]
        case TypedConstant(value, dtype):
            return literal(value, dtype)
        case Cast(operand, dtype):
            text = cuda_text(operand, names)
            if dtype.category == BOOL:
                zero = f"({operand.dtype.compute_type})0"
                return f"op::not_equal({text}, {zero})"
            if dtype.category == COMPLEX and operand.dtype.category != COMPLEX:
                return f"({dtype.compute_type})({_real_part(dtype)})({text})"
            return f"rounded<{dtype.storage_type}>({text})"
        case TypedCall(operation, operands, dtype):
            arguments = ", ".join(cuda_text(operand, names) for operand in operands)
            return f"op::{operation.name}({arguments})"


def literal(value: complex, dtype: DType) -> str:
    """Return a number as a C++ expression of the compute type of a dtype."""
    if dtype.category == COMPLEX:
        part_texts = ", ".join(_float_literal(float(part)) for part in (value.real, value.imag))
        return f"{dtype.compute_type}({part_texts})"
    number = value.real
    if dtype.category == FLOAT:
        return f"({dtype.compute_type})({_float_literal(float(number))})"
    if dtype.category == BOOL:
        return "true" if number else "false"
    # The smallest 64-bit integer has no literal in C++; its unsigned bits are converted.
    return f"({dtype.compute_type})({int(number) & (1 << 64) - 1}ull)"


def _float_literal(value: float) -> str:
    if math.isfinite(value):
        return value.hex()
    bits = "0x7FF8000000000000" if math.isnan(value) else "0x7FF0000000000000"
    sign = "-" if value < 0 else ""
    return f"{sign}__longlong_as_double({bits}LL)"


def _real_part(dtype: DType) -> str:
    return dtype.compute_type.removeprefix("complex<").removesuffix(">")
