"""CUDA C++ source of element-wise kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from cudakit.arrays.expressions.cuda import PRELUDE, cuda_text
from cudakit.arrays.expressions.dtypes import DType
from cudakit.arrays.expressions.parse import Program
from cudakit.arrays.expressions.typed import TypedAssignment
from cudakit.arrays.layout import Layout

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
