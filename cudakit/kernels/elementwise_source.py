"""CUDA C++ source of element-wise kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from cudakit.kernels.expressions.cuda import PRELUDE, cuda_text
from cudakit.kernels.expressions.dtypes import DType
from cudakit.kernels.expressions.parse import Program
from cudakit.kernels.expressions.typed import TypedAssignment
from cudakit.kernels.layout import Layout

_MAX_INDEX_32 = 1 << 31
# Pairs of the smallest array size in elements, and the number of elements that each thread computes if it
# cannot load vectors. Several loads at once hide the latency of memory; in small arrays, more blocks occupy
# more multiprocessors. The sizes were measured on an H200.
_INTERLEAVING_BY_MIN_COUNT = ((1 << 19, 4), (1 << 15, 2), (0, 1))

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
    width: int  # number of adjacent elements that a thread loads from an array at once

    @property
    def elements_per_thread(self) -> int:
        """The number of elements that each thread computes."""
        if not self._is_interleaved:
            return self.width
        return next(
            element_count
            for min_size, element_count in _INTERLEAVING_BY_MIN_COUNT
            if self.layout.count >= min_size
        )

    @property
    def _is_interleaved(self) -> bool:
        """Whether the elements of a thread are blockDim.x apart, because the thread cannot load vectors.

        Several loads of a thread are then in flight at once, and adjacent threads load adjacent elements.
        """
        return len(self.layout.sizes) == 1 and self.width == 1

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
        distances = "".join(f", i64 d{index}" for index in range(len(self.dtypes)))
        if not self._is_interleaved:
            distances = ""
        return f"""
typedef {index_type} Index;
enum {{ WIDTH = {self.elements_per_thread} }};
struct Layout {{ i64 count; i64 sizes[{axis_count}]; i64 strides[{len(self.dtypes)}][{axis_count}]; }};

// Computes the elements k of one thread. If IS_PARTIAL, the arrays end before k * spacing == remaining. All
// elements are loaded before the first one is stored, so that the thread waits for memory once.
template <bool IS_PARTIAL>
__device__ void compute({parameter_list}, Index remaining, Index spacing{distances}) {{
{self._compute_text()}
}}

extern "C" __global__ void KERNEL_NAME(const Layout layout, {parameter_list}) {{
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
        first_index, spacing = "(blockIdx.x * (Index)blockDim.x + threadIdx.x) * WIDTH", "1"
        distances: list[str] = []
        if self._is_interleaved:
            first_index, spacing = (
                "blockIdx.x * (Index)(WIDTH * blockDim.x) + threadIdx.x",
                "blockDim.x",
            )
            distances = [
                f"(i64)blockDim.x * {self._stride_text(index, 0)}"
                for index in range(len(self.dtypes))
            ]
        call = f"({', '.join([*arguments, 'count - i0', spacing, *distances])});"
        return (
            f"    const Index i0 = {first_index};\n"
            f"    if (i0 >= count) return;\n"
            f"    if (count - i0 > (WIDTH - 1) * {spacing}) compute<false>{call}\n"
            f"    else compute<true>{call}"
        )

    def _strided_text(self, arguments: Sequence[str]) -> str:
        """Return the CUDA C++ for arrays of several dimensions.

        The layout ensures that the elements of one thread are in the same row of the innermost dimension.
        """
        dimension_count = len(self.layout.sizes)
        lines = [
            "    const Index first = (blockIdx.x * (Index)blockDim.x + threadIdx.x) * WIDTH;",
            "    if (first >= count) return;",
            "    Index rest = first;",
        ]
        for axis in range(dimension_count - 1):
            size_text = f"(Index)layout.sizes[{axis}]"
            lines.append(f"    const Index i{axis} = rest % {size_text};")
            lines.append(f"    rest /= {size_text};")
        lines.append(f"    const Index i{dimension_count - 1} = rest;")
        lines.append(f"    compute<false>({', '.join([*arguments, 'WIDTH', '1'])});")
        return "\n".join(lines)

    def _stride_text(self, index: int, axis: int) -> str:
        """Return a stride as C++ text: a literal for adjacent elements, which saves a load."""
        size_bytes = list(self.dtypes.values())[index].size_bytes
        if self.layout.strides[index][axis] == size_bytes:
            return str(size_bytes)
        return f"layout.strides[{index}][{axis}]"

    def _compute_text(self) -> str:
        """Return the body of the function that loads, computes and stores the elements of one thread."""
        arrays = list(self.dtypes)
        variable_by_name = {name: f"s{index}" for index, name in enumerate(self.scalars)}
        lines = self._load_lines()
        loop_lines: list[str] = []
        for index, name in enumerate(arrays):
            if name in self.program.inputs:
                element_text = f"v{index}.elements[k]" if self._is_vector(index) else f"e{index}"
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
            loop_lines.append(f"        v{index}.elements[k] = {stored_text};")
            store_lines += self._transfer_lines(index, is_store=True)
        loop_head = ["    #pragma unroll", "    for (int k = 0; k < WIDTH; ++k) {"]
        return "\n".join([*lines, *loop_head, *loop_lines, "    }", *store_lines])

    def _load_lines(self) -> list[str]:
        """Return the lines that declare the vectors of all arrays, and load those of the inputs."""
        lines = []
        for index, (name, dtype) in enumerate(self.dtypes.items()):
            if self._is_vector(index):
                lines.append(f"    Vector<{dtype.storage_type}, WIDTH> v{index} = {{}};")
                if name in self.program.inputs:
                    lines += self._transfer_lines(index, is_store=False)
            else:
                element_text = f"*(const {dtype.storage_type}*)p{index}"
                lines.append(f"    const {dtype.storage_type} e{index} = {element_text};")
        return lines

    def _transfer_lines(self, index: int, *, is_store: bool) -> list[str]:
        """Return the lines that load or store the elements of a thread in one array."""
        storage_type = list(self.dtypes.values())[index].storage_type
        distance = f"d{index}" if self._is_interleaved else f"(i64)sizeof({storage_type})"
        element_text, vector_item = (
            f"*({storage_type}*)(p{index} + k * {distance})",
            f"v{index}.elements[k]",
        )
        transfer_text = (
            f"{element_text} = {vector_item};" if is_store else f"{vector_item} = {element_text};"
        )
        bounds_check = "k * spacing < remaining"
        if self._is_interleaved:
            bounds_check = f"!IS_PARTIAL || {bounds_check}"
        lines = [
            "    #pragma unroll",
            f"    for (int k = 0; k < WIDTH; ++k) if ({bounds_check}) {transfer_text}",
        ]
        if self._is_interleaved:
            return lines
        vector = f"*(Vector<{storage_type}, WIDTH>*)p{index}"
        transfer_text = f"{vector} = v{index};" if is_store else f"v{index} = {vector};"
        return [f"    if (!IS_PARTIAL) {transfer_text}", "    else {", *lines, "    }"]

    def _is_vector(self, index: int) -> bool:
        """Return whether a thread accesses WIDTH elements of an array, not one repeated element."""
        is_output = list(self.dtypes)[index] in self.program.outputs
        return is_output or self.layout.strides[index][0] != 0
