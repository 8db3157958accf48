from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.tuning.search import FINALISTS, MIN_ITERATIONS, Limits
from cudakit.bench.tuning.significance import (
    FALSE_POSITIVE_RATE,
    is_median_above,
    median_or_inf,
    ratio_interval,
    sign_test,
)
from cudakit.errors import InputError


@pytest.mark.parametrize(("above", "n", "expected"), [(5, 5, 1 / 32), (7, 8, 9 / 256), (0, 3, 1.0)])
def test_sign_test_probabilities(above: int, n: int, expected: float) -> None:
    assert sign_test(above, n) == pytest.approx(expected)


def test_five_slower_rounds_are_significant_and_four_are_not() -> None:
    assert is_median_above([1.01] * 5, 0.99, 0.05)
    assert not is_median_above([1.01] * 4, 0.99, 0.05)
    assert not is_median_above([1.01] * 5 + [0.9], 0.99, 0.05)


def test_statistics_without_samples() -> None:
    assert ratio_interval([], 0.01) is None
    assert not is_median_above([], 1.0, 0.05)
    assert median_or_inf([]) == float("inf")


def test_too_few_ratios_give_no_interval() -> None:
    assert ratio_interval([0.9] * 6, 0.01) is None
    assert ratio_interval([0.9] * 7, 0.01) == (0.9, 0.9)


@given(st.lists(st.floats(0.5, 2), min_size=1, max_size=200), st.sampled_from([0.05, 0.01, 0.003]))
def test_ratio_interval_contains_median_and_grows_with_confidence(
    ratios: list[float], level: float
) -> None:
    interval, wider = ratio_interval(ratios, level), ratio_interval(ratios, level / 10)

    if interval is not None:
        assert interval[0] <= median(ratios) <= interval[1]
    if wider is not None:
        assert interval is not None
        assert wider[0] <= interval[0]
        assert interval[1] <= wider[1]


def test_ratio_interval_has_nominal_error_rate() -> None:
    generator = random.Random(1)
    missed = 0
    for _ in range(2000):
        interval = ratio_interval([generator.lognormvariate(0, 0.1) for _ in range(15)], 0.05)
        assert interval is not None
        missed += interval[1] < 1

    assert missed <= 2000 * 0.05


def test_minimum_iterations_suffice_for_final() -> None:
    pairs = MIN_ITERATIONS // 2 // 3 * 3

    assert ratio_interval([0.9] * pairs, FALSE_POSITIVE_RATE / FINALISTS) is not None


@pytest.mark.parametrize("changes", [{"time_s": 0.0}, {"time_s": float("nan")}, {"iterations": 19}])
def test_invalid_limits_are_rejected(changes: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Limits(**changes)  # type: ignore[arg-type]
