"""Element-wise kernels: one kernel that computes all assignments of an expression for each element.

Each thread computes the elements of one or several vectors of up to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from cudakit.arrays.expression_source import PRELUDE, cuda_text
from cudakit.arrays.expressions import (
    Program,
    TypedAssignment,
    Values,
    check_stores,
    evaluate,
    from_storage,
    infer,
    parse,
    to_storage,
)
from cudakit.arrays.launch import (
    Address,
    LaunchPlan,
    Layout,
    Parameter,
    Scalar,
    broadcast_shape,
    bytes_argument,
    merged_layout,
    read_array,
    vector_width,
    write_array,
)
from cudakit.arrays.operations import COMPLEX, DTYPES, FLOAT, DType, ValueType, dtype_of, weak_type
from cudakit.errors import UsageError
from cudakit.gpu.api.arrays import ArrayView, Launch, byte_range, host_kernel

# Block sizes in threads that tuning compares.
TUNED_THREADS = (64, 128, 256, 512, 1024)
_MAX_BLOCKS = (1 << 31) - 1

Operand = ArrayView | np.generic | bool | int | float | complex


@dataclass(frozen=True, slots=True)
class ResultType:
    """The dtype and shape of an output that the caller allocates."""

    dtype: str
    shape: tuple[int, ...]


class ElementwiseProgram:
    """A parsed expression, from which launches are planned for arrays of any dtypes and layouts."""

    def __init__(self, text: str, outputs: Sequence[str] | None = None) -> None:
        self.program: Program = parse(text, outputs)

    def result_types(self, inputs: Mapping[str, Operand]) -> dict[str, ResultType]:
        """Return the dtype and shape of each output that the expression does not read.

        Raises UsageError if the shapes do not broadcast or an operation does not support its operands.
        """
        assignments = infer(self.program, input_types(inputs))
        dtypes = {assignment.target: assignment.dtype for assignment in assignments}
        shape = self._shape(inputs)
        return {name: ResultType(dtypes[name].name, shape) for name in self.program.new_outputs}

    def plan(
        self,
        inputs: Mapping[str, Operand],
        outputs: Mapping[str, ArrayView],
        threads: int | None = None,
    ) -> LaunchPlan:
        """Return the launch for operands and output arrays; its operands are inputs, then outputs, in order.

        ``threads`` is the block size; None chooses one by the size of the arrays. ``outputs`` has an array
        for each output that the expression does not read. Raises UsageError for operands and arrays that do
        not fit, such as an output of another shape or one that is read-only. The plan is also valid for
        arrays at other addresses with the same remainders modulo 16.
        """
        program = self.program
        arrays = arrays_of(inputs)
        output_arrays = self._output_arrays(inputs, outputs)
        assignments = infer(program, input_types(inputs))
        target_dtypes = {name: dtype_of(view.dtype) for name, view in output_arrays.items()}
        check_stores(program, assignments, target_dtypes)
        shape = self._shape(inputs) if arrays else next(iter(output_arrays.values())).shape
        check_arrays(arrays, output_arrays, shape)
        operand_views = {**arrays, **outputs}
        layout = merged_layout(
            shape, [(view.shape, view.strides) for view in operand_views.values()]
        )
        dtypes = {name: dtype_of(view.dtype) for name, view in operand_views.items()}
        vector_size = vector_width(
            layout,
            [view.ptr for view in operand_views.values()],
            [dtype.size_bytes for dtype in dtypes.values()],
        )
        scalars = {
            name: value_type.dtype
            for name, value_type in input_types(inputs).items()
            if name not in arrays
        }
        default_threads, vectors = choose_block(layout, vector_size)
        block_threads = threads or default_threads
        kernel = ElementwiseSource(
            program=program,
            assignments=assignments,
            dtypes=dtypes,
            scalars=scalars,
            layout=layout,
            width=vector_size,
            threads=block_threads,
            vectors=vectors,
        )
        source, name = kernel.source()
        _register_host_kernel(name, kernel)
        operand_indices = {
            operand: index for index, operand in enumerate([*inputs, *program.new_outputs])
        }
        block_count = -(-layout.count // (kernel.elements_per_thread * block_threads))
        if block_count > _MAX_BLOCKS:
            raise UsageError(f"{layout.count} elements are more than one launch can compute")
        layout_numbers = [layout.count, *layout.sizes]
        for strides in layout.strides:
            layout_numbers += strides
        parameters: list[Parameter] = [bytes_argument(np.array(layout_numbers, np.int64).tobytes())]
        parameters += [Address(operand_indices[name]) for name in operand_views]
        parameters += [Scalar(operand_indices[name], dtype) for name, dtype in scalars.items()]
        return LaunchPlan(source, name, block_count, block_threads, tuple(parameters))

    def check_overlaps(
        self, inputs: Mapping[str, Operand], outputs: Mapping[str, ArrayView]
    ) -> None:
        """Raise UsageError if an output overlaps another output, or only a part of an input."""
        output_arrays = self._output_arrays(inputs, outputs)
        for name, output in output_arrays.items():
            check_overlaps(name, output, arrays_of(inputs), output_arrays)

    def _output_arrays(
        self, inputs: Mapping[str, Operand], outputs: Mapping[str, ArrayView]
    ) -> dict[str, ArrayView]:
        """Return the arrays of all outputs, including arrays that the expression updates."""
        return {
            name: outputs[name] if name in outputs else _updated_array(name, inputs[name])
            for name in self.program.outputs
        }

    def _shape(self, inputs: Mapping[str, Operand]) -> tuple[int, ...]:
        arrays = arrays_of(inputs)
        return broadcast_shape(list(arrays), [view.shape for view in arrays.values()])


def _register_host_kernel(name: str, kernel: ElementwiseSource) -> None:
    """Register the numpy implementation of a kernel, for simulated devices."""
    arrays = list(kernel.dtypes.items())
    scalars = list(kernel.scalars.items())
    layout = kernel.layout
    program = kernel.program

    @host_kernel(name)
    def run(launch: Launch, layout_words: np.generic, *arguments: int | np.generic) -> None:
        layout_numbers = np.frombuffer(layout_words.tobytes(), np.int64)
        dimension_count = len(layout.sizes)
        sizes = tuple(map(int, layout_numbers[1 : 1 + dimension_count]))
        strides = layout_numbers[1 + dimension_count :].reshape(len(arrays), dimension_count)
        views = {
            array_name: (int(arguments[index]), dtype, tuple(map(int, strides[index])))
            for index, (array_name, dtype) in enumerate(arrays)
        }
        values_by_name: dict[str, Values] = {}
        for index, (scalar_name, dtype) in enumerate(scalars):
            argument = arguments[len(arrays) + index]
            values_by_name[scalar_name] = np.frombuffer(
                np.asarray(argument).tobytes(), dtype.compute
            ).reshape(())
        for array_name, (address, dtype, array_strides) in views.items():
            if array_name in program.inputs:
                element_bits = read_array(launch, address, dtype.storage, sizes, array_strides)
                values_by_name[array_name] = from_storage(element_bits, dtype)
        values_of_outputs = evaluate(kernel.assignments, values_by_name)
        for array_name in program.outputs:
            address, dtype, array_strides = views[array_name]
            write_array(
                launch,
                address,
                to_storage(np.broadcast_to(values_of_outputs[array_name], sizes[::-1]), dtype),
                array_strides,
            )


def input_types(inputs: Mapping[str, Operand]) -> dict[str, ValueType]:
    """Return the type of each input. Python floats are float64 only if an input is float64 or complex128."""
    value_types = {name: _value_type(value) for name, value in inputs.items()}
    dtype_names = {
        value_type.dtype.name for value_type in value_types.values() if not value_type.is_weak
    }
    if dtype_names & {"float64", "complex128"}:
        float64_dtypes = {FLOAT: DTYPES["float64"], COMPLEX: DTYPES["complex128"]}
        value_types = {
            name: ValueType(float64_dtypes.get(value_type.dtype.category, value_type.dtype), True)
            if value_type.is_weak
            else value_type
            for name, value_type in value_types.items()
        }
    return value_types


def _value_type(value: Operand) -> ValueType:
    if isinstance(value, ArrayView):
        return ValueType(dtype_of(value.dtype))
    if isinstance(value, np.generic):
        return ValueType(dtype_of(value.dtype.name))
    return weak_type(value)


def element_bytes(view: ArrayView) -> int:
    """Return the size of an array's elements in bytes."""
    return dtype_of(view.dtype).size_bytes


def arrays_of(inputs: Mapping[str, Operand]) -> dict[str, ArrayView]:
    """Return the operands that are arrays."""
    return {name: value for name, value in inputs.items() if isinstance(value, ArrayView)}


def _updated_array(name: str, value: Operand) -> ArrayView:
    if not isinstance(value, ArrayView):
        raise UsageError(
            f"the expression assigns to its input {name}, which is a number",
            hint=f"pass an array as {name}, or assign to another name",
        )
    return value


def check_arrays(
    inputs: Mapping[str, ArrayView], output_arrays: Mapping[str, ArrayView], shape: tuple[int, ...]
) -> None:
    """Raise UsageError for arrays that a kernel cannot use: shape, alignment, read-only, overlap."""
    for name, view in {**inputs, **output_arrays}.items():
        element_bytes = dtype_of(view.dtype).size_bytes
        alignment = min(element_bytes, 16)
        if view.size and any(offset % alignment for offset in (view.ptr, *view.strides)):
            raise UsageError(
                f"{name} is misaligned: elements of {view.dtype} need addresses and strides that are "
                f"multiples of {alignment} bytes",
                hint="copy the array",
            )
    for name, output in output_arrays.items():
        if output.shape != shape:
            raise UsageError(
                f"the output {name} has shape {list(output.shape)}, the result {list(shape)}"
            )
        if output.read_only:
            raise UsageError(f"the output {name} is read-only", hint="pass a writable copy")
        if any(
            extent > 1 and stride == 0
            for extent, stride in zip(output.shape, output.strides, strict=True)
        ):
            raise UsageError(
                f"the output {name} is broadcast: several of its elements share memory",
                hint="pass an array with memory for every element",
            )


def check_overlaps(
    name: str,
    output: ArrayView,
    inputs: Mapping[str, ArrayView],
    excluded_arrays: Mapping[str, ArrayView],
) -> None:
    """Raise UsageError if an output shares memory with another array.

    An output may be the same array as one of the inputs, but must not overlap the ``excluded_arrays``.
    """
    for other_name, other_array in {**inputs, **excluded_arrays}.items():
        if other_name == name or not _overlaps(output, other_array):
            continue
        is_same_array = (
            other_array.ptr,
            other_array.shape,
            other_array.strides,
            other_array.dtype,
        ) == (
            output.ptr,
            output.shape,
            output.strides,
            output.dtype,
        )
        if not is_same_array or other_name in excluded_arrays:
            raise UsageError(
                f"the output {name} overlaps {other_name} in memory",
                hint=f"pass another output, or all of {other_name} to compute in place",
            )


def _overlaps(first_array: ArrayView, second_array: ArrayView) -> bool:
    first_begin, first_end = byte_range(first_array, element_bytes(first_array))
    second_begin, second_end = byte_range(second_array, element_bytes(second_array))
    return max(first_begin, second_begin) < min(first_end, second_end)


# --- CUDA C++ source of element-wise kernels ------------------------------------------------------

_MAX_INDEX_32 = 1 << 31
# Each row has the minimum number of vectors in an array, the number of threads of a block, and the number of
# vectors that each thread computes. Several loads at once hide the latency of memory; in small arrays, more
# blocks occupy more multiprocessors. The rows were measured on an H200.
_VECTOR_BLOCKS = ((1 << 17, 128, 1), (1 << 16, 256, 1), (0, 128, 1))
# The same rows for vectors of one element.
_SCALAR_BLOCKS = ((1 << 19, 256, 4), (1 << 14, 256, 2), (0, 256, 1))

VECTORS = r"""
template <int SIZE> struct vector_alignment { static const int value = SIZE > 16 ? 16 : SIZE; };
template <class T, int WIDTH> struct alignas(vector_alignment<WIDTH * sizeof(T)>::value) Vector {
    T elements[WIDTH];
};
"""


@dataclass(frozen=True)
class ElementwiseSource:
    """Everything that the source of one kernel depends on."""

    program: Program
    assignments: tuple[TypedAssignment, ...]
    dtypes: Mapping[str, DType]  # element types of the arrays, inputs before outputs
    scalars: Mapping[str, DType]
    layout: Layout
    width: int  # number of adjacent elements (a vector) that a thread loads from an array at once
    threads: int  # number of threads of a block
    vectors: int  # number of vectors of a thread; between them are the vectors of other threads

    @property
    def elements_per_thread(self) -> int:
        """The number of elements that each thread computes."""
        return self.vectors * self.width

    def source(self) -> tuple[str, str]:
        """Return the CUDA C++ source, and the name of the kernel."""
        body = self._body()
        name = f"cudakit_elementwise_{sha256(body.encode()).hexdigest()[:16]}"
        # A backslash at the end of a line would continue the comment in C++.
        expression_lines = self.program.text.replace("\\", " ").splitlines()
        comment = "".join(f"// {line}\n" for line in expression_lines)
        return f"{comment}{PRELUDE}{VECTORS}{body.replace('KERNEL_NAME', name)}", name

    def _body(self) -> str:
        axis_count = len(self.layout.sizes)
        index_type = "u32" if self.layout.count < _MAX_INDEX_32 else "u64"
        parameters = [f"char* p{index}" for index in range(len(self.dtypes))]
        parameters += [
            f"{dtype.compute_type} s{index}" for index, dtype in enumerate(self.scalars.values())
        ]
        parameter_list = ", ".join(parameters)
        distances = [
            f"i64 d{index}"
            for index in range(len(self.dtypes))
            if self._distance_is_argument(index)
        ]
        compute_parameters = ", ".join([*parameters, "Index remaining", *distances])
        return f"""
typedef {index_type} Index;
enum {{ WIDTH = {self.width}, VECTORS = {self.vectors}, THREADS = {self.threads} }};
// Number of elements between the first elements of two vectors of one thread, and of those of a block.
enum {{ SPACING = THREADS * WIDTH, BLOCK_ELEMENTS = VECTORS * SPACING }};
struct Layout {{ i64 count; i64 sizes[{axis_count}]; i64 strides[{len(self.dtypes)}][{axis_count}]; }};

// Computes the vectors of one thread. If IS_PARTIAL, the arrays have only `remaining` elements from the first
// one of the thread. All elements are loaded before the first one is stored, so that the thread waits for
// memory once.
template <bool IS_PARTIAL>
__device__ void compute({compute_parameters}) {{
{self._compute_text()}
}}

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL_NAME(const Layout layout, {parameter_list}) {{
    const Index count = (Index)layout.count;
{self._index_text()}
}}
"""

    def _index_text(self) -> str:
        """Return the text that computes the index of a thread's first element, and calls ``compute``."""
        axis_count = len(self.layout.sizes)
        arguments = [
            "".join(
                [f"p{index}"]
                + [
                    f" + (i64)i{axis} * {self._stride_text(index, axis)}"
                    for axis in range(axis_count)
                    if strides[axis]
                ]
            )
            for index, strides in enumerate(self.layout.strides)
        ]
        arguments += [f"s{index}" for index in range(len(self.scalars))]
        if axis_count > 1:
            return self._strided_text(arguments)
        distances = [
            f"SPACING * {self._stride_text(index, 0)}"
            for index in range(len(self.dtypes))
            if self._distance_is_argument(index)
        ]
        call = f"({', '.join([*arguments, 'count - i0', *distances])});"
        return (
            "    const Index block_begin = blockIdx.x * (Index)BLOCK_ELEMENTS;\n"
            "    const Index i0 = block_begin + threadIdx.x * WIDTH;\n"
            f"    if (count - block_begin >= BLOCK_ELEMENTS) compute<false>{call}\n"
            f"    else if (i0 < count) compute<true>{call}"
        )

    def _strided_text(self, arguments: Sequence[str]) -> str:
        """Return the CUDA C++ for arrays of several dimensions, in which each thread computes one vector.

        The layout ensures that no vector crosses the end of a row of the innermost dimension.
        """
        dimension_count = len(self.layout.sizes)
        lines = [
            "    const Index first = (blockIdx.x * (Index)THREADS + threadIdx.x) * WIDTH;",
            "    if (first >= count) return;",
            "    Index rest = first;",
        ]
        for axis in range(dimension_count - 1):
            size_text = f"(Index)layout.sizes[{axis}]"
            lines.append(f"    const Index i{axis} = rest % {size_text};")
            lines.append(f"    rest /= {size_text};")
        lines.append(f"    const Index i{dimension_count - 1} = rest;")
        lines.append(f"    compute<false>({', '.join([*arguments, 'WIDTH'])});")
        return "\n".join(lines)

    def _stride_text(self, index: int, axis: int) -> str:
        """Return a stride as C++ text: a literal for adjacent elements, which saves a load."""
        size_bytes = list(self.dtypes.values())[index].size_bytes
        if self.layout.strides[index][axis] == size_bytes:
            return str(size_bytes)
        return f"layout.strides[{index}][{axis}]"

    def _distance_is_argument(self, index: int) -> bool:
        """Return whether ``compute`` gets the distance between a thread's vectors as an argument."""
        return (
            len(self.layout.sizes) == 1
            and self._is_vector(index)
            and self._stride_text(index, 0).startswith("layout")
        )

    def _compute_text(self) -> str:
        """Return the body of the function that loads, computes and stores the elements of one thread."""
        arrays = list(self.dtypes)
        variable_by_name = {name: f"s{index}" for index, name in enumerate(self.scalars)}
        lines = self._load_lines()
        loop_lines: list[str] = []
        for index, name in enumerate(arrays):
            if name in self.program.inputs:
                is_vector = self._is_vector(index)
                element_text = f"v{index}[v].elements[k]" if is_vector else f"e{index}"
                loop_lines.append(f"        const auto x{index} = load_value({element_text});")
                variable_by_name[name] = f"x{index}"
        for assignment_index, assignment in enumerate(self.assignments):
            value_text = cuda_text(assignment.value, variable_by_name)
            loop_lines.append(
                f"        const {assignment.dtype.compute_type} t{assignment_index} = {value_text};"
            )
            variable_by_name[assignment.target] = f"t{assignment_index}"
        store_lines: list[str] = []
        for name in self.program.outputs:
            index = arrays.index(name)
            stored_text = (
                f"stored<{self.dtypes[name].storage_type}>::from({variable_by_name[name]})"
            )
            loop_lines.append(f"        v{index}[v].elements[k] = {stored_text};")
            store_lines += self._transfer_lines(index, is_store=True)
        loop_head = [
            "    #pragma unroll",
            "    for (int v = 0; v < VECTORS; ++v)",
            "    #pragma unroll",
            "    for (int k = 0; k < WIDTH; ++k) {",
        ]
        return "\n".join([*lines, *loop_head, *loop_lines, "    }", *store_lines])

    def _load_lines(self) -> list[str]:
        """Return the lines that declare the vectors of all arrays, and load those of the inputs."""
        lines = []
        for index, (name, dtype) in enumerate(self.dtypes.items()):
            if self._is_vector(index):
                lines.append(f"    Vector<{dtype.storage_type}, WIDTH> v{index}[VECTORS] = {{}};")
                if name in self.program.inputs:
                    lines += self._transfer_lines(index, is_store=False)
            else:
                element_text = f"*(const {dtype.storage_type}*)p{index}"
                lines.append(f"    const {dtype.storage_type} e{index} = {element_text};")
        return lines

    def _transfer_lines(self, index: int, *, is_store: bool) -> list[str]:
        """Return the lines that load or store the elements of a thread in one array."""
        storage_type = list(self.dtypes.values())[index].storage_type
        has_literal_distance = not self._distance_is_argument(index)
        distance = f"SPACING * (i64)sizeof({storage_type})" if has_literal_distance else f"d{index}"
        address = f"p{index} + v * {distance}"
        vector_type = f"Vector<{storage_type}, WIDTH>"
        vector_text, element_text = (
            f"*({vector_type}*)({address})",
            (f"(({storage_type}*)({address}))[k]"),
        )
        vector, element = f"v{index}[v]", f"v{index}[v].elements[k]"
        if is_store:
            vector_transfer, element_transfer = (
                f"{vector_text} = {vector};",
                f"{element_text} = {element};",
            )
        else:
            vector_transfer, element_transfer = (
                f"{vector} = {vector_text};",
                f"{element} = {element_text};",
            )
        return [
            "    #pragma unroll",
            "    for (int v = 0; v < VECTORS; ++v) {",
            f"        if (!IS_PARTIAL || v * SPACING + WIDTH <= remaining) {vector_transfer}",
            "        else if (WIDTH > 1)",
            "            for (int k = 0; k < WIDTH; ++k)",
            f"                if (v * SPACING + k < remaining) {element_transfer}",
            "    }",
        ]

    def _is_vector(self, index: int) -> bool:
        """Return whether a thread accesses WIDTH elements of an array, not one repeated element."""
        is_output = list(self.dtypes)[index] in self.program.outputs
        return is_output or self.layout.strides[index][0] != 0


def choose_block(layout: Layout, width: int) -> tuple[int, int]:
    """Return the number of threads of a block, and the number of vectors that each thread computes."""
    rows = _SCALAR_BLOCKS if width == 1 else _VECTOR_BLOCKS
    threads, vectors = next(row[1:] for row in rows if layout.count >= row[0] * width)
    return threads, vectors if len(layout.sizes) == 1 else 1
