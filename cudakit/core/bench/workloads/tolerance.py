"""How far rounding alone can lead a product away from the exact one.

Errors are relative Frobenius norms over the elements that are looked at. Of sums of k terms of mean zero,
each addition rounded to nearest with unit roundoff u, the error grows as the root of k times u (N. J. Higham
and T. Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019, and
"Sharper probabilistic backward error analysis for basic linear algebra kernels with random data", 42(5),
2020); of terms that are all alike, as k times u (N. J. Higham, "Accuracy and Stability of Numerical
Algorithms", 2nd ed., section 4.2). Tensor cores cut off sums instead of rounding them, once in each step of
some terms, which adds up: k over the terms of a step, times twice u (M. Fasi, N. J. Higham, M. Mikaitis,
S. Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7, 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from cudakit.gpu.api.elements import BF16, FP16, FP32, FP64, Element
from cudakit.gpu.api.gemm import Gemm, GemmSettings

# What the bounds leave out: constants near one, and the luck of the sample.
_SAFETY = 2.0
# What a tensor core adds up in one step, of types with the fewest terms in one (PTX ISA, "mma": k of tf32).
_STEP = 8
# Of fp8 about 14 bits of a sum are kept (DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.5.2),
# for steps of 128 terms before they are added in fp32, or for all of them where that is switched off.
_FP8_ROUNDOFF = 2.0**-14
_FP8_STEPS = 128
# tf32 keeps 10 bits of the mantissa; what is cut off of both factors is at most this (A100 white paper).
_TF32_FACTORS = 2.0 * 2.0**-10
# Parts of a sum that are added in the type of the output are each rounded to it; cuBLASLt takes 16 and fewer.
_PARTS = 4.0
# Between the two forms of gelu, the one by erf and the one by tanh, and of a tanh of reduced precision.
_GELU = 2.0**-9
_ROUNDOFFS = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11}
_WITHOUT_TENSOR_CORES = ("fp64", "fp32")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding explains."""

    sums: float  # relative to the norm of the sums
    result: float  # relative to the norm of what is made of them

    def of(self, sums_norm: float, result_norm: float) -> float:
        """Return it relative to the result, whose norm is not 0."""
        return self.result + self.sums * sums_norm / result_norm


def tolerance_of(gemm: Gemm, settings: GemmSettings, *, random: bool) -> Tolerance:
    """Derive the tolerance of a product; ``random`` says that its data has mean zero. 0 for whole numbers."""
    if gemm.accumulate == "int32":
        return Tolerance(0.0, 0.0)
    factors = _TF32_FACTORS if gemm.dtype == "tf32" else 0.0
    output = roundoff(gemm.d.element)
    if settings.reduced_precision and gemm.d.element in (FP16, BF16):
        output *= _PARTS
    if gemm.epilogue.startswith("gelu"):
        output += _GELU
    return Tolerance(_SAFETY * _growth(gemm, settings, random=random) + factors, output)


def roundoff(element: Element) -> float:
    """Return the unit roundoff of a floating-point type: half of the distance from 1 to the next value."""
    if element in (FP64, FP32, FP16):
        return _ROUNDOFFS[element.name]
    return 2.0 ** -(element.format.mantissa_bits + 1) if element.format else 0.0


def _growth(gemm: Gemm, settings: GemmSettings, *, random: bool) -> float:
    """Return how the error of a sum grows with its terms."""
    terms, u = gemm.k, _ROUNDOFFS[gemm.accumulate]
    if gemm.dtype.startswith("fp8"):
        cut = min(terms, _FP8_STEPS) if not settings.fast_accumulate else terms
        return _of_terms(cut, 2 * _FP8_ROUNDOFF, random=random) + _of_terms(terms, u, random=random)
    cut_off = 0.0 if gemm.dtype in _WITHOUT_TENSOR_CORES or gemm.accumulate == "fp16" else 2 * u
    return _of_terms(terms, u, random=random) + terms / _STEP * cut_off


def _of_terms(terms: int, u: float, *, random: bool) -> float:
    return (sqrt(terms) if random else terms) * u
