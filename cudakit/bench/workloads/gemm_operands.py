"""The operands of a GEMM: buffer sets in device memory that are allocated and filled together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from cudakit.arrays.fill import Fill
from cudakit.bench.workload import allocate
from cudakit.gpu.api import LEGACY, Memory, Ptr
from cudakit.gpu.api.elements import Element
from cudakit.gpu.api.gemm import Gemm

# Alignment of every operand. It is a multiple of cuMemAlloc's 256 bytes, and good for loads of tensor cores.
_ALIGNMENT_BYTES = 512
# The largest integer of ``int`` data: sums of a million products of such integers are exact in fp32.
_MAX_INTEGER = 4
# Number of random sequences per buffer set: one for A, B and the bias each.
_SEQUENCES_PER_SET = 3

_RANDOM_FILLS: Mapping[str, Callable[..., None]] = {
    "uniform": Fill.uniform,
    "normal": Fill.normal,
    "int": partial(Fill.integers, low=-_MAX_INTEGER, high=_MAX_INTEGER),
}
_CONSTANTS = {"zeros": 0.0, "ones": 1.0}


@dataclass(frozen=True, slots=True)
class OperandSet:
    """The addresses of the operands of a GEMM in one buffer set."""

    a: Ptr
    b: Ptr
    d: Ptr
    bias: Ptr  # Address of the bias; 0 for a GEMM without a bias.


@dataclass(frozen=True, slots=True)
class Slab:
    """Memory that holds one operand (A, B or D) of several buffer sets, ``pitch_elements`` apart."""

    ptr: Ptr
    element: Element
    pitch_elements: int
    set_count: int

    def address(self, set_index: int) -> Ptr:
        """Return the address of the operand of one buffer set."""
        return Ptr(self.ptr + set_index * self.pitch_elements * self.element.size_bytes)

    @property
    def elements(self) -> int:
        """Number of elements, including the padding between buffer sets."""
        return self.pitch_elements * self.set_count


@dataclass(frozen=True, slots=True)
class OperandSets:
    """The operands of a GEMM in several buffer sets."""

    a: Slab
    b: Slab
    d: Slab
    bias: Slab | None

    def __getitem__(self, set_index: int) -> OperandSet:
        bias = self.bias.address(set_index) if self.bias else Ptr(0)
        return OperandSet(
            self.a.address(set_index), self.b.address(set_index), self.d.address(set_index), bias
        )

    def __len__(self) -> int:
        return self.d.set_count


def operand_bytes(gemm: Gemm) -> int:
    """Return the size of one buffer set."""
    return sum(count * element.size_bytes for element, count in _operands(gemm))


def make_operands(gpu: Memory, gemm: Gemm, set_count: int, cleanup: ExitStack) -> OperandSets:
    """Allocate buffer sets; ``cleanup`` frees them."""

    def allocate_slab(element: Element, element_count: int) -> Slab:
        alignment_elements = _ALIGNMENT_BYTES // element.size_bytes
        pitch_elements = -(-element_count // alignment_elements) * alignment_elements
        ptr = allocate(gpu, cleanup, pitch_elements * set_count * element.size_bytes)
        return Slab(ptr, element, pitch_elements, set_count)

    a, b, d, *bias = (allocate_slab(*operand) for operand in _operands(gemm))
    return OperandSets(a, b, d, bias[0] if bias else None)


def fill_operands(
    fill: Fill, sets: OperandSets, fill_kind: str, *, seed: int, set_index: int
) -> None:
    """Enqueue fills of A, B and bias; ``set_index`` selects the random sequences of the seed."""
    for i, slab in enumerate((sets.a, sets.b, sets.bias)):
        if slab is None:
            continue
        fill_target = (slab.ptr, slab.elements, slab.element, LEGACY)
        if fill_kind in _CONSTANTS:
            fill.constant(*fill_target, value=_CONSTANTS[fill_kind])
        else:
            _RANDOM_FILLS[fill_kind](
                fill, *fill_target, seed=seed, sequence=_SEQUENCES_PER_SET * set_index + i
            )


def _operands(gemm: Gemm) -> list[tuple[Element, int]]:
    matrices = [(matrix.element, matrix.elements) for matrix in (gemm.a, gemm.b, gemm.d)]
    return [*matrices, (gemm.bias, gemm.m)] if gemm.has_bias else matrices
