"""What could be faster: what the library recommends, and all else that it says it can run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from cudakit.errors import Unsupported
from cudakit.gpu.api.gemm import Algorithm, Blas, Gemm, GemmSettings, never

# As many as libraries that tune ask for at most; beyond them the order says little.
_RECOMMENDED = 32


@dataclass(frozen=True, slots=True)
class Candidates:
    """Algorithms, in the order in which they are to be tried; the first is the library's own choice."""

    algorithms: tuple[Algorithm, ...]
    complete: bool  # whether the library was asked for all that it has


def candidates(
    blas: Blas,
    gemm: Gemm,
    settings: GemmSettings,
    *,
    seed: int,
    is_over: Callable[[], bool] = never,
) -> Candidates:
    """List what the library recommends, in its order, then the others, shuffled, each once.

    ``is_over`` ends the listing, which can take long. Raises Unsupported where there is nothing.
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
    """Index algorithms by their numbers, the first of those that have the same."""
    found: dict[Algorithm, Algorithm] = {}
    for algorithm in algorithms:
        # What it needs follows from the rest.
        found.setdefault(replace(algorithm, workspace_bytes=0), algorithm)
    return found
