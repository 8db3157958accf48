"""CUDA C++ source of reductions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

from cudakit.arrays.elementwise_source import VECTORS
from cudakit.arrays.expressions.cuda import PRELUDE, cuda_text, literal
from cudakit.arrays.expressions.dtypes import DType
from cudakit.arrays.expressions.parse import REDUCED
from cudakit.arrays.expressions.typed import TypedNode
from cudakit.arrays.reduction_blocks import BlockShape

_WARP = 32

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
        body = self._body()
        name = f"cudakit_reduction_{sha256(body.encode()).hexdigest()[:16]}"
        comment = self.text.replace("\\", " ").replace("\n", " ")
        text = body.replace("KERNEL_NAME", name)
        return f"// {comment}\n{PRELUDE}{VECTORS}{_SHUFFLE}{text}", name

    def _body(self) -> str:
        kernel_body = f"{self._chunk_text()}{self._combine_splits_text()}"
        return f"{self._declarations()}{self._kernel_head()}{kernel_body}}}\n"

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
