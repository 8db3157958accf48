"""Candidates of a search: the algorithms that the library recommends, then all others that it offers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from cudakit.errors import Unsupported
from cudakit.gpu.api.gemm import Algorithm, Blas, Gemm, GemmSettings, never_over

# Number of algorithms to request from the library's heuristics, which rank only the first ones reliably.
_RECOMMENDED_COUNT = 32


@dataclass(frozen=True, slots=True)
class Candidates:
    """Algorithms in the order of trials; the first is the library's default."""

    algorithms: tuple[Algorithm, ...]
    complete: bool  # Whether all algorithms of the library are listed.


def candidates(
    blas: Blas,
    gemm: Gemm,
    settings: GemmSettings,
    *,
    seed: int,
    is_over: Callable[[], bool] = never_over,
) -> Candidates:
    """Return the recommended algorithms in order, then the others in random order, without duplicates.

    Listing can take seconds, and ends early when ``is_over()`` is true. Raises Unsupported if the library has
    no algorithm.
    """
    recommended_algorithms = blas.heuristics(gemm, settings, _RECOMMENDED_COUNT)
    if not recommended_algorithms:
        raise Unsupported(
            f"{blas.library} has no algorithm for this GEMM in {gemm.dtype}",
            hint="try another --layout, --padding or --workspace",
        )
    recommended_by_parameters = _distinct_by_parameters(recommended_algorithms)
    offered_algorithms = _distinct_by_parameters(blas.algorithms(gemm, settings, is_over))
    other_algorithms = [
        algorithm
        for parameters, algorithm in offered_algorithms.items()
        if parameters not in recommended_by_parameters
    ]
    random.Random(seed).shuffle(other_algorithms)  # noqa: S311 not for cryptography
    return Candidates((*recommended_by_parameters.values(), *other_algorithms), not is_over())


def _distinct_by_parameters(algorithms: Iterable[Algorithm]) -> dict[Algorithm, Algorithm]:
    """Return the first algorithm with each combination of parameters, as a dict by combination."""
    distinct_algorithms: dict[Algorithm, Algorithm] = {}
    for algorithm in algorithms:
        # The workspace is not compared, because it follows from the other parameters.
        distinct_algorithms.setdefault(replace(algorithm, workspace_bytes=0), algorithm)
    return distinct_algorithms
