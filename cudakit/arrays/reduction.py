"""Reductions: sums, products, extrema and means of expressions, over all or some axes of arrays.

A block is divided into rows of threads: threads of one column combine elements of the same output. Long
reductions are split over several blocks; the block that finishes last combines their partial results in
the order of their positions, so that the result is the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from cudakit.arrays.elementwise import (
    VECTORS,
    Operand,
    ResultType,
    arrays_of,
    check_arrays,
    check_overlaps,
    input_types,
)
from cudakit.arrays.expression_source import PRELUDE, cuda_text, literal
from cudakit.arrays.expressions import (
    REDUCED,
    TypedNode,
    Values,
    convert,
    convert_values,
    evaluate_value,
    from_storage,
    infer_value,
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
    merged_layout,
    read_array,
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


@dataclass(frozen=True, slots=True)
class _ReductionTypes:
    """The typed trees of a reduction for certain inputs."""

    element: TypedNode
    accumulator: DType
    result: TypedNode


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
        shape = self._shape(inputs)
        axes = self._axes(len(shape))
        output_shape = [
            1 if axis in axes else extent
            for axis, extent in enumerate(shape)
            if self._keepdims or axis not in axes
        ]
        return ResultType(self._infer_types(inputs).result.dtype.name, tuple(output_shape))

    def plan(self, inputs: Mapping[str, Operand], output: ArrayView) -> LaunchPlan:
        """Return the launch for operands and an output; its operands are the inputs, then the output.

        Raises UsageError for arrays that do not fit, and for the minimum or maximum of no elements. The plan
        is also valid for arrays at other addresses with the same remainders modulo 16.
        """
        arrays, types = arrays_of(inputs), self._infer_types(inputs)
        output_layout, reduced_layout = self._check_output(inputs, output, types)
        scalars = {
            name: value_type.dtype
            for name, value_type in input_types(inputs).items()
            if name not in arrays
        }
        dtypes = {name: dtype_of(view.dtype) for name, view in arrays.items()}
        block_shape = choose_block_shape(
            output_layout, reduced_layout, list(arrays.values()), list(dtypes.values())
        )
        source = ReductionSource(
            text=self._parsed.program.text,
            operation=self._reducer.operation,
            is_mean=self._reducer.name == "mean",
            identity=self._reducer.identity(types.accumulator),
            element=types.element,
            accumulator=types.accumulator,
            result=types.result,
            dtypes=dtypes,
            output=dtype_of(output.dtype),
            scalars=scalars,
            output_dimensions=len(output_layout.sizes),
            reduced_dimensions=len(reduced_layout.sizes),
            blocks=block_shape,
            repeated_arrays=frozenset(
                index for index, strides in enumerate(reduced_layout.strides) if not strides[0]
            ),
        )
        source_text, name = source.source()
        self._register_host_kernel(name, source)
        operand_indices = {operand: index for index, operand in enumerate(inputs)}
        parameters: list[Parameter] = [
            _pack_layouts(output_layout, reduced_layout, block_shape.chunk, block_shape.splits),
            *(Address(operand_indices[array]) for array in arrays),
            Address(len(inputs)),
            Scratch(block_shape.scratch_bytes(output_layout.count, types.accumulator)),
            *(Scalar(operand_indices[scalar], dtype) for scalar, dtype in scalars.items()),
        ]
        block_count = -(-output_layout.count // block_shape.columns) * block_shape.splits
        return LaunchPlan(source_text, name, block_count, block_shape.threads, tuple(parameters))

    def _check_output(
        self, inputs: Mapping[str, Operand], output: ArrayView, types: _ReductionTypes
    ) -> tuple[Layout, Layout]:
        """Return the layouts of the output and of the reduced dimensions.

        Raises UsageError for an output that does not fit, and for the minimum or maximum of no elements.
        """
        check_arrays(arrays_of(inputs), {"out": output}, self.result_type(inputs).shape)
        if not can_store(types.result.dtype, dtype_of(output.dtype)):
            raise UsageError(
                f"the result is {types.result.dtype}, and out is {output.dtype}",
                hint="pass an array of the result's dtype",
            )
        output_layout, reduced_layout = self._layouts(inputs, output)
        is_empty = not reduced_layout.count and output_layout.count > 0
        if is_empty and self._reducer.name in ("min", "max"):
            raise UsageError(f"{self._reducer.name} of no elements is undefined")
        return output_layout, reduced_layout

    def check_overlaps(self, inputs: Mapping[str, Operand], output: ArrayView) -> None:
        """Raise UsageError if the output shares memory with an input."""
        check_overlaps("out", output, {}, arrays_of(inputs))

    def _shape(self, inputs: Mapping[str, Operand]) -> tuple[int, ...]:
        arrays = arrays_of(inputs)
        if not arrays:
            raise UsageError("a reduction needs at least one array")
        return broadcast_shape(list(arrays), [view.shape for view in arrays.values()])

    def _axes(self, dimension_count: int) -> tuple[int, ...]:
        """Return the reduced axes as indices from 0. Raises UsageError for axes that do not exist."""
        if self._axis is None:
            return tuple(range(dimension_count))
        axes = (self._axis,) if isinstance(self._axis, int) else tuple(self._axis)
        normalized_axes = [axis + dimension_count if axis < 0 else axis for axis in axes]
        if len({*normalized_axes}) < len(axes) or any(
            not 0 <= axis < dimension_count for axis in normalized_axes
        ):
            raise UsageError(
                f"axis is {self._axis}, and the arrays have {dimension_count} dimensions",
                hint="give each axis once, from 0, or from -1 for the last one",
            )
        return tuple(sorted(normalized_axes))

    def _infer_types(self, inputs: Mapping[str, Operand]) -> _ReductionTypes:
        program, reducer = self._parsed.program, self._reducer
        element, element_type = infer_value(program, self._parsed.element, input_types(inputs))
        accumulator = reducer.accumulator(element_type.dtype)
        if accumulator.category == COMPLEX and reducer.operation in ("minimum", "maximum"):
            raise UsageError(f"{reducer.name} does not support {accumulator}")
        result, _ = infer_value(program, self._parsed.result, {REDUCED: ValueType(accumulator)})
        return _ReductionTypes(convert(element, accumulator), accumulator, result)

    def _layouts(self, inputs: Mapping[str, Operand], output: ArrayView) -> tuple[Layout, Layout]:
        """Return the layouts of the output and of the reduced dimensions, for all inputs and the output."""
        shape = self._shape(inputs)
        axes = self._axes(len(shape))
        output_axes = [axis for axis in range(len(shape)) if axis not in axes]
        input_strides = [
            broadcast_strides(shape, view.shape, view.strides)
            for view in arrays_of(inputs).values()
        ]
        output_strides = [
            stride
            for axis, stride in enumerate(output.strides)
            if not (self._keepdims and axis in axes)
        ]
        output_shape = tuple(shape[axis] for axis in output_axes)
        reduced_shape = tuple(shape[axis] for axis in axes)
        output_arrays = [
            (output_shape, tuple(strides[axis] for axis in output_axes))
            for strides in input_strides
        ]
        output_arrays.append((output_shape, tuple(output_strides)))
        reduced_arrays = [
            (reduced_shape, tuple(strides[axis] for axis in axes)) for strides in input_strides
        ]
        return merged_layout(output_shape, output_arrays), merged_layout(
            reduced_shape, reduced_arrays
        )

    def _register_host_kernel(self, name: str, source: ReductionSource) -> None:
        """Register the numpy implementation of a kernel, for simulated devices."""
        reducer = self._reducer

        @host_kernel(name)
        def run(launch: Launch, layout: np.generic, *arguments: int | np.generic) -> None:
            output_layout, reduced_layout = _unpack_layouts(layout, source)
            sizes = reduced_layout.sizes + output_layout.sizes
            values_by_name: dict[str, Values] = {}
            for index, (array_name, dtype) in enumerate(source.dtypes.items()):
                strides = reduced_layout.strides[index] + output_layout.strides[index]
                element_bits = read_array(
                    launch, int(arguments[index]), dtype.storage, sizes, strides
                )
                values_by_name[array_name] = from_storage(element_bits, dtype)
            scalar_arguments = arguments[len(source.dtypes) + 2 :]
            for (scalar_name, dtype), argument in zip(
                source.scalars.items(), scalar_arguments, strict=True
            ):
                element_bits = np.frombuffer(np.asarray(argument).tobytes(), dtype.compute)
                values_by_name[scalar_name] = element_bits.reshape(())
            with np.errstate(all="ignore"):
                element_values = np.broadcast_to(
                    evaluate_value(source.element, values_by_name), sizes[::-1]
                )
                axes = tuple(range(-len(reduced_layout.sizes), 0))
                reduced_values = reducer.numpy_function(element_values, axis=axes)
                reduced_values = np.asarray(reduced_values).astype(source.accumulator.compute)
                if source.is_mean:
                    reduced_values = reduced_values / source.accumulator.compute.type(
                        max(reduced_layout.count, 0)
                    )
                result_values = evaluate_value(source.result, {REDUCED: reduced_values})
            output = to_storage(
                np.broadcast_to(
                    convert_values(result_values, source.result.dtype), output_layout.sizes[::-1]
                ),
                source.output,
            )
            write_array(
                launch, int(arguments[len(source.dtypes)]), output, output_layout.strides[-1]
            )


def _pack_layouts(
    output_layout: Layout, reduced_layout: Layout, chunk: int, splits: int
) -> np.generic:
    layout_words = [
        output_layout.count,
        reduced_layout.count,
        chunk,
        splits,
        *output_layout.sizes,
        *reduced_layout.sizes,
    ]
    for index, strides in enumerate(output_layout.strides):
        reduced_strides = (
            reduced_layout.strides[index]
            if index < len(reduced_layout.strides)
            else (0,) * len(reduced_layout.sizes)
        )
        layout_words += [*strides, *reduced_strides]
    return bytes_argument(np.array(layout_words, np.int64).tobytes())


def _unpack_layouts(argument: np.generic, source: ReductionSource) -> tuple[Layout, Layout]:
    """Return the layouts of the output and of the reduced axes from the value of ``_pack_layouts``."""
    layout_words = np.frombuffer(argument.tobytes(), np.int64).tolist()[4:]
    output_dimensions, reduced_dimensions = source.output_dimensions, source.reduced_dimensions
    sizes, strides = (
        layout_words[: output_dimensions + reduced_dimensions],
        layout_words[output_dimensions + reduced_dimensions :],
    )
    array_strides = [
        strides[first_stride : first_stride + output_dimensions + reduced_dimensions]
        for first_stride in range(0, len(strides), output_dimensions + reduced_dimensions)
    ]
    output_layout = Layout(
        tuple(sizes[:output_dimensions]),
        tuple(tuple(strides_of_array[:output_dimensions]) for strides_of_array in array_strides),
    )
    reduced_layout = Layout(
        tuple(sizes[output_dimensions:]),
        tuple(tuple(strides_of_array[output_dimensions:]) for strides_of_array in array_strides),
    )
    return output_layout, reduced_layout


# --- The operations of reductions: how values are combined, and in which types --------------------


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
    output_layout: Layout,
    reduced_layout: Layout,
    views: Sequence[ArrayView],
    dtypes: Sequence[DType],
) -> BlockShape:
    """Return the numbers of threads and blocks that reduce each output, and the vector width."""
    element_bytes = [dtype.size_bytes for dtype in dtypes]
    width = _vector_width(output_layout, reduced_layout, views, element_bytes)
    reduced_count, threads = max(reduced_layout.count, 1), _SHORT_BLOCK
    max_blocks = _MAX_BLOCKS
    is_column_sum = width == 1 and (
        output_layout.count >= _WARP
        and any(
            output_layout.strides[index][0] == size_bytes
            and reduced_layout.strides[index][0] != size_bytes
            for index, size_bytes in enumerate(element_bytes)
        )
    )
    if reduced_count <= _THREAD_ELEMENTS and output_layout.count > 1:
        columns = threads  # one thread reduces one output
    elif is_column_sum:
        columns = _WARP
    elif output_layout.count > 1 and reduced_count <= _WARP * width * (
        _MANY_OUTPUTS_VECTORS if output_layout.count >= _MANY_OUTPUTS else _VECTORS_PER_THREAD
    ):
        columns = threads // _WARP  # one warp reduces one output
    else:
        columns = 1
        is_one_block_faster = reduced_count <= _LONG_BLOCK * _VECTORS_PER_THREAD * width
        if (
            is_one_block_faster
            and reduced_count > threads * width
            and output_layout.count < _FEW_OUTPUTS
        ):
            threads = _LONG_BLOCK
        elif output_layout.count == 1 and reduced_count >= _LARGE_VECTOR_COUNT * width:
            threads, max_blocks = _LARGE_BLOCK, _LARGE_MAX_BLOCKS
    threads_per_output = threads // columns
    tile_count = max(-(-output_layout.count // columns), 1)
    smallest_chunk = threads_per_output * width * _VECTORS_PER_THREAD
    splits = max(1, min(-(-reduced_count // smallest_chunk), max_blocks // tile_count))
    chunk = -(-reduced_count // splits)
    chunk = -(-chunk // (threads_per_output * width)) * threads_per_output * width
    is_adjacent = is_column_sum or columns == threads
    return BlockShape(columns, threads, width, chunk, -(-reduced_count // chunk), is_adjacent)


def _vector_width(
    output_layout: Layout,
    reduced_layout: Layout,
    views: Sequence[ArrayView],
    element_bytes: Sequence[int],
) -> int:
    """Return the number of adjacent reduced elements that a thread can load from every array at once."""
    width = min(8, _VECTOR_BYTES // min(element_bytes))
    while width > 1:
        is_allowed = reduced_layout.sizes[0] % width == 0 or (
            len(reduced_layout.sizes) == 1 and output_layout.count == 1
        )
        for index, (view, size_bytes) in enumerate(zip(views, element_bytes, strict=True)):
            innermost_stride, *other_strides = (
                *reduced_layout.strides[index],
                *output_layout.strides[index],
            )
            alignment = min(width * size_bytes, _VECTOR_BYTES)
            is_aligned = all(offset % alignment == 0 for offset in (view.ptr, *other_strides))
            is_allowed &= innermost_stride == 0 or (innermost_stride == size_bytes and is_aligned)
        if is_allowed:
            break
        width //= 2
    return width


# --- CUDA C++ source of reductions ----------------------------------------------------------------

# Exchange of values of any size between the lanes of a warp.
_SHUFFLE = r"""
template <class T> __device__ T shuffle(T value, int lane_distance) {
    union { T value; u32 words[(sizeof(T) + 3) / 4]; } bits;
    bits.words[0] = 0;
    bits.value = value;
    for (int k = 0; k < (sizeof(T) + 3) / 4; ++k)
        bits.words[k] = __shfl_down_sync(0xFFFFFFFFu, bits.words[k], lane_distance);
    return bits.value;
}
"""


@dataclass(frozen=True)
class ReductionSource:
    """Everything that the source of one reduction depends on."""

    text: str  # the expression
    operation: str  # name of the operation that combines two values
    is_mean: bool
    identity: complex  # identity element of the operation: 0 for sums
    element: TypedNode
    accumulator: DType
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
        kernel_body = f"{self._chunk_text()}{self._combine_splits_text()}"
        body = f"{self._declarations()}{self._kernel_head()}{kernel_body}}}\n"
        name = f"cudakit_reduction_{sha256(body.encode()).hexdigest()[:16]}"
        comment = self.text.replace("\\", " ").replace("\n", " ")
        text = body.replace("KERNEL_NAME", name)
        return f"// {comment}\n{PRELUDE}{VECTORS}{_SHUFFLE}{text}", name

    def _declarations(self) -> str:
        """Return the types and the functions that the kernel uses."""
        blocks, output = self.blocks, len(self.dtypes)
        dimension_count = self.output_dimensions + self.reduced_dimensions
        accumulator = self.accumulator.compute_type
        mean_text = (
            f"total = op::divide(total, ({accumulator})layout.count);" if self.is_mean else ""
        )
        store_function = f"stored<{self.output.storage_type}>::from"
        result_text = cuda_text(self.result, {REDUCED: "total"})
        return f"""
typedef {accumulator} Accumulator;
enum {{ COLUMNS = {blocks.columns}, ROWS = {blocks.threads // blocks.columns} }};
enum {{ VECTOR = {blocks.width}, UNROLLED = 4 }};

struct Layout {{
    i64 outputs, count, chunk, splits;
    i64 output_sizes[{self.output_dimensions}], reduced_sizes[{self.reduced_dimensions}];
    i64 strides[{len(self.dtypes) + 1}][{dimension_count}];
}};

// Combines the values of a block's threads for each output. The thread in row 0 returns the total.
__device__ Accumulator combine_rows(Accumulator total, int row, int column) {{
{self._combine_text()}
    return total;
}}

__device__ void store(const Layout& layout, char* out, i64 output, Accumulator total) {{
    {mean_text}
{self._offset_text("output", "output", [output])}
    *({self.output.storage_type}*)(out + output_offset{output}) = {store_function}({result_text});
}}
"""

    def _kernel_head(self) -> str:
        """Return the signature of the kernel, and the position of a thread's elements."""
        parameters = [f"const char* p{index}" for index in range(len(self.dtypes))]
        parameters += ["char* out", "char* scratch"]
        parameters += [
            f"{dtype.compute_type} s{index}" for index, dtype in enumerate(self.scalars.values())
        ]
        column, row = "threadIdx.x / ROWS", "threadIdx.x % ROWS"
        if self.blocks.are_outputs_adjacent:
            column, row = "threadIdx.x % COLUMNS", "threadIdx.x / COLUMNS"
        return f"""
extern "C" __global__ void __launch_bounds__({self.blocks.threads}) KERNEL_NAME(
    const Layout layout, {", ".join(parameters)}) {{
    const i64 tile = blockIdx.x / layout.splits, split = blockIdx.x % layout.splits;
    const int column = {column};
    const int row = {row};
    const i64 output = tile * COLUMNS + column;
    const bool is_used = output < layout.outputs;
    const i64 next = (split + 1) * layout.chunk, end = next < layout.count ? next : layout.count;
    Accumulator total = {self._identity_text()};
"""

    def _chunk_text(self) -> str:
        """Return the text that reduces the elements of a block.

        If the reduction is not split, the text also ends the kernel.
        """
        element, operation = self._element_text(), f"op::{self.operation}"
        return f"""    if (is_used) {{
{self._offset_text("output", "output", range(len(self.dtypes)))}
        auto load_vector = [&](i64 at, Accumulator* elements) {{
            enum {{ WIDTH = VECTOR }};
{element}
        }};
        auto load_element = [&](i64 at) {{
            enum {{ WIDTH = 1 }};
            Accumulator elements[1];
{element}
            return elements[0];
        }};
        const i64 step = ROWS * VECTOR;
        i64 at = split * layout.chunk + row * VECTOR;
        for (; at + (UNROLLED - 1) * step + VECTOR <= end; at += UNROLLED * step) {{
            Accumulator elements[UNROLLED][VECTOR];
            #pragma unroll
            for (int u = 0; u < UNROLLED; ++u) load_vector(at + u * step, elements[u]);
            #pragma unroll
            for (int u = 0; u < UNROLLED; ++u)
                #pragma unroll
                for (int k = 0; k < VECTOR; ++k) total = {operation}(total, elements[u][k]);
        }}
        for (; at + VECTOR <= end; at += step) {{
            Accumulator elements[VECTOR];
            load_vector(at, elements);
            #pragma unroll
            for (int k = 0; k < VECTOR; ++k) total = {operation}(total, elements[k]);
        }}
        // One thread has the elements after the last whole vector.
        for (; at < end && VECTOR > 1; ++at) total = {operation}(total, load_element(at));
    }}
    total = combine_rows(total, row, column);
    if (layout.splits == 1) {{
        if (row == 0 && is_used) store(layout, out, output, total);
        return;
    }}
"""

    def _combine_splits_text(self) -> str:
        """Return the text by which the last block of an output combines the partial results of all blocks."""
        return f"""
    const i64 tiles = (layout.outputs + COLUMNS - 1) / COLUMNS;
    u32* counters = (u32*)scratch;
    Accumulator* partials = (Accumulator*)(scratch + (tiles * 4 + 15) / 16 * 16);
    if (row == 0 && is_used) {{
        partials[output * layout.splits + split] = total;
        __threadfence();
    }}
    __shared__ bool is_last;
    __syncthreads();
    // The counter wraps to 0 at the last block, ready for the next launch.
    if (threadIdx.x == 0) is_last = atomicInc(&counters[tile], (u32)layout.splits - 1) == layout.splits - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    total = {self._identity_text()};
    if (is_used)
        for (i64 k = row; k < layout.splits; k += ROWS)
            total = op::{self.operation}(total, partials[output * layout.splits + k]);
    total = combine_rows(total, row, column);
    if (row == 0 && is_used) store(layout, out, output, total);
"""

    def _identity_text(self) -> str:
        """Return the identity element of the operation as C++ text."""
        return literal(self.identity, self.accumulator)

    def _combine_text(self) -> str:
        """Return the C++ text that combines the partial results of the threads of one output."""
        threads_per_output = self.blocks.threads // self.blocks.columns
        if threads_per_output == 1:
            return ""
        lines = []
        if not self.blocks.are_outputs_adjacent:
            lines.append(f"    for (int distance = {_WARP // 2}; distance; distance /= 2)")
            exchanged_value = "shuffle(total, distance)"
            lines.append(f"        total = op::{self.operation}(total, {exchanged_value});")
            if threads_per_output == _WARP:
                return "\n".join(lines)
        # One value of each output and warp remains; the warps exchange them in shared memory.
        width = self.blocks.columns if self.blocks.are_outputs_adjacent else 1
        warp_count = self.blocks.threads // _WARP
        write_condition = (
            "true" if self.blocks.are_outputs_adjacent else f"threadIdx.x % {_WARP} == 0"
        )
        lines += [
            f"    __shared__ Accumulator values[{warp_count}][{width}];",
            "    __syncthreads();  // an earlier call may still read the values",
            f"    if ({write_condition}) values[threadIdx.x / {_WARP}][column] = total;",
            "    __syncthreads();",
            "    if (row == 0)",
            f"        for (int warp = 1; warp < {warp_count}; ++warp)",
            f"            total = op::{self.operation}(total, values[warp][column]);",
        ]
        return "\n".join(lines)

    def _element_text(self) -> str:
        """Return the text that loads WIDTH elements of all inputs and computes the values to reduce."""
        lines = [self._offset_text("at", "reduced", range(len(self.dtypes)))]
        variable_by_name = {name: f"s{index}" for index, name in enumerate(self.scalars)}
        for index, (name, dtype) in enumerate(self.dtypes.items()):
            vector = f"Vector<{dtype.storage_type}, WIDTH>"
            address = f"(p{index} + output_offset{index} + reduced_offset{index})"
            if index in self.repeated_arrays:
                lines.append(
                    f"            const auto e{index} = *(const {dtype.storage_type}*){address};"
                )
                variable_by_name[name] = f"load_value(e{index})"
            else:
                lines.append(f"            const {vector} v{index} = *(const {vector}*){address};")
                variable_by_name[name] = f"load_value(v{index}.elements[k])"
        lines.append("            #pragma unroll")
        value_text = cuda_text(self.element, variable_by_name)
        lines.append(f"            for (int k = 0; k < WIDTH; ++k) elements[k] = {value_text};")
        return "\n".join(lines)

    def _offset_text(self, index: str, kind: str, arrays: Iterable[int]) -> str:
        """Return the text that computes byte offsets of arrays for an index of output or reduced elements."""
        is_output = kind == "output"
        dimension_count = self.output_dimensions if is_output else self.reduced_dimensions
        first_axis = 0 if is_output else self.output_dimensions
        lines = [f"            i64 {kind}_rest = {index};"]
        for axis in range(dimension_count):
            is_last = axis == dimension_count - 1
            size = f"layout.{kind}_sizes[{axis}]"
            position = f"{kind}_rest" if is_last else f"{kind}_rest % {size}"
            lines.append(f"            const i64 {kind}_i{axis} = {position};")
            if not is_last:
                lines.append(f"            {kind}_rest /= {size};")
        for array_index in arrays:
            terms = [
                f"{kind}_i{axis} * layout.strides[{array_index}][{first_axis + axis}]"
                for axis in range(dimension_count)
            ]
            lines.append(f"            const i64 {kind}_offset{array_index} = {' + '.join(terms)};")
        return "\n".join(lines)
