"""The operands of a GEMM and the check of its result: samples are compared with fp64.

Operands are buffer sets in device memory that are allocated and filled together. The check compares a sample
of D with fp64, and checks all of D for unwritten values.

The sample is the intersection of some rows and columns of D, so that only these rows of A and columns of B
are read. The rows are divided into equal parts, and one row is chosen at random in each part; the first and
the last row are always chosen. Columns are chosen likewise. So the sample has values of all tiles of usual
sizes.

Errors are relative Frobenius norms over the sample. The tolerance is the error that rounding explains:

* Sums of k terms with mean zero, each addition rounded to nearest with unit roundoff u: sqrt(k) * u
  (N. J. Higham and T. Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput.
  41(5), 2019, and "Sharper probabilistic backward error analysis for basic linear algebra kernels with random
  data", 42(5), 2020).
* Sums of k equal terms: k * u (N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed.,
  section 4.2).
* Tensor cores truncate sums instead of rounding them, once per step of some terms, which adds
  k / terms per step * 2 * u (M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, "Numerical behavior of NVIDIA
  tensor cores", PeerJ Computer Science 7, 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from math import inf, sqrt
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.arrays.compare import Compare
from cudakit.arrays.fill import Fill
from cudakit.arrays.poison import Poison
from cudakit.bench.case import Verification, allocate, verification, worst_verification
from cudakit.gpu.api import LEGACY, ComputeDevice, Memory, Ptr
from cudakit.gpu.api.arrays import BF16, FP16, FP32, FP64, Element, Floats
from cudakit.gpu.api.gemm import Gemm, GemmSettings, Matrix

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
        target = (slab.ptr, slab.elements, slab.element, LEGACY)
        if fill_kind in _CONSTANTS:
            fill.constant(*target, value=_CONSTANTS[fill_kind])
        else:
            sequence = _SEQUENCES_PER_SET * set_index + i
            _RANDOM_FILLS[fill_kind](fill, *target, seed=seed, sequence=sequence)


def _operands(gemm: Gemm) -> list[tuple[Element, int]]:
    matrices = [(matrix.element, matrix.elements) for matrix in (gemm.a, gemm.b, gemm.d)]
    return [*matrices, (gemm.bias, gemm.m)] if gemm.has_bias else matrices


# --- the check ---------------------------------------------------------------------------------------

_Indices: TypeAlias = npt.NDArray[np.int64]

_MAX_LINES = 64  # Maximum number of sampled rows, and of sampled columns.
_MIN_LINES = 4
_MAX_MATRICES = 4  # Maximum number of sampled matrices of a batch.
# Maximum number of elements of A, and of B, that are read for all buffer sets.
_MAX_ELEMENTS_READ = 1 << 20
# The maximum error of a single value, as a multiple of the tolerance times the root mean square of the
# values.
_OUTLIER_FACTOR = 16.0

# Safety factor for constants near 1 in the bounds, and for the variance of the sample.
_SAFETY_FACTOR = 2.0
# Number of terms that a tensor core adds per step, for the type with the fewest (PTX ISA, "mma": k of tf32).
_TERMS_PER_STEP = 8
# Sums of fp8 products have about 14 bits (DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.5.2).
# After 128 terms such a sum is added to a sum in fp32; with fast accumulation, all terms are summed with 14
# bits.
_FP8_ROUNDOFF = 2.0**-14
_FP8_STEP_TERMS = 128
# Maximum relative error of a product whose two factors were truncated to the 10 mantissa bits of tf32 (A100
# white paper).
_TF32_TRUNCATION = 2.0 * 2.0**-10
# Factor of the output's rounding error if cuBLASLt adds up to 16 split-k parts in the output type: sqrt(16).
_SPLIT_K_FACTOR = 4.0
# Maximum error of gelu: the difference between its erf and tanh forms, and the error of an approximate tanh.
_GELU_ERROR = 2.0**-9
_ROUNDOFFS = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11}
_WITHOUT_TENSOR_CORES = ("fp64", "fp32")


class Checker:
    """Checks the results of one GEMM on one device; ``fill`` is the kind of data of its operands."""

    def __init__(
        self, gpu: ComputeDevice, gemm: Gemm, settings: GemmSettings, *, fill: str, seed: int
    ) -> None:
        self._gemm, self._seed = gemm, seed
        self._tolerance = tolerance_of(gemm, settings, has_zero_mean=fill not in _CONSTANTS)
        with ExitStack() as cleanup:
            self._compare = cleanup.enter_context(closing(Compare(gpu)))
            self._poison = cleanup.enter_context(closing(Poison(gpu)))
            self._cleanup = cleanup.pop_all()

    def poison(self, sets: OperandSets) -> None:
        """Enqueue a kernel that overwrites D with poison, which shows values that a GEMM never writes."""
        self._poison.fill(sets.d.ptr, sets.d.element, sets.d.elements, LEGACY)

    def check(self, sets: OperandSets) -> Verification:
        """Check the finished outputs of all buffer sets, and return the worst verification."""
        sample = _Sample(self._gemm, self._compare, sets, self._seed)
        computed, sums = sample.gather_d(), sample.sums()
        expected = epilogue(self._gemm, sums, sample.bias())
        write_errors = self._describe_write_errors(sets)
        return worst_verification(
            self._check_set(sample, write_errors, *arrays)
            for arrays in zip(computed, expected, sums, strict=True)
        )

    def close(self) -> None:
        self._cleanup.close()

    def _check_set(
        self, sample: _Sample, write_errors: str, computed: Floats, expected: Floats, sums: Floats
    ) -> Verification:
        """Check one buffer set; the arrays have the shape (matrices of a batch, rows, columns)."""
        rows, columns = len(sample.rows), len(sample.columns)
        reference = f"an fp64 computation of {rows} rows and {columns} columns"
        errors = np.abs(computed - expected)
        norm, error = float(np.linalg.norm(expected)), float(np.linalg.norm(errors))
        # A NaN among the values is an infinite error.
        error = error if np.isfinite(error) else inf
        if not norm:
            return verification(error, 0.0, reference, write_errors)
        tolerance = (
            self._tolerance.result + self._tolerance.sums * float(np.linalg.norm(sums)) / norm
        )
        root_mean_square = float(np.sqrt(np.mean(expected**2)))
        worst = np.unravel_index(int(np.argmax(errors)), errors.shape)
        detail = write_errors
        if not detail and not errors[worst] <= _OUTLIER_FACTOR * tolerance * root_mean_square:
            row, column = sample.rows[worst[1]], sample.columns[worst[2]]
            value, right_value = computed[worst], expected[worst]
            detail = f"row {row}, column {column} is {value:.6g} instead of {right_value:.6g}"
        return verification(error / norm, tolerance, reference, detail)

    def _describe_write_errors(self, sets: OperandSets) -> str:
        """Describe values of D that were never written, or padding that was overwritten; else return ""."""
        matrix, slab = self._gemm.d, sets.d
        counts = self._poison.count(slab.ptr, matrix, slab.pitch_elements, slab.set_count, LEGACY)
        if counts.unwritten:
            value_count = matrix.rows * matrix.columns * matrix.batch * slab.set_count
            return f"{counts.unwritten} of {value_count} values were never written"
        if counts.overwritten:
            return f"{counts.overwritten} values outside of D were overwritten"
        return ""


class _Sample:
    """The sampled values of D, which are the intersection of some rows and columns, and their reference.

    All arrays have the shape (buffer sets, matrices of a batch, rows, columns).
    """

    def __init__(self, gemm: Gemm, compare: Compare, sets: OperandSets, seed: int) -> None:
        self._gemm, self._compare, self._sets = gemm, compare, sets
        generator = np.random.default_rng(seed)
        self._matrices = stratified_sample(gemm.batch, _MAX_MATRICES, generator)
        max_lines = _MAX_ELEMENTS_READ // (gemm.k * len(sets) * len(self._matrices))
        line_count = min(max(max_lines, _MIN_LINES), _MAX_LINES)
        self.rows, self.columns = (
            stratified_sample(size, line_count, generator) for size in (gemm.m, gemm.n)
        )

    def gather_d(self) -> Floats:
        """Return the sampled values of D."""
        return self._gather(self._sets.d, self._gemm.d, self.rows, self.columns)

    def sums(self) -> Floats:
        """Return the reference values of A * B in fp64."""
        gemm, sets, terms = self._gemm, self._sets, np.arange(self._gemm.k)
        if gemm.layout[0] == "t":
            a = self._gather(sets.a, gemm.a, terms, self.rows).swapaxes(2, 3)
        else:
            a = self._gather(sets.a, gemm.a, self.rows, terms)
        if gemm.layout[1] == "t":
            b = self._gather(sets.b, gemm.b, self.columns, terms).swapaxes(2, 3)
        else:
            b = self._gather(sets.b, gemm.b, terms, self.columns)
        product: Floats = np.matmul(a, b)
        return product

    def bias(self) -> Floats:
        """Return the bias of each row; zeros without a bias."""
        slab = self._sets.bias
        if slab is None:
            return np.zeros((1, 1, 1, 1))
        indices = np.arange(slab.set_count)[:, None] * slab.pitch_elements + self.rows
        values = self._compare.sample(slab.ptr, slab.element, indices.reshape(-1), LEGACY)
        return values.reshape(slab.set_count, 1, -1, 1)

    def _gather(self, slab: Slab, matrix: Matrix, rows: _Indices, columns: _Indices) -> Floats:
        """Read the intersection of rows and columns of a matrix."""
        indices = (
            np.arange(slab.set_count)[:, None, None, None] * slab.pitch_elements
            + self._matrices[:, None, None] * matrix.stride
            + columns * matrix.leading
            + rows[:, None]
        )
        values = self._compare.sample(slab.ptr, slab.element, indices.reshape(-1), LEGACY)
        return values.reshape(indices.shape)


def stratified_sample(count: int, max_samples: int, generator: np.random.Generator) -> _Indices:
    """Return up to ``max_samples`` indices below ``count``: both ends, and a random one per equal part."""
    if count <= max_samples:
        return np.arange(count)
    edges = np.linspace(0, count, max_samples + 1).astype(np.int64)
    indices = generator.integers(edges[:-1], edges[1:])
    indices[0], indices[-1] = 0, count - 1
    return indices


def epilogue(gemm: Gemm, sums: Floats, bias: Floats) -> Floats:
    """Apply the epilogue in fp64, saturating at the largest value of the output type."""
    values = sums + bias
    if gemm.epilogue.startswith("relu"):
        values = np.maximum(values, 0.0)
    elif gemm.epilogue.startswith("gelu"):
        # The tanh form (cuBLAS Library, "cublasLtEpilogue_t"; D. Hendrycks, K. Gimpel, arXiv 1606.08415).
        values = 0.5 * values * (1 + np.tanh(np.sqrt(2 / np.pi) * (values + 0.044715 * values**3)))
    if gemm.d.element.format is None:
        return values
    largest = gemm.d.element.format.largest_value
    return np.clip(values, -largest, largest)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest error that rounding explains."""

    sums: float  # Tolerance relative to the norm of the sums A * B.
    result: float  # Tolerance relative to the norm of the result D.


def tolerance_of(gemm: Gemm, settings: GemmSettings, *, has_zero_mean: bool) -> Tolerance:
    """Return the tolerance of a GEMM, 0 for integers; ``has_zero_mean`` is true if the data has mean zero."""
    if gemm.accumulate == "int32":
        return Tolerance(0.0, 0.0)
    terms, unit = gemm.k, _ROUNDOFFS[gemm.accumulate]

    def rounded(term_count: int, unit_roundoff: float) -> float:
        """Return the relative error of a sum with rounding to nearest."""
        return (sqrt(term_count) if has_zero_mean else term_count) * unit_roundoff

    sums = rounded(terms, unit)
    if gemm.dtype.startswith("fp8"):
        fp8_terms = terms if settings.fast_accumulate else min(terms, _FP8_STEP_TERMS)
        sums += rounded(fp8_terms, 2 * _FP8_ROUNDOFF)
    elif gemm.dtype not in _WITHOUT_TENSOR_CORES and gemm.accumulate != "fp16":
        sums += terms / _TERMS_PER_STEP * 2 * unit
    sums *= _SAFETY_FACTOR
    if gemm.dtype == "tf32":
        sums += _TF32_TRUNCATION
    result = roundoff(gemm.d.element)
    if settings.reduced_precision and gemm.d.element in (FP16, BF16):
        result *= _SPLIT_K_FACTOR
    if gemm.epilogue.startswith("gelu"):
        result += _GELU_ERROR
    return Tolerance(sums, result)


def roundoff(element: Element) -> float:
    """Return the unit roundoff of a floating-point type: half the distance from 1 to the next value."""
    if element in (FP64, FP32, FP16):
        return _ROUNDOFFS[element.name]
    return 2.0 ** -(element.format.mantissa_bits + 1) if element.format else 0.0
