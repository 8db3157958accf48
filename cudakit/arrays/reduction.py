"""Reductions: sums, products, extrema and means of expressions, over all or some axes of arrays.

A block is divided into rows of threads: threads of one column combine elements of the same output. Long
reductions are split over several blocks; the block that finishes last combines their partial results in
the order of their positions, so that the result is the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.arrays.elementwise import (
    Operand,
    ResultType,
    arrays_of,
    check_arrays,
    check_overlaps,
    input_types,
)
from cudakit.arrays.expressions.dtypes import (
    COMPLEX,
    DType,
    ValueType,
    can_store,
    dtype_of,
)
from cudakit.arrays.expressions.evaluate import (
    Values,
    convert_values,
    evaluate_value,
    from_storage,
    to_storage,
)
from cudakit.arrays.expressions.parse import REDUCED, parse_reduction
from cudakit.arrays.expressions.typed import TypedNode, convert, infer_value
from cudakit.arrays.launch_plan import (
    Address,
    LaunchPlan,
    Parameter,
    Scalar,
    Scratch,
    bytes_argument,
)
from cudakit.arrays.layout import Layout, broadcast_shape, broadcast_strides, merged_layout
from cudakit.arrays.reducers import REDUCERS
from cudakit.arrays.reduction_blocks import choose_block_shape
from cudakit.arrays.reduction_source import ReductionSource
from cudakit.arrays.views import read_array, write_array
from cudakit.errors import UsageError
from cudakit.gpu.api.arrays import ArrayView
from cudakit.gpu.api.host_kernels import Launch, host_kernel


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
