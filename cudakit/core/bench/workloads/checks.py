"""Checks of the values that kernels and copies wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.core.bench.workload import Verification
from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.api.elements import FP32
from cudakit.kernels.bandwidth import SOUGHT
from cudakit.kernels.compare import Compare

# The byte that poisons outputs: as fp32 it is NaN.
POISON = 0xFF
_POISONED_WORD = 0xFFFFFFFF
_WORD_BYTES = 4
_SAMPLED = 4096
# A fused result is rounded once, by at most half a unit in the last place.
_ROUNDING = 2.0**-24


class Finding(NamedTuple):
    """The verification of one buffer set."""

    error: float
    tolerance: float
    against: str
    detail: str = ""

    @property
    def passed(self) -> bool:
        return not self.detail and self.error <= self.tolerance


# Checks a target, given its sources, their size and the seed: reads on a stream, and synchronizes.
Check: TypeAlias = Callable[[Compare, Ptr, Sequence[Ptr], int, int, Stream], Finding]


def worst(findings: Iterable[Finding]) -> Verification:
    """Return the finding that failed, or that has the largest error."""
    finding = max(findings, key=lambda found: (not found.passed, found.error))
    return Verification(finding.passed, *finding)


def check_copy(
    compare: Compare,
    to: Ptr,
    sources: Sequence[Ptr],
    size_bytes: int,
    seed: int,  # noqa: ARG001
    stream: Stream,
) -> Finding:
    """Compare every word with its source."""
    wrong = compare.count_different(to, sources[0], size_bytes, stream)
    return _of_words(wrong, size_bytes // _WORD_BYTES, "the source, every word")


def check_read(
    compare: Compare,
    to: Ptr,
    sources: Sequence[Ptr],  # noqa: ARG001
    size_bytes: int,  # noqa: ARG001
    seed: int,  # noqa: ARG001
    stream: Stream,
) -> Finding:
    """Check that the reader found the value in the last place."""
    missed = compare.count_unlike(to, SOUGHT, _WORD_BYTES, stream)
    detail = "what the last place holds was not read" if missed else ""
    return Finding(float(missed), 0.0, "what the last place holds", detail)


def check_write(word: int) -> Check:
    """Return a check that compares every word with a constant."""

    def check(
        compare: Compare,
        to: Ptr,
        sources: Sequence[Ptr],  # noqa: ARG001
        size_bytes: int,
        seed: int,  # noqa: ARG001
        stream: Stream,
    ) -> Finding:
        wrong = compare.count_unlike(to, word, size_bytes, stream)
        return _of_words(wrong, size_bytes // _WORD_BYTES, "the word written, every word")

    return check


def check_linear(factors: Sequence[float]) -> Check:
    """Return a check of a sample against a linear combination in fp64, and of all for unwritten values."""

    def check(
        compare: Compare,
        to: Ptr,
        sources: Sequence[Ptr],
        size_bytes: int,
        seed: int,
        stream: Stream,
    ) -> Finding:
        words = size_bytes // _WORD_BYTES
        places = _places(words, seed)
        values = compare.sample(to, FP32, places, stream)
        read = (compare.sample(source, FP32, places, stream) for source in sources)
        expected = sum(f * x for f, x in zip(factors, read, strict=True))
        unwritten = words - compare.count_unlike(to, _POISONED_WORD, size_bytes, stream)
        detail = f"{unwritten} of {words} values were never written" if unwritten else ""
        error = float(np.linalg.norm(values - expected) / np.linalg.norm(expected))
        return Finding(error, _ROUNDING, f"fp64, {len(places)} values", detail)

    return check


def _of_words(wrong: int, words: int, against: str) -> Finding:
    detail = f"{wrong} of {words} words are wrong" if wrong else ""
    return Finding(wrong / words, 0.0, against, detail)


def _places(count: int, seed: int) -> npt.NDArray[np.int64]:
    """Choose random places, including the first and the last."""
    inner = np.random.default_rng(seed).integers(0, count, min(_SAMPLED, count) - 2)
    return np.unique(np.concatenate((np.array([0, count - 1]), inner)))
