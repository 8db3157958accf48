"""Element-wise kernels: one kernel that computes all assignments of an expression for each element.

Each thread computes the elements of one or several vectors of up to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.arrays.elementwise_source import ElementwiseSource, choose_block
from cudakit.arrays.expressions.dtypes import (
    COMPLEX,
    DTYPES,
    FLOAT,
    ValueType,
    dtype_of,
    weak_type,
)
from cudakit.arrays.expressions.evaluate import Values, evaluate, from_storage, to_storage
from cudakit.arrays.expressions.parse import Program, parse
from cudakit.arrays.expressions.typed import check_stores, infer
from cudakit.arrays.launch_plan import Address, LaunchPlan, Parameter, Scalar, bytes_argument
from cudakit.arrays.layout import Layout, broadcast_shape, merged_layout, vector_width
from cudakit.arrays.views import read_array, write_array
from cudakit.errors import UsageError
from cudakit.gpu.api.arrays import ArrayView, byte_range
from cudakit.gpu.api.host_kernels import Launch, host_kernel

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
        parameters: list[Parameter] = [_layout_argument(layout)]
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


def _layout_argument(layout: Layout) -> np.generic:
    layout_numbers = [layout.count, *layout.sizes]
    for strides in layout.strides:
        layout_numbers += strides
    return bytes_argument(np.array(layout_numbers, np.int64).tobytes())


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
