from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from cudakit.core.bench.tuning.candidates import Candidates, candidates
from cudakit.errors import Unsupported
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmPlan, GemmSettings, Library, never

GEMM = Gemm(dtype="bf16", m=64, n=64, k=64)


@dataclass
class Listing:
    """A library that lists algorithms and computes nothing."""

    recommended: Sequence[Algorithm]
    everything: Sequence[Algorithm]
    library: Library = "cublaslt"
    version: str = "13.1.0"
    listed: int = 0

    def heuristics(self, gemm: Gemm, settings: GemmSettings, most: int) -> Sequence[Algorithm]:  # noqa: ARG002
        return self.recommended[:most]

    def algorithms(
        self,
        gemm: Gemm,  # noqa: ARG002
        settings: GemmSettings,  # noqa: ARG002
        is_over: Callable[[], bool] = never,
    ) -> Iterator[Algorithm]:
        for algorithm in self.everything:
            if is_over():
                return
            self.listed += 1
            yield algorithm

    def prepare(
        self, gemm: Gemm, settings: GemmSettings, algorithm: Algorithm | None = None
    ) -> GemmPlan:
        raise AssertionError((gemm, settings, algorithm))

    def close(self) -> None: ...


ALL = tuple(Algorithm(id=number) for number in range(200))


def found(blas: Listing, seed: int = 0) -> Candidates:
    return candidates(blas, GEMM, GemmSettings(), seed=seed)


def test_recommended_candidates_come_first_in_order() -> None:
    recommended = ALL[50:40:-1]
    listed = found(Listing(recommended, ALL)).algorithms

    assert listed[: len(recommended)] == recommended
    assert sorted(listed, key=lambda each: each.id) == list(ALL)


def test_seed_determines_order_of_candidates() -> None:
    first, again, other = (found(Listing(ALL[:1], ALL), seed).algorithms for seed in (1, 1, 2))

    assert first == again
    assert first != other
    assert first != ALL


def test_duplicate_algorithm_is_one_candidate() -> None:
    same = [Algorithm(id=7, workspace_bytes=size) for size in (0, 1024)]
    other = Algorithm(id=7, tile=20)
    listed = found(Listing([same[0], other, same[0]], [*same, other, other])).algorithms

    assert listed == (same[0], other)


def test_listing_ends_when_the_time_is_over() -> None:
    blas = Listing(ALL[:2], ALL)
    some = candidates(blas, GEMM, GemmSettings(), seed=0, is_over=lambda: blas.listed >= 10)

    assert (some.complete, blas.listed) == (False, 10)
    assert len(some.algorithms) == 10
    assert found(blas).complete


def test_gemm_without_algorithm_cannot_be_tuned() -> None:
    with pytest.raises(Unsupported, match="no algorithm"):
        found(Listing([], ALL))
