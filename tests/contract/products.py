"""GEMM problems with random operands, and their expected results, computed in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from contract.workbench import Workbench

from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.api.arrays import INT8, Bits, Element, Floats, decode, encode
from cudakit.gpu.api.gemm import Gemm, GemmPlan, Matrix

# Initial bytes of D, and of the guard area after its end.
POISON = 0xA5
TAIL_BYTES = 64

# Machine epsilon and smallest positive value of each type (IEEE 754-2019; bfloat16;
# "FP8 Formats for Deep Learning", arXiv 2209.05433).
UNITS = {
    "fp64": 2**-52,
    "fp32": 2**-23,
    "fp16": 2**-10,
    "bf16": 2**-7,
    "fp8_e4m3": 2**-3,
    "fp8_e5m2": 2**-2,
}
SMALLEST_VALUE = {
    "fp64": 0.0,
    "fp32": 2**-149,
    "fp16": 2**-24,
    "bf16": 2**-133,
    "fp8_e4m3": 2**-9,
    "fp8_e5m2": 2**-16,
}
# Relative error of operands before the multiplication, and of each addition (the tensor cores of
# Hopper keep 14 bits of fp8 sums: "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.5.2).
FACTOR = {"tf32": 2**-9}
ADDITION = {"fp8_e4m3": 2**-13, "fp8_e5m2": 2**-13}


@dataclass(frozen=True)
class Places:
    """Device addresses of the operands."""

    a: Ptr
    b: Ptr
    d: Ptr
    bias: Ptr


class Problem:
    """A GEMM with random operands. Padding between columns is filled with NaN, if the type has one."""

    def __init__(self, gemm: Gemm, seed: int = 0) -> None:
        self.gemm = gemm
        random = np.random.default_rng(seed)
        self.a, self.b = _random(gemm.a, random), _random(gemm.b, random)
        self.bias = encode(random.uniform(-1, 1, gemm.m), gemm.bias)

    def expected(self) -> Floats:
        """Return the expected D of all matrices of the batch in fp64."""
        sums = self._products(*self._factors())
        if self.gemm.has_bias:
            sums = sums + self._bias()
        if self.gemm.epilogue.startswith("relu"):
            return np.where(sums > 0, sums, 0.0)
        if self.gemm.epilogue.startswith("gelu"):
            half: Floats = 0.5 * sums
            return half * (1 + np.tanh(0.7978845608028654 * (sums + 0.044715 * sums * sums * sums)))
        return sums

    def tolerance(self, *, reduced: bool = False) -> Floats:
        """Return the absolute tolerance of each element of D.

        ``reduced`` allows reductions in the type of D. A GELU may use the approximate
        tanh, with an error of 2**-11 (PTX ISA, "tanh").
        """
        gemm = self.gemm
        if gemm.dtype == "int8":
            return np.zeros((gemm.batch, gemm.m, gemm.n))
        magnitude = self._products(*(np.abs(factor) for factor in self._factors())) + np.abs(
            self._bias()
        )
        addition = max(ADDITION.get(gemm.dtype, 0), UNITS[gemm.accumulate])
        relative_error = gemm.k * addition + FACTOR.get(gemm.dtype, 0)
        relative_error += 4 * UNITS[gemm.output] if reduced else 0
        relative_error += 2**-9 if gemm.epilogue.startswith("gelu") else 0
        return (
            1.25 * relative_error * magnitude
            + UNITS[gemm.output] * np.abs(self.expected())
            + SMALLEST_VALUE[gemm.output]
        )

    def check(self, content: bytes, *, reduced: bool = False) -> None:
        """Assert that D is the expected result, and that padding and guard area are unchanged."""
        result_matrix = self.gemm.d
        bits = np.frombuffer(
            content[: result_matrix.size_bytes], result_matrix.element.storage_dtype
        )
        positions = element_indices(result_matrix)
        differences = np.abs(decode(bits[positions], result_matrix.element) - self.expected())
        assert np.all(differences <= self.tolerance(reduced=reduced)), (
            f"{self.gemm}: off by {differences.max()}"
        )
        untouched = np.ones(result_matrix.elements, bool)
        untouched[positions] = False
        assert set(bits[untouched].tobytes() + content[result_matrix.size_bytes :]) == {POISON}

    def _factors(self) -> tuple[Floats, Floats]:
        """Return op(A) and op(B)."""
        gemm = self.gemm
        factor_a = decode(self.a[element_indices(gemm.a)], gemm.a.element)
        factor_b = decode(self.b[element_indices(gemm.b)], gemm.b.element)
        return (
            factor_a if gemm.layout[0] == "n" else factor_a.transpose(0, 2, 1),
            factor_b if gemm.layout[1] == "n" else factor_b.transpose(0, 2, 1),
        )

    def _products(self, a: Floats, b: Floats) -> Floats:
        product: Floats = np.einsum("zik,zkj->zij", a, b)
        return product

    def _bias(self) -> Floats:
        return decode(self.bias, self.gemm.bias)[None, :, None]


def element_indices(matrix: Matrix) -> npt.NDArray[np.int64]:
    """Return the index of each element in memory, for each matrix, row and column."""
    batch_index, i, j = np.ogrid[: matrix.batch, : matrix.rows, : matrix.columns]
    positions: npt.NDArray[np.int64] = batch_index * matrix.stride + i + j * matrix.leading
    return positions


def upload(bench: Workbench, problem: Problem) -> Places:
    """Allocate memory for a problem, and write its operands."""
    result_bytes = np.full(problem.gemm.d.size_bytes + TAIL_BYTES, POISON, np.uint8)
    return Places(
        *(_put(bench, content) for content in (problem.a, problem.b, result_bytes, problem.bias))
    )


def result(bench: Workbench, problem: Problem, operands: Places) -> bytes:
    """Wait for the device, and read D and its guard area."""
    return bench.read_bytes(operands.d, problem.gemm.d.size_bytes + TAIL_BYTES)


def run(bench: Workbench, plan: GemmPlan, problem: Problem, stream: Stream | None = None) -> bytes:
    """Compute a problem once, in new memory."""
    operands = upload(bench, problem)
    plan.enqueue(operands, bench.gpu.stream() if stream is None else stream)
    content = result(bench, problem, operands)
    for ptr in (operands.a, operands.b, operands.d, operands.bias):
        bench.gpu.free(ptr)
    return content


def _put(bench: Workbench, content: npt.NDArray[Any]) -> Ptr:
    ptr = bench.gpu.malloc(content.nbytes)
    bench.write(ptr, content)
    return ptr


def _random(matrix: Matrix, random: np.random.Generator) -> Bits:
    bits = np.full(matrix.size_bytes, 0xFF, np.uint8).view(matrix.element.storage_dtype)
    positions = element_indices(matrix)
    bits[positions] = encode(_values(matrix.element, positions.shape, random), matrix.element)
    return bits


def _values(element: Element, shape: tuple[int, ...], random: np.random.Generator) -> Floats:
    if element is INT8:
        return random.integers(-128, 128, shape).astype(np.float64)
    return random.uniform(-1, 1, shape)
