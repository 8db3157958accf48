"""Element-wise kernels: one kernel that computes all assignments of an expression for each element.

Each thread computes the elements of one or several vectors of up to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np

from cudakit.arrays.expressions import (
    PRELUDE,
    Program,
    TypedAssignment,
    Values,
    check_stores,
    cuda_text,
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
        shape = broadcast_shape(arrays_of(inputs))
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
        check_stores(
            program,
            assignments,
            {name: dtype_of(view.dtype) for name, view in output_arrays.items()},
        )
        shape = broadcast_shape(arrays) if arrays else next(iter(output_arrays.values())).shape
        check_arrays(arrays, output_arrays, shape)
        views = {**arrays, **outputs}
        layout = merged_layout(shape, [(view.shape, view.strides) for view in views.values()])
        dtypes = {name: dtype_of(view.dtype) for name, view in views.items()}
        sizes_bytes = [dtype.size_bytes for dtype in dtypes.values()]
        width = vector_width(
            layout,
            [view.ptr for view in views.values()],
            sizes_bytes,
            largest=16 if max(sizes_bytes) == 1 else 8,
        )
        default_threads, vectors = choose_block(layout, width)
        threads = threads or default_threads
        block_count = -(-layout.count // (vectors * width * threads))
        if block_count > _MAX_BLOCKS:
            raise UsageError(f"{layout.count} elements are more than one launch can compute")
        kernel = ElementwiseSource(
            program=program,
            assignments=assignments,
            dtypes=dtypes,
            scalars=scalar_dtypes(inputs),
            layout=layout,
            width=width,
            threads=threads,
            vectors=vectors,
        )
        source, name = kernel.source()
        _register_host_kernel(name, kernel)
        positions = {name: index for index, name in enumerate([*inputs, *program.new_outputs])}
        numbers = [layout.count, *layout.sizes]
        for strides in layout.strides:
            numbers += strides
        parameters: list[Parameter] = [bytes_argument(np.array(numbers, np.int64).tobytes())]
        parameters += [Address(positions[name]) for name in views]
        parameters += [Scalar(positions[name], dtype) for name, dtype in kernel.scalars.items()]
        return LaunchPlan(source, name, block_count, threads, tuple(parameters))

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
        arrays = {}
        for name in self.program.outputs:
            array = outputs[name] if name in outputs else inputs[name]
            if not isinstance(array, ArrayView):
                raise UsageError(
                    f"the expression assigns to its input {name}, which is a number",
                    hint=f"pass an array as {name}, or assign to another name",
                )
            arrays[name] = array
        return arrays


def _register_host_kernel(name: str, kernel: ElementwiseSource) -> None:
    """Register the numpy implementation of a kernel, for simulated devices."""
    dimensions, program = len(kernel.layout.sizes), kernel.program

    @host_kernel(name)
    def run(launch: Launch, layout: np.generic, *arguments: int | np.generic) -> None:
        words = np.frombuffer(layout.tobytes(), np.int64)
        sizes = words[1 : 1 + dimensions].tolist()
        strides = words[1 + dimensions :].reshape(-1, dimensions).tolist()
        arrays = {
            array: (int(argument), dtype, array_strides)
            for (array, dtype), argument, array_strides in zip(
                kernel.dtypes.items(), arguments, strides, strict=False
            )
        }
        values = scalar_values(kernel.scalars, arguments[len(arrays) :])
        for array, (address, dtype, array_strides) in arrays.items():
            if array in program.inputs:
                bits = read_array(launch, address, dtype.storage, sizes, array_strides)
                values[array] = from_storage(bits, dtype)
        results = evaluate(kernel.assignments, values)
        for array in program.outputs:
            address, dtype, array_strides = arrays[array]
            bits = to_storage(np.broadcast_to(results[array], sizes[::-1]), dtype)
            write_array(launch, address, bits, array_strides)


def input_types(inputs: Mapping[str, Operand]) -> dict[str, ValueType]:
    """Return the type of each input. Python floats are float64 only if an input is float64 or complex128."""
    types = {
        name: ValueType(dtype_of(value.dtype if isinstance(value, ArrayView) else value.dtype.name))
        if isinstance(value, ArrayView | np.generic)
        else weak_type(value)
        for name, value in inputs.items()
    }
    if any(not t.is_weak and t.dtype.name in ("float64", "complex128") for t in types.values()):
        wide = {FLOAT: DTYPES["float64"], COMPLEX: DTYPES["complex128"]}
        for name, value_type in types.items():
            if value_type.is_weak:
                dtype = wide.get(value_type.dtype.category, value_type.dtype)
                types[name] = ValueType(dtype, is_weak=True)
    return types


def scalar_dtypes(inputs: Mapping[str, Operand]) -> dict[str, DType]:
    """Return the dtypes of the operands that are numbers."""
    return {
        name: value_type.dtype
        for name, value_type in input_types(inputs).items()
        if not isinstance(inputs[name], ArrayView)
    }


def scalar_values(
    scalars: Mapping[str, DType], arguments: Sequence[int | np.generic]
) -> dict[str, Values]:
    """Return the numbers that a launch passed to a host kernel, in the dtypes in which it computes."""
    return {
        name: np.frombuffer(np.asarray(argument).tobytes(), dtype.compute).reshape(())
        for (name, dtype), argument in zip(scalars.items(), arguments, strict=True)
    }


def element_bytes(view: ArrayView) -> int:
    """Return the size of an array's elements in bytes."""
    return dtype_of(view.dtype).size_bytes


def arrays_of(inputs: Mapping[str, Operand]) -> dict[str, ArrayView]:
    """Return the operands that are arrays."""
    return {name: value for name, value in inputs.items() if isinstance(value, ArrayView)}


def check_arrays(
    inputs: Mapping[str, ArrayView], output_arrays: Mapping[str, ArrayView], shape: tuple[int, ...]
) -> None:
    """Raise UsageError for arrays that a kernel cannot use: shape, alignment, read-only, overlap."""
    for name, view in {**inputs, **output_arrays}.items():
        alignment = min(element_bytes(view), 16)
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
    begin, end = byte_range(output, element_bytes(output))
    for other_name, other in {**inputs, **excluded_arrays}.items():
        other_begin, other_end = byte_range(other, element_bytes(other))
        if other_name == name or max(begin, other_begin) >= min(end, other_end):
            continue
        if other_name in excluded_arrays or replace(other, read_only=output.read_only) != output:
            raise UsageError(
                f"the output {name} overlaps {other_name} in memory",
                hint=f"pass another output, or all of {other_name} to compute in place",
            )


# --- CUDA C++ source of element-wise kernels ------------------------------------------------------

_MAX_INDEX_32 = 1 << 31
# Each row has the minimum number of vectors in an array, the number of threads of a block, and the number of
# vectors that each thread computes. Several loads at once hide the latency of memory; in small arrays, more
# blocks occupy more multiprocessors. The rows were measured on an H200.
_VECTOR_BLOCKS = ((1 << 17, 128, 1), (1 << 16, 256, 1), (0, 128, 1))
# The same rows for vectors of one element.
_SCALAR_BLOCKS = ((1 << 19, 256, 4), (1 << 14, 256, 2), (0, 256, 1))


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

    def source(self) -> tuple[str, str]:
        """Return the CUDA C++ source, and the name of the kernel."""
        body = self._body()
        name = f"cudakit_elementwise_{sha256(body.encode()).hexdigest()[:16]}"
        # A backslash at the end of a line would continue the comment in C++.
        expression_lines = self.program.text.replace("\\", " ").splitlines()
        comment = "".join(f"// {line}\n" for line in expression_lines)
        return f"{comment}{PRELUDE}{body.replace('KERNEL_NAME', name)}", name

    def _body(self) -> str:
        layout, axis_count = self.layout, len(self.layout.sizes)
        index_type = "u32" if layout.count < _MAX_INDEX_32 else "u64"
        parameters = [f"char* p{index}" for index in range(len(self.dtypes))]
        parameters += [
            f"{dtype.compute_type} s{index}" for index, dtype in enumerate(self.scalars.values())
        ]
        parameter_list = ", ".join(parameters)
        spaced = [index for index in range(len(self.dtypes)) if self._distance_is_argument(index)]
        distances = [f"i64 d{index}" for index in spaced]
        compute_parameters = ", ".join([*parameters, "Index remaining", *distances])
        addresses = [
            " + ".join(
                [f"p{index}"]
                + [
                    f"(i64)i{axis} * {self._stride_text(index, axis)}"
                    for axis in range(axis_count)
                    if strides[axis]
                ]
            )
            for index, strides in enumerate(layout.strides)
        ]
        arguments = [*addresses, *(f"s{index}" for index in range(len(self.scalars)))]
        if axis_count == 1:
            steps = [f"SPACING * {self._stride_text(index, 0)}" for index in spaced]
            call = f"({', '.join([*arguments, 'count - i0', *steps])});"
            lines = [
                "    const Index block_begin = blockIdx.x * (Index)BLOCK_ELEMENTS;",
                "    const Index i0 = block_begin + threadIdx.x * WIDTH;",
                f"    if (count - block_begin >= BLOCK_ELEMENTS) compute<false>{call}",
                f"    else if (i0 < count) compute<true>{call}",
            ]
        else:
            # Each thread computes one vector, and no vector crosses the end of an innermost row.
            lines = [
                "    const Index first = (blockIdx.x * (Index)THREADS + threadIdx.x) * WIDTH;",
                "    if (first >= count) return;",
                "    Index rest = first;",
            ]
            for axis in range(axis_count - 1):
                size = f"(Index)layout.sizes[{axis}]"
                lines += [f"    const Index i{axis} = rest % {size};", f"    rest /= {size};"]
            lines.append(f"    const Index i{axis_count - 1} = rest;")
            lines.append(f"    compute<false>({', '.join([*arguments, 'WIDTH'])});")
        index_text = "\n".join(lines)
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
{index_text}
}}
"""

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
        variables = {name: f"s{index}" for index, name in enumerate(self.scalars)}
        loads: list[str] = []
        loop: list[str] = []
        stores: list[str] = []
        for index, (name, dtype) in enumerate(self.dtypes.items()):
            storage, is_vector = dtype.storage_type, self._is_vector(index)
            if is_vector:
                loads.append(f"    Vector<{storage}, WIDTH> v{index}[VECTORS] = {{}};")
            else:
                loads.append(f"    const {storage} e{index} = *(const {storage}*)p{index};")
            if name in self.program.inputs:
                if is_vector:
                    loads += self._transfer_lines(index, is_store=False)
                element = f"v{index}[v].elements[k]" if is_vector else f"e{index}"
                loop.append(f"        const auto x{index} = load_value({element});")
                variables[name] = f"x{index}"
        for index, assignment in enumerate(self.assignments):
            value = cuda_text(assignment.value, variables)
            loop.append(f"        const {assignment.dtype.compute_type} t{index} = {value};")
            variables[assignment.target] = f"t{index}"
        for name in self.program.outputs:
            index = arrays.index(name)
            stored = f"stored<{self.dtypes[name].storage_type}>::from({variables[name]})"
            loop.append(f"        v{index}[v].elements[k] = {stored};")
            stores += self._transfer_lines(index, is_store=True)
        loop_head = [
            "    #pragma unroll",
            "    for (int v = 0; v < VECTORS; ++v)",
            "    #pragma unroll",
            "    for (int k = 0; k < WIDTH; ++k) {",
        ]
        return "\n".join([*loads, *loop_head, *loop, "    }", *stores])

    def _transfer_lines(self, index: int, *, is_store: bool) -> list[str]:
        """Return the lines that load or store the elements of a thread in one array."""
        storage = list(self.dtypes.values())[index].storage_type
        is_argument = self._distance_is_argument(index)
        distance = f"d{index}" if is_argument else f"SPACING * (i64)sizeof({storage})"
        address = f"p{index} + v * {distance}"
        sides = (f"v{index}[v]", f"*(Vector<{storage}, WIDTH>*)({address})")
        element_sides = (f"v{index}[v].elements[k]", f"(({storage}*)({address}))[k]")
        if is_store:
            sides, element_sides = sides[::-1], element_sides[::-1]
        return [
            "    #pragma unroll",
            "    for (int v = 0; v < VECTORS; ++v) {",
            f"        if (!IS_PARTIAL || v * SPACING + WIDTH <= remaining) {' = '.join(sides)};",
            "        else if (WIDTH > 1)",
            "            for (int k = 0; k < WIDTH; ++k)",
            f"                if (v * SPACING + k < remaining) {' = '.join(element_sides)};",
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
