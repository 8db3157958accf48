"""The operands of a GEMM: buffer sets in device memory that are allocated and filled together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from cudakit.core.bench.workload import allocate
from cudakit.gpu.api import LEGACY, Memory, Ptr
from cudakit.gpu.api.elements import Element
from cudakit.gpu.api.gemm import Gemm
from cudakit.kernels.fill import Fill

# Alignment of every operand: a multiple of the 256 bytes of cuMemAlloc, and the best for tensor cores.
_ALIGNMENT_BYTES = 512
# The largest integer of ``int`` data: sums of a million products are exact in fp32.
_SMALL = 4
# Number of random sequences of a buffer set: A, B and the bias.
_SEQUENCES = 3

_RANDOM: Mapping[str, Callable[..., None]] = {
    "uniform": Fill.uniform,
    "normal": Fill.normal,
    "int": partial(Fill.integers, low=-_SMALL, high=_SMALL),
}
_CONSTANTS = {"zeros": 0.0, "ones": 1.0}


@dataclass(frozen=True, slots=True)
class OperandSet:
    """One buffer set."""

    a: Ptr
    b: Ptr
    d: Ptr
    bias: Ptr  # 0 without a bias


@dataclass(frozen=True, slots=True)
class Slab:
    """One operand of several buffer sets, which are ``pitch`` elements apart."""

    ptr: Ptr
    element: Element
    pitch: int
    sets: int

    def at(self, number: int) -> Ptr:
        """Return the address of a buffer set's operand."""
        return Ptr(self.ptr + number * self.pitch * self.element.size_bytes)

    @property
    def elements(self) -> int:
        """Number of elements, with the padding between buffer sets."""
        return self.pitch * self.sets


@dataclass(frozen=True, slots=True)
class OperandSets:
    """Several buffer sets."""

    a: Slab
    b: Slab
    d: Slab
    bias: Slab | None

    def __getitem__(self, number: int) -> OperandSet:
        bias = self.bias.at(number) if self.bias else Ptr(0)
        return OperandSet(self.a.at(number), self.b.at(number), self.d.at(number), bias)

    def __len__(self) -> int:
        return self.d.sets


def operand_bytes(gemm: Gemm) -> int:
    """Return the size of one buffer set."""
    return sum(count * element.size_bytes for element, count in _operands(gemm))


def make_operands(gpu: Memory, gemm: Gemm, sets: int, cleanup: ExitStack) -> OperandSets:
    """Allocate buffer sets; ``cleanup`` frees them."""

    def slab(element: Element, elements: int) -> Slab:
        unit = _ALIGNMENT_BYTES // element.size_bytes
        pitch = -(-elements // unit) * unit
        ptr = allocate(gpu, cleanup, pitch * sets * element.size_bytes)
        return Slab(ptr, element, pitch, sets)

    a, b, d, *bias = (slab(*operand) for operand in _operands(gemm))
    return OperandSets(a, b, d, bias[0] if bias else None)


def fill_operands(fill: Fill, sets: OperandSets, how: str, *, seed: int, number: int) -> None:
    """Enqueue fills of A, B and bias; ``number`` selects the random sequences of a seed."""
    for i, slab in enumerate((sets.a, sets.b, sets.bias)):
        if slab is None:
            continue
        where = (slab.ptr, slab.elements, slab.element, LEGACY)
        if how in _CONSTANTS:
            fill.constant(*where, value=_CONSTANTS[how])
        else:
            _RANDOM[how](fill, *where, seed=seed, sequence=_SEQUENCES * number + i)


def _operands(gemm: Gemm) -> list[tuple[Element, int]]:
    matrices = [(matrix.element, matrix.elements) for matrix in (gemm.a, gemm.b, gemm.d)]
    return [*matrices, (gemm.bias, gemm.m)] if gemm.has_bias else matrices
