from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from cudakit.bench.tuning.candidates import Candidates, candidates
from cudakit.errors import Unsupported
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmPlan, GemmSettings, Library, never_over

GEMM = Gemm(dtype="bf16", m=64, n=64, k=64)


@dataclass
class ListingBlas:
    """A library that lists algorithms and computes nothing."""

    recommended: Sequence[Algorithm]
    offered: Sequence[Algorithm]
    library: Library = "cublaslt"
    version: str = "13.1.0"
    listed: int = 0

    def heuristics(self, gemm: Gemm, settings: GemmSettings, count: int) -> Sequence[Algorithm]:  # noqa: ARG002
        return self.recommended[:count]

    def algorithms(
        self,
        gemm: Gemm,  # noqa: ARG002
        settings: GemmSettings,  # noqa: ARG002
        is_over: Callable[[], bool] = never_over,
    ) -> Iterator[Algorithm]:
        for algorithm in self.offered:
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


def candidates_of(blas: ListingBlas, seed: int = 0) -> Candidates:
    return candidates(blas, GEMM, GemmSettings(), seed=seed)


def test_recommended_candidates_come_first_in_order() -> None:
    recommended = ALL[50:40:-1]
    listed = candidates_of(ListingBlas(recommended, ALL)).algorithms

    assert listed[: len(recommended)] == recommended
    assert sorted(listed, key=lambda algorithm: algorithm.id) == list(ALL)


def test_seed_determines_order_of_candidates() -> None:
    first, repeated, other_seed = (
        candidates_of(ListingBlas(ALL[:1], ALL), seed).algorithms for seed in (1, 1, 2)
    )

    assert first == repeated
    assert first != other_seed
    assert first != ALL


def test_duplicate_algorithm_is_one_candidate() -> None:
    duplicates = [Algorithm(id=7, workspace_bytes=size) for size in (0, 1024)]
    other_algorithm = Algorithm(id=7, tile=20)
    listed = candidates_of(
        ListingBlas(
            [duplicates[0], other_algorithm, duplicates[0]],
            [*duplicates, other_algorithm, other_algorithm],
        )
    ).algorithms

    assert listed == (duplicates[0], other_algorithm)


def test_listing_ends_at_time_limit() -> None:
    blas = ListingBlas(ALL[:2], ALL)
    shortened = candidates(blas, GEMM, GemmSettings(), seed=0, is_over=lambda: blas.listed >= 10)

    assert (shortened.complete, blas.listed) == (False, 10)
    assert len(shortened.algorithms) == 10
    assert candidates_of(blas).complete


def test_gemm_without_algorithm_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="no algorithm"):
        candidates_of(ListingBlas([], ALL))
