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
_INTERLEAVED = 4  # elements that a thread computes if it cannot load vectors

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
    width: int  # number of elements of a vector

    @property
    def elements_per_thread(self) -> int:
        """The number of elements that each thread computes."""
        return _INTERLEAVED if self._is_interleaved else self.width

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
        lines = self.program.text.replace("\\", " ").splitlines()
        comment = "".join(f"// {line}\n" for line in lines)
        return f"{comment}{PRELUDE}{VECTORS}{body.replace('KERNEL_NAME', name)}", name

    def _body(self) -> str:
        dimensions = len(self.layout.sizes)
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
struct Layout {{ i64 count; i64 sizes[{dimensions}]; i64 strides[{len(self.dtypes)}][{dimensions}]; }};

template <int WIDTH> __device__ void compute({parameter_list}{distances}) {{
{self._compute_text()}
}}

extern "C" __global__ void KERNEL_NAME(const Layout layout, {parameter_list}) {{
    typedef {index_type} Index;
    const Index count = (Index)layout.count;
{self._index_text()}
}}
"""

    def _index_text(self) -> str:
        """Return the text that computes the indices of a vector and its elements."""
        dimensions = len(self.layout.sizes)
        arguments = [
            "".join(
                [f"p{index}"]
                + [
                    f" + (i64)i{axis} * {self._stride_text(index, axis)}"
                    for axis in range(dimensions)
                    if strides[axis]
                ]
            )
            for index, strides in enumerate(self.layout.strides)
        ]
        arguments += [f"s{index}" for index in range(len(self.scalars))]
        if self._is_interleaved:
            return self._interleaved_text(arguments)
        call = f"({', '.join(arguments)});"
        first = (
            f"    const Index first = (blockIdx.x * (Index)blockDim.x + threadIdx.x) * {self.width};\n"
            f"    if (first >= count) return;\n"
        )
        if dimensions == 1:
            return (
                f"{first}"
                f"    if (count - first >= {self.width}) {{\n"
                f"        const Index i0 = first;\n"
                f"        compute<{self.width}>{call}\n"
                f"    }} else {{\n"
                f"        for (Index i0 = first; i0 < count; ++i0) compute<1>{call}\n"
                f"    }}"
            )
        lines = [f"{first}    Index rest = first;"]
        for axis in range(dimensions - 1):
            size = f"(Index)layout.sizes[{axis}]"
            lines.append(f"    const Index i{axis} = rest % {size};")
            lines.append(f"    rest /= {size};")
        lines.append(f"    const Index i{dimensions - 1} = rest;")
        lines.append(f"    compute<{self.width}>{call}")
        return "\n".join(lines)

    def _interleaved_text(self, arguments: Sequence[str]) -> str:
        distances = [
            f"(i64)blockDim.x * {self._stride_text(index, 0)}" for index in range(len(self.dtypes))
        ]
        call = f"({', '.join([*arguments, *distances])});"
        return (
            f"    Index i0 = blockIdx.x * (Index)({_INTERLEAVED} * blockDim.x) + threadIdx.x;\n"
            f"    if (i0 + {_INTERLEAVED - 1} * blockDim.x < count) compute<{_INTERLEAVED}>{call}\n"
            f"    else for (; i0 < count; i0 += blockDim.x) compute<1>{call}"
        )

    def _stride_text(self, index: int, axis: int) -> str:
        """Return a stride as C++ text: a literal for adjacent elements, which saves a load."""
        size_bytes = list(self.dtypes.values())[index].size_bytes
        if self.layout.strides[index][axis] == size_bytes:
            return str(size_bytes)
        return f"layout.strides[{index}][{axis}]"

    def _compute_text(self) -> str:
        """Return the body of the function that loads, computes and stores the elements of one vector."""
        arrays = list(self.dtypes)
        variables = {name: f"s{index}" for index, name in enumerate(self.scalars)}
        load_lines, loop_lines = self._load_text(), []
        store_lines: list[str] = []
        for index, name in enumerate(arrays):
            if name in self.program.inputs:
                element = f"v{index}.elements[k]" if self._is_vector(index) else f"e{index}"
                loop_lines.append(f"        const auto x{index} = load_value({element});")
                variables[name] = f"x{index}"
        for number, assignment in enumerate(self.assignments):
            text = cuda_text(assignment.value, variables)
            loop_lines.append(f"        const {assignment.dtype.compute_type} t{number} = {text};")
            variables[assignment.target] = f"t{number}"
        for name in self.program.outputs:
            index, storage = arrays.index(name), self.dtypes[name].storage_type
            value = f"stored<{storage}>::from({variables[name]})"
            loop_lines.append(f"        v{index}.elements[k] = {value};")
            if self._is_interleaved:
                loop_lines.append(
                    f"        *({storage}*)(p{index} + k * d{index}) = v{index}.elements[k];"
                )
            else:
                store_lines.append(f"    *(Vector<{storage}, WIDTH>*)p{index} = v{index};")
        loop_head = ["    #pragma unroll", "    for (int k = 0; k < WIDTH; ++k) {"]
        return "\n".join([*load_lines, *loop_head, *loop_lines, "    }", *store_lines])

    def _load_text(self) -> list[str]:
        """Return the lines that load the vectors of all inputs, before any output is stored."""
        lines = []
        for index, (name, dtype) in enumerate(self.dtypes.items()):
            vector = f"Vector<{dtype.storage_type}, WIDTH>"
            if name not in self.program.inputs:
                lines.append(f"    {vector} v{index};")
            elif self._is_vector(index) and self._is_interleaved:
                element = f"*(const {dtype.storage_type}*)(p{index} + k * d{index})"
                lines.append(f"    {vector} v{index};")
                lines.append("    #pragma unroll")
                lines.append(
                    f"    for (int k = 0; k < WIDTH; ++k) v{index}.elements[k] = {element};"
                )
            elif self._is_vector(index):
                lines.append(f"    {vector} v{index} = *(const {vector}*)p{index};")
            else:
                element = f"*(const {dtype.storage_type}*)p{index}"
                lines.append(f"    const {dtype.storage_type} e{index} = {element};")
        return lines

    def _is_vector(self, index: int) -> bool:
        """Return whether a thread accesses WIDTH elements of an array, not one repeated element."""
        is_output = list(self.dtypes)[index] in self.program.outputs
        return is_output or self.layout.strides[index][0] != 0
