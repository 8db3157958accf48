"""Reductions: sums, products, extrema and means of expressions, over all or some axes of arrays.

A block is divided into rows of threads: threads of one column combine elements of the same output. Long
reductions are split over several blocks; the block that finishes last combines their partial results in
the order of their positions, so that the result is the same in every run.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np

from cudakit.arrays.elementwise import (
    Operand,
    ResultType,
    arrays_of,
    check_arrays,
    check_overlaps,
    element_bytes,
    input_types,
    scalar_dtypes,
    scalar_values,
)
from cudakit.arrays.expressions import (
    PRELUDE,
    REDUCED,
    TypedNode,
    convert,
    convert_values,
    cuda_text,
    evaluate_value,
    from_storage,
    infer_value,
    literal,
    parse_reduction,
    to_storage,
)
from cudakit.arrays.launch import (
    Address,
    LaunchPlan,
    Layout,
    Parameter,
    Scalar,
    Scratch,
    broadcast_shape,
    broadcast_strides,
    bytes_argument,
    cuda_source,
    merged_layout,
    read_array,
    vector_width,
    write_array,
)
from cudakit.arrays.operations import (
    BOOL,
    COMPLEX,
    DTYPES,
    FLOAT,
    INTEGER,
    DType,
    ValueType,
    can_store,
    dtype_of,
    float_of,
)
from cudakit.errors import UsageError
from cudakit.gpu.api.arrays import ArrayView, Launch, host_kernel


class ReductionProgram:
    """A parsed reduction, from which launches are planned for arrays of any dtypes and layouts."""

    def __init__(
        self, text: str, axis: int | Sequence[int] | None = None, *, keepdims: bool = False
    ) -> None:
        self._parsed = parse_reduction(text, REDUCERS)
        self._reducer = REDUCERS[self._parsed.name]
        self._axis = axis
        self._keepdims = keepdims

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arguments, in order of first use."""
        return self._parsed.program.inputs

    def result_type(self, inputs: Mapping[str, Operand]) -> ResultType:
        """Return the dtype and shape of the result. Raises UsageError for inputs that do not fit."""
        shape, axes = self._shape_and_axes(inputs)
        output_shape = [
            1 if axis in axes else extent
            for axis, extent in enumerate(shape)
            if self._keepdims or axis not in axes
        ]
        return ResultType(self._infer(inputs)[1].dtype.name, tuple(output_shape))

    def plan(self, inputs: Mapping[str, Operand], output: ArrayView) -> LaunchPlan:
        """Return the launch for operands and an output; its operands are the inputs, then the output.

        Raises UsageError for arrays that do not fit, and for the minimum or maximum of no elements. The plan
        is also valid for arrays at other addresses with the same remainders modulo 16.
        """
        arrays, reducer = arrays_of(inputs), self._reducer
        element, result = self._infer(inputs)
        check_arrays(arrays, {"out": output}, self.result_type(inputs).shape)
        if not can_store(result.dtype, dtype_of(output.dtype)):
            raise UsageError(
                f"the result is {result.dtype}, and out is {output.dtype}",
                hint="pass an array of the result's dtype",
            )
        outputs, reduced = self._layouts(inputs, output)
        if reducer.name in ("min", "max") and outputs.count and not reduced.count:
            raise UsageError(f"{reducer.name} of no elements is undefined")
        blocks = choose_block_shape(
            outputs,
            reduced,
            [view.ptr for view in arrays.values()],
            list(map(element_bytes, arrays.values())),
        )
        source = ReductionSource(
            text=self._parsed.program.text,
            reducer=reducer,
            element=element,
            result=result,
            dtypes={name: dtype_of(view.dtype) for name, view in arrays.items()},
            output=dtype_of(output.dtype),
            scalars=scalar_dtypes(inputs),
            output_dimensions=len(outputs.sizes),
            reduced_dimensions=len(reduced.sizes),
            blocks=blocks,
            repeated_arrays=frozenset(
                index for index, strides in enumerate(reduced.strides) if not strides[0]
            ),
        )
        source_text, name = source.source()
        _register_host_kernel(name, source)
        numbers = [outputs.count, reduced.count, blocks.chunk, blocks.splits]
        numbers += [*outputs.sizes, *reduced.sizes]
        for output_strides, reduced_strides in zip(outputs.strides, reduced.strides, strict=True):
            numbers += [*output_strides, *reduced_strides]
        positions = {name: index for index, name in enumerate(inputs)}
        parameters: list[Parameter] = [
            bytes_argument(np.array(numbers, np.int64).tobytes()),
            *(Address(positions[name]) for name in arrays),
            Address(len(inputs)),
            Scratch(blocks.scratch_bytes(outputs.count, element.dtype)),
            *(Scalar(positions[name], dtype) for name, dtype in source.scalars.items()),
        ]
        block_count = -(-outputs.count // blocks.columns) * blocks.splits
        return LaunchPlan(source_text, name, block_count, blocks.threads, tuple(parameters))

    def check_overlaps(self, inputs: Mapping[str, Operand], output: ArrayView) -> None:
        """Raise UsageError if the output shares memory with an input."""
        check_overlaps("out", output, {}, arrays_of(inputs))

    def _shape_and_axes(
        self, inputs: Mapping[str, Operand]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the broadcast shape, and the reduced axes as indices from 0."""
        arrays = arrays_of(inputs)
        if not arrays:
            raise UsageError("a reduction needs at least one array")
        shape = broadcast_shape(arrays)
        if self._axis is None:
            return shape, tuple(range(len(shape)))
        given = (self._axis,) if isinstance(self._axis, int) else tuple(self._axis)
        axes = {axis + len(shape) if axis < 0 else axis for axis in given}
        if len(axes) < len(given) or not axes <= {*range(len(shape))}:
            raise UsageError(
                f"axis is {self._axis}, and the arrays have {len(shape)} dimensions",
                hint="give each axis once, from 0, or from -1 for the last one",
            )
        return shape, tuple(sorted(axes))

    def _infer(self, inputs: Mapping[str, Operand]) -> tuple[TypedNode, TypedNode]:
        """Return the typed trees of an element, in the accumulator's dtype, and of the result."""
        program, reducer = self._parsed.program, self._reducer
        element, element_type = infer_value(program, self._parsed.element, input_types(inputs))
        accumulator = reducer.accumulator(element_type.dtype)
        if accumulator.category == COMPLEX and reducer.operation in ("minimum", "maximum"):
            raise UsageError(f"{reducer.name} does not support {accumulator}")
        result, _ = infer_value(program, self._parsed.result, {REDUCED: ValueType(accumulator)})
        return convert(element, accumulator), result

    def _layouts(self, inputs: Mapping[str, Operand], output: ArrayView) -> tuple[Layout, Layout]:
        """Return the layouts of the output's and of the reduced dimensions, for all inputs and the output."""
        shape, axes = self._shape_and_axes(inputs)
        strides = [
            broadcast_strides(shape, view.shape, view.strides)
            for view in arrays_of(inputs).values()
        ]
        output_strides = list(output.strides)
        if not self._keepdims:
            for axis in axes:
                output_strides.insert(axis, 0)
        strides.append(
            tuple(0 if axis in axes else stride for axis, stride in enumerate(output_strides))
        )

        def layout(kept: Sequence[int]) -> Layout:
            kept_shape = tuple(shape[axis] for axis in kept)
            return merged_layout(
                kept_shape,
                [(kept_shape, tuple(array[axis] for axis in kept)) for array in strides],
            )

        return layout([axis for axis in range(len(shape)) if axis not in axes]), layout(axes)


def _register_host_kernel(name: str, source: ReductionSource) -> None:
    """Register the numpy implementation of a kernel, for simulated devices."""
    reducer, accumulator, array_count = source.reducer, source.element.dtype, len(source.dtypes)
    dimensions = source.output_dimensions + source.reduced_dimensions

    @host_kernel(name)
    def run(launch: Launch, layout: np.generic, *arguments: int | np.generic) -> None:
        words = np.frombuffer(layout.tobytes(), np.int64)
        first_stride = 4 + dimensions
        # Reduced dimensions come first: they are the innermost ones of the values in numpy.
        order = [*range(source.output_dimensions, dimensions), *range(source.output_dimensions)]
        sizes = words[4:first_stride][order].tolist()
        strides = words[first_stride:].reshape(-1, dimensions)[:, order].tolist()
        values = scalar_values(source.scalars, arguments[array_count + 2 :])
        for index, (array, dtype) in enumerate(source.dtypes.items()):
            bits = read_array(launch, int(arguments[index]), dtype.storage, sizes, strides[index])
            values[array] = from_storage(bits, dtype)
        with np.errstate(all="ignore"):
            elements = np.broadcast_to(evaluate_value(source.element, values), sizes[::-1])
            axes = tuple(range(-source.reduced_dimensions, 0))
            total = np.asarray(reducer.numpy_function(elements, axis=axes))
            total = total.astype(accumulator.compute)
            if reducer.name == "mean":
                total = total / accumulator.compute.type(words[1])
            result = evaluate_value(source.result, {REDUCED: total})
        output_sizes = sizes[source.reduced_dimensions :]
        output = to_storage(
            np.broadcast_to(convert_values(result, source.result.dtype), output_sizes[::-1]),
            source.output,
        )
        write_array(
            launch, int(arguments[array_count]), output, strides[-1][source.reduced_dimensions :]
        )


# --- The operations of reductions: how values are combined, and in which types --------------------


@dataclass(frozen=True, slots=True)
class Reducer:
    """A reduction: the operation that combines two values, and the types that it uses."""

    name: str
    operation: str  # name of the operation in the CUDA C++ prelude
    start: float  # identity element of the operation; infinity stands for the limit of a dtype
    accumulator: Callable[[DType], DType]
    numpy_function: Callable[..., Any]

    def identity(self, dtype: DType) -> float:
        """Return the identity element of the operation in a dtype."""
        if dtype.category >= FLOAT or not math.isinf(self.start):
            return self.start
        if dtype.category == BOOL:
            return self.start > 0
        limits = np.iinfo(dtype.storage)
        return int(limits.max if self.start > 0 else limits.min)


def _sum_type(dtype: DType) -> DType:
    """Return the type of a sum: integers are added in 64 bits."""
    if dtype.category > INTEGER:
        return dtype
    return DTYPES["uint64" if dtype.name.startswith("u") else "int64"]


REDUCERS = {
    reducer.name: reducer
    for reducer in (
        Reducer("sum", "add", 0, _sum_type, np.sum),
        Reducer("prod", "multiply", 1, _sum_type, np.prod),
        Reducer("mean", "add", 0, float_of, np.sum),
        Reducer("min", "minimum", math.inf, lambda dtype: dtype, np.min),
        Reducer("max", "maximum", -math.inf, lambda dtype: dtype, np.max),
        Reducer("any", "logical_or", False, lambda _: DTYPES["bool"], np.any),
        Reducer("all", "logical_and", True, lambda _: DTYPES["bool"], np.all),
    )
}


# --- The division of a reduction into blocks, threads and vectors ---------------------------------

_SHORT_BLOCK, _LONG_BLOCK = 256, 1024  # number of threads of a block
# Minimum number of vectors that each thread of a split reduction reads.
_VECTORS_PER_THREAD = 4
_THREAD_ELEMENTS = 8  # maximum number of elements that one thread reduces alone
# Maximum number of blocks of a split reduction: about the number that a large GPU runs at once.
_MAX_BLOCKS = 1024
# A reduction of all elements with at least this number of vectors has fewer blocks, with more threads each.
# The three numbers were measured on an H200, on which two such blocks run on each multiprocessor.
_LARGE_VECTOR_COUNT, _LARGE_BLOCK, _LARGE_MAX_BLOCKS = 1 << 17, 512, 264
_MANY_OUTPUTS, _MANY_OUTPUTS_VECTORS = 4096, 32
_FEW_OUTPUTS = 64  # with fewer outputs than this, a block of more threads occupies the GPU better
_WARP = 32
_VECTOR_BYTES = 16
_COUNTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The division of a reduction into blocks and threads."""

    columns: int  # number of outputs that a block computes
    threads: int  # number of threads of a block
    width: int  # number of elements of a vector
    chunk: int  # number of elements of each output that one block reduces
    splits: int  # number of blocks that reduce one output
    are_outputs_adjacent: bool  # whether adjacent threads compute adjacent outputs

    def scratch_bytes(self, outputs: int, accumulator: DType) -> int:
        """Return the bytes of counters and partial results; 0 if one block reduces each output."""
        if self.splits == 1:
            return 0
        tile_count = -(-outputs // self.columns)
        # Counters come first, padded so that the partial results are aligned.
        counter_bytes = -(-tile_count * _COUNTER_BYTES // _VECTOR_BYTES) * _VECTOR_BYTES
        return counter_bytes + outputs * self.splits * accumulator.compute.itemsize


def choose_block_shape(
    outputs: Layout, reduced: Layout, addresses: Sequence[int], sizes_bytes: Sequence[int]
) -> BlockShape:
    """Return the numbers of threads and blocks that reduce each output, and the vector width.

    ``addresses`` and ``sizes_bytes`` (of an element) are those of the inputs.
    """
    # A thread loads adjacent reduced elements of one output.
    loaded = Layout(
        reduced.sizes + outputs.sizes,
        tuple(map(operator.add, reduced.strides, outputs.strides)),
    )
    width = vector_width(
        reduced if outputs.count == 1 else loaded, addresses, sizes_bytes, largest=8
    )
    reduced_count, threads = max(reduced.count, 1), _SHORT_BLOCK
    max_blocks = _MAX_BLOCKS
    is_column_sum = (
        width == 1
        and outputs.count >= _WARP
        and any(
            outputs.strides[index][0] == size_bytes != reduced.strides[index][0]
            for index, size_bytes in enumerate(sizes_bytes)
        )
    )
    if reduced_count <= _THREAD_ELEMENTS and outputs.count > 1:
        columns = threads  # one thread reduces one output
    elif is_column_sum:
        columns = _WARP
    elif outputs.count > 1 and reduced_count <= _WARP * width * (
        _MANY_OUTPUTS_VECTORS if outputs.count >= _MANY_OUTPUTS else _VECTORS_PER_THREAD
    ):
        columns = threads // _WARP  # one warp reduces one output
    else:
        columns = 1
        is_one_block_faster = reduced_count <= _LONG_BLOCK * _VECTORS_PER_THREAD * width
        if is_one_block_faster and reduced_count > threads * width and outputs.count < _FEW_OUTPUTS:
            threads = _LONG_BLOCK
        elif outputs.count == 1 and reduced_count >= _LARGE_VECTOR_COUNT * width:
            threads, max_blocks = _LARGE_BLOCK, _LARGE_MAX_BLOCKS
    threads_per_output = threads // columns
    tile_count = max(-(-outputs.count // columns), 1)
    smallest_chunk = threads_per_output * width * _VECTORS_PER_THREAD
    splits = max(1, min(-(-reduced_count // smallest_chunk), max_blocks // tile_count))
    chunk = -(-reduced_count // splits)
    chunk = -(-chunk // (threads_per_output * width)) * threads_per_output * width
    is_adjacent = is_column_sum or columns == threads
    return BlockShape(columns, threads, width, chunk, -(-reduced_count // chunk), is_adjacent)


# --- CUDA C++ source of reductions ----------------------------------------------------------------

# The words in capitals are placeholders.
_SOURCE = cuda_source("reduction.cu")


@dataclass(frozen=True)
class ReductionSource:
    """Everything that the source of one reduction depends on."""

    text: str  # the expression
    reducer: Reducer
    element: TypedNode  # in the dtype of the accumulator
    result: TypedNode
    dtypes: Mapping[str, DType]  # element types of the input arrays
    output: DType
    scalars: Mapping[str, DType]
    output_dimensions: int
    reduced_dimensions: int
    blocks: BlockShape
    repeated_arrays: frozenset[int]  # indices of arrays whose innermost reduced stride is 0

    def source(self) -> tuple[str, str]:
        """Return the CUDA C++ source, and the name of the kernel."""
        body = re.sub(r"\b[A-Z][A-Z_]+\b", lambda name: self._values.get(name[0], name[0]), _SOURCE)
        name = f"cudakit_reduction_{sha256(body.encode()).hexdigest()[:16]}"
        comment = self.text.replace("\\", " ").replace("\n", " ")
        return f"// {comment}\n{PRELUDE}{body.replace('KERNEL_NAME', name)}", name

    @cached_property
    def _values(self) -> dict[str, str]:
        """The C++ text of each placeholder in the source."""
        blocks, output, arrays = self.blocks, len(self.dtypes), range(len(self.dtypes))
        accumulator, storage_type = self.element.dtype.compute_type, self.output.storage_type
        is_mean = self.reducer.name == "mean"
        scalars = [f"{dtype.compute_type} s{i}" for i, dtype in enumerate(self.scalars.values())]
        stored = cuda_text(self.result, {REDUCED: "total"})
        return {
            "ACCUMULATOR": accumulator,
            "COMBINE": f"op::{self.reducer.operation}",
            "IDENTITY": literal(self.reducer.identity(self.element.dtype), self.element.dtype),
            "COLUMN_COUNT": str(blocks.columns),
            "THREAD_COUNT": str(blocks.threads),
            "VECTOR_WIDTH": str(blocks.width),
            "ARE_OUTPUTS_ADJACENT": str(int(blocks.are_outputs_adjacent)),
            "OUTPUT_DIMENSIONS": str(self.output_dimensions),
            "REDUCED_DIMENSIONS": str(self.reduced_dimensions),
            "DIMENSIONS": str(self.output_dimensions + self.reduced_dimensions),
            "OPERAND_COUNT": str(output + 1),
            "PARAMETERS": ", ".join(
                [*(f"const char* p{i}" for i in arrays), "char* out", "char* scratch", *scalars]
            ),
            "DIVIDE_TOTAL": f"total = op::divide(total, ({accumulator})layout.count);" * is_mean,
            "STORE_OFFSET": self._offset_text("output", "output", [output]).lstrip(),
            "STORE_TOTAL": f"*({storage_type}*)(out + output_offset{output}) ="
            f" stored<{storage_type}>::from({stored});",
            "LOAD_OFFSETS": self._offset_text("output", "output", arrays).lstrip(),
            "LOAD_ELEMENT": self._element_text().lstrip(),
        }

    def _element_text(self) -> str:
        """Return the text that loads WIDTH elements of all inputs and computes the values to reduce."""
        lines = [self._offset_text("at", "reduced", range(len(self.dtypes)))]
        variables = {name: f"s{index}" for index, name in enumerate(self.scalars)}
        for index, (name, dtype) in enumerate(self.dtypes.items()):
            address = f"(p{index} + output_offset{index} + reduced_offset{index})"
            if index in self.repeated_arrays:
                lines.append(
                    f"            const auto e{index} = *(const {dtype.storage_type}*){address};"
                )
                variables[name] = f"load_value(e{index})"
            else:
                vector = f"const Vector<{dtype.storage_type}, WIDTH>"
                lines.append(f"            {vector} v{index} = *({vector}*){address};")
                variables[name] = f"load_value(v{index}.elements[k])"
        value = cuda_text(self.element, variables)
        lines.append("            #pragma unroll")
        lines.append(f"            for (int k = 0; k < WIDTH; ++k) elements[k] = {value};")
        return "\n".join(lines)

    def _offset_text(self, index: str, kind: str, arrays: Iterable[int]) -> str:
        """Return the text that computes byte offsets of arrays for an index of output or reduced elements."""
        is_output = kind == "output"
        dimensions = self.output_dimensions if is_output else self.reduced_dimensions
        first_axis = 0 if is_output else self.output_dimensions
        lines = [f"            i64 {kind}_rest = {index};"]
        for axis in range(dimensions - 1):
            size = f"layout.{kind}_sizes[{axis}]"
            lines.append(f"            const i64 {kind}_i{axis} = {kind}_rest % {size};")
            lines.append(f"            {kind}_rest /= {size};")
        lines.append(f"            const i64 {kind}_i{dimensions - 1} = {kind}_rest;")
        for array in arrays:
            terms = [
                f"{kind}_i{axis} * layout.strides[{array}][{first_axis + axis}]"
                for axis in range(dimensions)
            ]
            lines.append(f"            const i64 {kind}_offset{array} = {' + '.join(terms)};")
        return "\n".join(lines)
