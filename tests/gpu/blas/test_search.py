"""The configurations that the search tries and skips."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings
from cudakit.gpu.blas.search import (
    IN_COMPUTE_TYPE,
    IN_OUTPUT_TYPE,
    SCHEMES,
    Choices,
    allowed_reductions,
    configurations,
    round_robin,
)

EVERYTHING = Choices(
    id=66,
    tiles=(15, 20),
    stages=(1, 2),
    customs=range(2),
    swizzles=(0, 1),
    splits=(2, 4),
    reductions=(IN_COMPUTE_TYPE,),
    clusters=(0, 2, 3),
    inners=(0, 1),
)


def test_accepted_configurations_are_found_once() -> None:
    def accepts(candidate: Algorithm) -> Algorithm | None:
        is_supported = (
            candidate.cluster in (0, 3)
            and candidate.inner == 0
            and candidate.tile != candidate.stages + 14
        )
        return candidate if is_supported and candidate.custom + candidate.swizzle < 2 else None

    found_configurations = list(filter(None, configurations(EVERYTHING, accepts)))
    splits = [(1, 0), (2, IN_COMPUTE_TYPE), (4, IN_COMPUTE_TYPE)]
    expected = (
        Algorithm(
            id=66,
            tile=tile,
            stages=stages,
            custom=custom,
            swizzle=swizzle,
            cluster=cluster,
            split_k=split,
            reduction=reduction,
        )
        for tile, stages, custom, swizzle, cluster, (split, reduction) in product(
            (15, 20), (1, 2), (0, 1), (0, 1), (0, 3), splits
        )
    )
    assert len(found_configurations) == len(set(found_configurations))
    assert set(found_configurations) == set(filter(accepts, expected))


def test_parameter_without_effect_is_tried_once() -> None:
    found_configurations = list(
        filter(None, configurations(EVERYTHING, lambda candidate: candidate))
    )
    assert {configuration.cluster for configuration in found_configurations} == {0}
    assert {configuration.inner for configuration in found_configurations} == {0}


def test_nothing_is_found_where_everything_is_refused() -> None:
    assert list(filter(None, configurations(EVERYTHING, lambda _: None))) == []


def test_split_k_needs_reduction_scheme() -> None:
    choices = Choices(id=1, splits=(2, 3))
    assert list(filter(None, configurations(choices, lambda candidate: candidate))) == [
        Algorithm(id=1)
    ]


def test_search_tries_only_offered_values() -> None:
    candidate: list[Algorithm] = []

    def accepts(algorithm: Algorithm) -> Algorithm | None:
        candidate.append(algorithm)
        return algorithm if algorithm.cluster == 2 else None

    list(filter(None, configurations(EVERYTHING, accepts)))
    assert {configuration.tile for configuration in candidate} == {15, 20}
    assert {configuration.split_k for configuration in candidate} == {1, 2, 4}
    assert all(
        bool(configuration.reduction) == (configuration.split_k > 1) for configuration in candidate
    )


def test_round_robin_skips_empty_iterator_and_can_be_stopped() -> None:
    calls = iter(range(1000))
    failing = iter([None] * 10_000)
    found_configurations = round_robin(
        [failing, iter([Algorithm(id=1)] * 3)], lambda: next(calls) == 999
    )
    assert list(found_configurations) == [Algorithm(id=1)] * 3
    assert len(list(failing)) > 9_000


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4))
def test_round_robin_yields_first_of_each_before_second(
    numbers: list[list[int]],
) -> None:
    lists = [
        [Algorithm(id=index, tile=number) for number in values]
        for index, values in enumerate(numbers)
    ]
    found_configurations = list(round_robin(map(iter, lists)))
    assert sorted(found_configurations, key=repr) == sorted(sum(lists, []), key=repr)  # noqa: RUF017
    first_values = [values[0] for values in lists if values]
    assert found_configurations[: len(first_values)] == first_values


@pytest.mark.parametrize(
    ("dtype", "settings", "allowed"),
    [
        ("bf16", GemmSettings(), SCHEMES),
        ("bf16", GemmSettings(deterministic=True), (IN_COMPUTE_TYPE, IN_OUTPUT_TYPE)),
        ("bf16", GemmSettings(reduced_precision=False), (IN_COMPUTE_TYPE,)),
        ("fp32", GemmSettings(reduced_precision=False), SCHEMES),
        ("fp64", GemmSettings(deterministic=True, reduced_precision=False), (2, 4)),
    ],
)
def test_settings_select_reduction_schemes(
    dtype: str, settings: GemmSettings, allowed: tuple[int, ...]
) -> None:
    assert allowed_reductions(Gemm(dtype=dtype, m=8, n=8, k=8), settings) == allowed
