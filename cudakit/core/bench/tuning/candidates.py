"""Candidates: the algorithms that the library recommends, and all others that it can run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from cudakit.errors import Unsupported
from cudakit.gpu.api.gemm import Algorithm, Blas, Gemm, GemmSettings, never

# Beyond this number the order of the heuristics means little.
_RECOMMENDED = 32


@dataclass(frozen=True, slots=True)
class Candidates:
    """Algorithms in the order of trials; the first is the library's own choice."""

    algorithms: tuple[Algorithm, ...]
    complete: bool  # whether all algorithms of the library are listed


def candidates(
    blas: Blas,
    gemm: Gemm,
    settings: GemmSettings,
    *,
    seed: int,
    is_over: Callable[[], bool] = never,
) -> Candidates:
    """Return the recommended algorithms in order, then the others shuffled, each once.

    ``is_over`` ends the listing, which can take long. Raises Unsupported if there is no algorithm.
    """
    recommended = blas.heuristics(gemm, settings, _RECOMMENDED)
    if not recommended:
        raise Unsupported(
            f"{blas.library} recommends no algorithm for this product in {gemm.dtype}",
            hint="another layout, alignment or size of the workspace may have one",
        )
    first = _each_once(recommended)
    others = _each_once(blas.algorithms(gemm, settings, is_over))
    rest = [each for numbers, each in others.items() if numbers not in first]
    random.Random(seed).shuffle(rest)  # noqa: S311 an order, and no secret
    return Candidates((*first.values(), *rest), not is_over())


def _each_once(algorithms: Iterable[Algorithm]) -> dict[Algorithm, Algorithm]:
    """Return the first of the algorithms with equal parameters."""
    found: dict[Algorithm, Algorithm] = {}
    for algorithm in algorithms:
        # The workspace follows from the other parameters.
        found.setdefault(replace(algorithm, workspace_bytes=0), algorithm)
    return found
