""""""

from __future__ import annotations

import random
from collections import Counter
from math import comb
from statistics import median

import pytest
from bench.tuning.synthetic import Noise, Synthetic, tailed_noise, uniform_noise
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.tuning.search import (
    FALSE_POSITIVE_RATE,
    FINALISTS,
    MIN_GAIN,
    MIN_ITERATIONS,
    Limits,
    Outcome,
    is_median_above,
    median_or_inf,
    ratio_interval,
    search,
    sign_test,
)
from cudakit.errors import InputError

LONG = Limits(time_s=1e9)
MS = 1e-3


def run(trials: Synthetic, limits: Limits = LONG, seed: int = 0) -> Outcome:
    return search(trials, len(trials.times_s), limits, seed=seed, now_s=trials.now)


@given(
    times=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=60),
    seed=st.integers(0, 1000),
    drift=st.floats(0, 0.2),
)
def test_fastest_wins_without_noise_if_gain_suffices(
    times: list[float], seed: int, drift: float
) -> None:
    outcome = run(Synthetic(times, drift=drift), seed=seed)

    fastest_s = min(times)
    if fastest_s < times[0] * (1 - MIN_GAIN - 1e-9):
        assert times[outcome.winner_index] == fastest_s
        assert outcome.is_significant
        assert outcome.gain == pytest.approx(1 - fastest_s / times[0])
        assert outcome.gain_interval == pytest.approx((outcome.gain, outcome.gain))
    elif fastest_s > times[0] * (1 - MIN_GAIN + 1e-9):
        assert (outcome.winner_index, outcome.is_significant) == (0, False)


@pytest.mark.parametrize(
    "noise", [uniform_noise(0.01), uniform_noise(0.3), tailed_noise(0.005), tailed_noise(0.1)]
)
def test_default_stays_if_all_are_equal(noise: Noise) -> None:
    searches = 300
    false_positives = sum(
        run(Synthetic([MS] * 40, noise, seed, drift=0.05), seed=seed).is_significant
        for seed in range(searches)
    )

    # With the promised error rate, more false positives have a probability below 1 in 10000.
    assert false_positives <= quantile_of_binomial(searches, FALSE_POSITIVE_RATE, 1e-4)


def test_gain_below_minimum_does_not_win() -> None:
    outcome = run(Synthetic([MS, 0.993 * MS], tailed_noise(0.001)))

    assert (outcome.winner_index, outcome.is_significant) == (0, False)
    assert outcome.gain is None or outcome.gain < MIN_GAIN


@pytest.mark.parametrize("noise", [uniform_noise(0.02), tailed_noise(0.01)])
def test_search_finds_gain_among_many_and_ci_covers_it(noise: Noise) -> None:
    winners: Counter[int] = Counter()
    covered = 0
    for seed in range(40):
        times = [MS * (1 + 0.01 * (number % 17)) for number in range(200)]
        times[157] = 0.93 * MS
        outcome = run(Synthetic(times, noise, seed, drift=0.1), seed=seed)
        winners[outcome.winner_index] += 1
        assert outcome.gain_interval is not None
        covered += outcome.gain_interval[0] <= 0.07 <= outcome.gain_interval[1]

    assert winners[157] >= 38
    assert covered >= 38


def test_candidate_that_is_slower_with_some_buffers_does_not_win() -> None:
    trials = Synthetic([MS, 0.97 * MS], uniform_noise(0.001), buffer_factors={1: (1.0, 1.0, 1.05)})
    outcome = run(trials)

    assert trials.reallocations == 2
    assert (outcome.winner_index, outcome.is_significant) == (0, False)


def test_wrong_finalist_is_replaced_by_next() -> None:
    times = [MS, 0.8 * MS, 0.85 * MS, 0.9 * MS, 0.95 * MS]
    outcome = run(Synthetic(times, uniform_noise(0.001), wrong=frozenset({1})))

    assert (outcome.winner_index, outcome.wrong_finalists) == (2, (1,))


def test_winner_with_wrong_values_after_final_is_rejected() -> None:
    times = [MS, 0.8 * MS, 0.9 * MS]
    outcome = run(Synthetic(times, uniform_noise(0.001), wrong_later=frozenset({1})))
    without_alternative = run(
        Synthetic(times[:2], uniform_noise(0.001), wrong_later=frozenset({1}))
    )

    assert (outcome.winner_index, outcome.wrong_finalists) == (2, (1,))
    assert (
        without_alternative.winner_index,
        without_alternative.is_significant,
        without_alternative.gain,
    ) == (0, False, None)


def test_winner_is_verified_before_and_after_final() -> None:
    trials = Synthetic([MS, 0.8 * MS, 0.9 * MS, 0.95 * MS, 0.97 * MS], uniform_noise(0.001))

    assert run(trials).winner_index == 1
    assert trials.verified == [1, 2, 3, 1]


def test_unsupported_candidate_is_skipped() -> None:
    trials = Synthetic([MS, 0.5 * MS, 0.9 * MS], unsupported=frozenset({1}))
    outcome = run(trials)

    assert (outcome.winner_index, outcome.tried_count) == (2, 2)


@given(
    count=st.integers(1, 80),
    iterations=st.integers(20, 60),
    time_s=st.floats(0.01, 1.0),
    noise=st.floats(0, 0.5),
    seed=st.integers(0, 100),
)
def test_limits_hold_within_a_round(
    count: int, iterations: int, time_s: float, noise: float, seed: int
) -> None:
    trials = Synthetic([MS] * (count + 1), uniform_noise(noise), seed)
    outcome = run(trials, Limits(time_s, iterations), seed)

    max_round_size = max((len(order) for order in trials.rounds), default=0)
    assert trials.now_s <= time_s + max_round_size * MS * (1 + noise)
    assert all(trials.samples(number) <= iterations for number in range(1, count + 1))
    assert outcome.tried_count <= count + 1


def test_search_at_time_limit_decides_by_final_so_far() -> None:
    times = [MS, 0.8 * MS, *[MS] * 500]
    trials = Synthetic(times, uniform_noise(0.001))
    outcome = run(trials, Limits(time_s=0.3))

    assert outcome.stop_reason == "time"
    assert outcome.tried_count < len(times)
    assert (outcome.winner_index, outcome.is_significant) == (1, True)


@pytest.mark.parametrize(("calls", "winner"), [(1, 0), (3, 0), (8, 0), (45, 1)])
def test_interrupted_search_returns_outcome_so_far(calls: int, winner: int) -> None:
    trials = Synthetic([MS, 0.8 * MS, 0.9 * MS, 0.95 * MS], uniform_noise(0.001))
    calls_left = calls

    def interrupt_later(stage: str, fraction: float) -> None:
        nonlocal calls_left
        assert stage
        assert 0 <= fraction <= 1
        calls_left -= 1
        if not calls_left:
            raise KeyboardInterrupt

    outcome = search(trials, 4, LONG, seed=0, now_s=trials.now, progress=interrupt_later)

    assert (outcome.stop_reason, outcome.winner_index) == ("interrupted", winner)


def test_every_round_has_default_in_random_order() -> None:
    trials = Synthetic([MS] * 9, uniform_noise(0.2))
    run(trials)

    assert all(0 in order for order in trials.rounds)
    assert len({order.index(0) for order in trials.rounds}) > 3


def test_seed_reproduces_search() -> None:
    first, repeated, other_seed = (Synthetic([MS] * 30, uniform_noise(0.2)) for _ in range(3))
    run(first, seed=1)
    run(repeated, seed=1)
    run(other_seed, seed=2)

    assert first.rounds == repeated.rounds
    assert first.rounds != other_seed.rounds


def test_invalid_reading_is_left_out_of_round() -> None:
    outcome = run(Synthetic([MS, 0.9 * MS], uniform_noise(0.01), invalid=0.3))
    always_invalid = run(Synthetic([MS, 0.9 * MS], uniform_noise(0.01), invalid=1.0))

    assert outcome.winner_index == 1
    assert (always_invalid.winner_index, always_invalid.gain) == (0, None)


def test_released_candidate_frees_its_resources() -> None:
    trials = Synthetic([MS] * 200, uniform_noise(0.3))
    outcome = run(trials)
    max_round_size = max(len(order) for order in trials.rounds)

    assert outcome.tried_count == 200
    assert max_round_size <= 17
    assert len(trials.open) <= 2 * FINALISTS


def test_search_without_candidates_keeps_default() -> None:
    trials = Synthetic([MS])

    assert run(trials) == Outcome(0, None, None, False, 1, (), 0, "complete")
    assert trials.rounds == []


def quantile_of_binomial(n: int, probability: float, tail: float) -> int:
    """Return the number of events among n that is exceeded with a probability of at most ``tail``."""
    probabilities = [
        comb(n, k) * probability**k * (1 - probability) ** (n - k) for k in range(n + 1)
    ]
    return next(k for k in range(n + 1) if sum(probabilities[k + 1 :]) < tail)


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
