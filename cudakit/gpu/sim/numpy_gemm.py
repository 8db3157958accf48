"""GEMM in numpy, with the rounding of each data type.

Sums are computed in fp64, rounded once to the accumulator type, and after the epilogue once to the output
type. A real device rounds more often and in an unspecified order, so its results differ in the last bits.
Sums of int8 are exact and wrap around in int32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.gpu.api.elements import (
    BF16,
    ELEMENTS,
    FP16,
    FP32,
    FP64,
    INT32,
    Bits,
    Element,
    Floats,
    decode,
    encode,
)
from cudakit.gpu.api.gemm import Gemm, Matrix

_FP32_MANTISSA_BITS = 23
# The number of bits of a TF32 mantissa (A100 white paper, "TensorFloat-32").
_TF32_MANTISSA_BITS = 10
_BF16_MANTISSA_BITS = 7
# The NaN of both fp8 formats ("FP8 Formats for Deep Learning", arXiv 2209.05433, table 1).
_FP8_NAN = 0x7F
# Limit of the host memory for cached results. The last result is kept even if it is larger.
_CACHE_BYTES = 256 << 20


def multiply(gemm: Gemm, a: Bits, b: Bits, bias: Bits | None = None) -> Bits:
    """Return the bits of D, given those of A and B.

    Each row of an array is one column of a matrix, without padding; the matrices of a batch follow one
    another. ``bias`` has m elements.
    """
    with np.errstate(all="ignore"):  # overflow and NaN are results, as on a device
        sums = _multiply_transposed(
            _decode_factors(gemm, a, gemm.a), _decode_factors(gemm, b, gemm.b), gemm.layout
        )
        values = decode(round_to(sums, ELEMENTS[gemm.accumulate]), ELEMENTS[gemm.accumulate])
        if bias is not None:
            values = values + decode(bias, gemm.bias)
        values = _ACTIVATIONS[gemm.epilogue.partition("-")[0]](values)
        return round_to(values, gemm.d.element).reshape(-1, gemm.m)


def round_to(values: Floats, element: Element) -> Bits:
    """Round values to an element type, ties to even; return the bits.

    Overflow gives infinity, or the largest finite value in fp8; int32 wraps around.
    """
    if element is FP64:
        return values
    if element is INT32:
        return values.astype(np.int64).astype(np.int32)
    if element is FP16:
        return values.astype(np.float16).view(np.uint16)
    fp32_values = values.astype(np.float32)
    if element is FP32:
        return fp32_values
    if element is BF16:
        return (_round_mantissa(fp32_values, _BF16_MANTISSA_BITS) >> np.uint32(16)).astype(
            np.uint16
        )
    bits = encode(np.nan_to_num(fp32_values), element)
    bits[np.isnan(fp32_values)] = _FP8_NAN
    return bits


def _decode_factors(gemm: Gemm, columns: Bits, matrix: Matrix) -> Floats:
    """Decode the matrices of a batch in their stored, transposed form; round tf32 like tensor cores."""
    if gemm.dtype == "tf32":
        columns = _round_mantissa(columns, _TF32_MANTISSA_BITS).view(np.float32)
    return decode(columns, matrix.element).reshape(matrix.batch, matrix.columns, matrix.rows)


def _multiply_transposed(a: Floats, b: Floats, layout: str) -> Floats:
    """Return the transposed products op(B)ᵀ op(A)ᵀ, given A and B in their transposed form."""
    left_factor = b if layout[1] == "n" else b.swapaxes(1, 2)
    right_factor = a if layout[0] == "n" else a.swapaxes(1, 2)
    product: Floats = np.matmul(left_factor, right_factor)
    return product


def _round_mantissa(fp32_values: npt.NDArray[Any], mantissa_bits: int) -> npt.NDArray[np.uint32]:
    """Round fp32 to fewer mantissa bits, ties to even; clear the remaining bits."""
    dropped_bits = np.uint32(_FP32_MANTISSA_BITS - mantissa_bits)
    bits = fp32_values.view(np.uint32)
    is_odd = (bits >> dropped_bits) & np.uint32(1)
    below_half = (np.uint32(1) << (dropped_bits - np.uint32(1))) - np.uint32(1)
    quiet_nan = bits | np.uint32(1 << (_FP32_MANTISSA_BITS - 1))
    rounded_bits = np.where(np.isnan(fp32_values), quiet_nan, bits + below_half + is_odd)
    return (rounded_bits >> dropped_bits) << dropped_bits


class ResultCache:
    """A cache of GEMM results by operand bits: a benchmark repeats the same GEMM hundreds of times."""

    def __init__(self, capacity_bytes: int = _CACHE_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._results: dict[tuple[Gemm, bytes], Bits] = {}

    def multiply(self, gemm: Gemm, a: Bits, b: Bits, bias: Bits | None = None) -> Bits:
        """Return the cached result of ``multiply``; callers must not modify it."""
        operands = (a, b) if bias is None else (a, b, bias)
        key = (gemm, _digest(*operands))
        if key not in self._results:
            self._store(key, multiply(gemm, a, b, bias))
        return self._results[key]

    def _store(self, key: tuple[Gemm, bytes], product: Bits) -> None:
        """Store a result, and evict the oldest results above the size limit."""
        self._results[key] = product
        total_bytes = sum(result.nbytes for result in self._results.values())
        for oldest_key in [*self._results][:-1]:
            if total_bytes <= self._capacity_bytes:
                break
            total_bytes -= self._results.pop(oldest_key).nbytes


def _digest(*operands: Bits) -> bytes:
    digest = sha256()
    for operand in operands:
        digest.update(np.ascontiguousarray(operand).data)
    return digest.digest()


def _gelu(values: Floats) -> Floats:
    """Return GELU in its tanh approximation, as cuBLAS does (cuBLAS Library, "cublasLtEpilogue_t")."""
    tanh_argument = np.sqrt(2 / np.pi) * (values + 0.044715 * values**3)
    result: Floats = 0.5 * values * (1 + np.tanh(tanh_argument))
    return result


def _relu(values: Floats) -> Floats:
    return np.maximum(values, 0.0)


def _identity(values: Floats) -> Floats:
    return values


_ACTIVATIONS: Mapping[str, Callable[[Floats], Floats]] = MappingProxyType(
    {"none": _identity, "bias": _identity, "relu": _relu, "gelu": _gelu}
)
