"""Checks of the values that kernels and copies wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.arrays.bandwidth import SENTINEL
from cudakit.arrays.compare import Compare
from cudakit.bench.case import Verification, verification
from cudakit.gpu.api import LEGACY, Ptr
from cudakit.gpu.api.arrays import FP32

# Outputs are filled with this byte before a run; as fp32 it is NaN.
POISON = 0xFF
_POISONED_WORD = 0xFFFFFFFF
_WORD_BYTES = 4
_MAX_SAMPLED_VALUES = 4096  # Maximum number of values to check with fp64.
# Tolerance: a fused multiply-add is rounded once, by at most half a unit in the last place of fp32.
_ROUNDING = 2.0**-24


@dataclass(frozen=True, slots=True)
class Buffers:
    """One buffer set: the buffer that is written, and the buffers that are read."""

    target: Ptr
    sources: tuple[Ptr, ...]


# A function that checks the target of a buffer set, given the size of the buffers and the seed. The function
# synchronizes the device.
Check: TypeAlias = Callable[[Compare, Buffers, int, int], Verification]


def check_copy(compare: Compare, buffers: Buffers, size_bytes: int, seed: int) -> Verification:  # noqa: ARG001
    """Check that every word of the target equals that of the source."""
    wrong_count = compare.count_different(buffers.target, buffers.sources[0], size_bytes, LEGACY)
    return _compare_words(wrong_count, size_bytes // _WORD_BYTES, "all words of the source")


def check_read(compare: Compare, buffers: Buffers, size_bytes: int, seed: int) -> Verification:  # noqa: ARG001
    """Check that the kernel found the sentinel at the end of the buffer."""
    missed_word_count = compare.count_not_equal(buffers.target, SENTINEL, _WORD_BYTES, LEGACY)
    detail = "the end of the buffer was not read" if missed_word_count else ""
    return verification(float(missed_word_count), 0.0, "a sentinel at the end", detail)


def check_write(expected_word: int) -> Check:
    """Return a check that compares every word with a constant."""

    def check(compare: Compare, buffers: Buffers, size_bytes: int, seed: int) -> Verification:  # noqa: ARG001
        wrong_count = compare.count_not_equal(buffers.target, expected_word, size_bytes, LEGACY)
        return _compare_words(wrong_count, size_bytes // _WORD_BYTES, "the word written, all words")

    return check


def check_linear(factors: Sequence[float]) -> Check:
    """Return a check of a linear combination: some values are compared with fp64, and none may be POISON."""

    def check(compare: Compare, buffers: Buffers, size_bytes: int, seed: int) -> Verification:
        word_count = size_bytes // _WORD_BYTES
        indices = _sample_indices(word_count, seed)
        computed_values = compare.sample(buffers.target, FP32, indices, LEGACY)
        source_values = (
            compare.sample(source, FP32, indices, LEGACY) for source in buffers.sources
        )
        expected_values = sum(
            factor * sampled_values
            for factor, sampled_values in zip(factors, source_values, strict=True)
        )
        unwritten_count = word_count - compare.count_not_equal(
            buffers.target, _POISONED_WORD, size_bytes, LEGACY
        )
        detail = (
            f"{unwritten_count} of {word_count} values were never written"
            if unwritten_count
            else ""
        )
        error = float(
            np.linalg.norm(computed_values - expected_values) / np.linalg.norm(expected_values)
        )
        return verification(
            error, _ROUNDING, f"an fp64 computation of {len(indices)} values", detail
        )

    return check


def _compare_words(wrong_count: int, word_count: int, reference: str) -> Verification:
    detail = f"{wrong_count} of {word_count} words are wrong" if wrong_count else ""
    return verification(wrong_count / word_count, 0.0, reference, detail)


def _sample_indices(word_count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return sorted random indices of words, among them the first and the last of ``word_count`` words."""
    random_indices = np.random.default_rng(seed).integers(
        0, word_count, min(_MAX_SAMPLED_VALUES, word_count) - 2
    )
    return np.unique(np.concatenate((np.array([0, word_count - 1]), random_indices)))
