from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from cudakit.core.bench.stats import is_bimodal

Draw = Callable[[np.random.Generator], npt.NDArray[np.float64]]

ONE_GROUP: dict[str, Draw] = {
    "normal": lambda random: 100 + random.standard_normal(400),
    "uniform": lambda random: random.uniform(1, 2, 400),
    "exponential": lambda random: 1 + random.exponential(1, 400),
    "outliers": lambda random: np.append(100 + random.standard_normal(390), [500.0] * 10),
    "two steps of the clock": lambda random: random.integers(0, 2, 400) + 50.0,
}


@pytest.mark.parametrize("name", ONE_GROUP)
def test_one_group_is_not_two(name: str) -> None:
    random = np.random.default_rng(0)

    assert not any(is_bimodal(ONE_GROUP[name](random)) for _ in range(50))


@pytest.mark.parametrize("share", [0.15, 0.5, 0.85])
def test_two_groups_with_a_valley_between_are_seen(share: float) -> None:
    random = np.random.default_rng(0)
    found = [
        is_bimodal(100 + random.standard_normal(400) + 10 * (random.random(400) < share))
        for _ in range(50)
    ]

    assert all(found)


def test_few_samples_have_no_groups() -> None:
    assert not is_bimodal([1.0, 1.01, 1.02, 2.0, 2.01, 2.02])


def test_groups_that_are_near_each_other_compared_with_their_distance_from_zero_are_seen() -> None:
    random = np.random.default_rng(0)
    times = 1e10 + random.standard_normal(400) + 10 * (random.random(400) < 0.5)

    assert is_bimodal(times)
