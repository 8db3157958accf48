from __future__ import annotations

from collections import Counter
from math import comb

import pytest
from core.bench.tuning.synthetic import Noise, Synthetic, even, tailed
from hypothesis import given
from hypothesis import strategies as st

from cudakit.core.bench.tuning.search import FINALISTS, Limits, Outcome, search
from cudakit.core.bench.tuning.significance import FALSE_POSITIVE_RATE, MIN_GAIN

LONG = Limits(time_s=1e9)
MS = 1e-3


def run(trials: Synthetic, limits: Limits = LONG, seed: int = 0) -> Outcome:
    return search(trials, len(trials.times_s), limits, seed=seed, now=trials.now)


@given(
    times=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=60),
    seed=st.integers(0, 1000),
    drift=st.floats(0, 0.2),
)
def test_fastest_wins_without_noise_if_gain_suffices(
    times: list[float], seed: int, drift: float
) -> None:
    found = run(Synthetic(times, drift=drift), seed=seed)

    best = min(times)
    if best < times[0] * (1 - MIN_GAIN - 1e-9):
        assert times[found.winner] == best
        assert found.significant
        assert found.gain == pytest.approx(1 - best / times[0])
        assert found.gain_interval == pytest.approx((found.gain, found.gain))
    elif best > times[0] * (1 - MIN_GAIN + 1e-9):
        assert (found.winner, found.significant) == (0, False)


@pytest.mark.parametrize("noise", [even(0.01), even(0.3), tailed(0.005), tailed(0.1)])
def test_default_stays_if_all_are_equal(noise: Noise) -> None:
    searches = 300
    false = sum(
        run(Synthetic([MS] * 40, noise, seed, drift=0.05), seed=seed).significant
        for seed in range(searches)
    )

    # At the promised level this number has a probability below 1 in 10000.
    assert false <= most_of(searches, FALSE_POSITIVE_RATE, 1e-4)


def test_gain_below_minimum_does_not_win() -> None:
    found = run(Synthetic([MS, 0.993 * MS], tailed(0.001)))

    assert (found.winner, found.significant) == (0, False)
    assert found.gain is None or found.gain < MIN_GAIN


@pytest.mark.parametrize("noise", [even(0.02), tailed(0.01)])
def test_search_finds_gain_among_many_and_ci_covers_it(noise: Noise) -> None:
    winners: Counter[int] = Counter()
    covered = 0
    for seed in range(40):
        times = [MS * (1 + 0.01 * (number % 17)) for number in range(200)]
        times[157] = 0.93 * MS
        found = run(Synthetic(times, noise, seed, drift=0.1), seed=seed)
        winners[found.winner] += 1
        assert found.gain_interval is not None
        covered += found.gain_interval[0] <= 0.07 <= found.gain_interval[1]

    assert winners[157] >= 38
    assert covered >= 38


def test_gain_on_some_buffers_does_not_win() -> None:
    trials = Synthetic([MS, 0.97 * MS], even(0.001), places={1: (1.0, 1.0, 1.05)})
    found = run(trials)

    assert trials.renewed == 2
    assert (found.winner, found.significant) == (0, False)


def test_wrong_finalist_is_replaced_by_next() -> None:
    times = [MS, 0.8 * MS, 0.85 * MS, 0.9 * MS, 0.95 * MS]
    found = run(Synthetic(times, even(0.001), wrong=frozenset({1})))

    assert (found.winner, found.wrong) == (2, (1,))


def test_winner_with_wrong_values_after_final_is_rejected() -> None:
    times = [MS, 0.8 * MS, 0.9 * MS]
    found = run(Synthetic(times, even(0.001), wrong_later=frozenset({1})))
    alone = run(Synthetic(times[:2], even(0.001), wrong_later=frozenset({1})))

    assert (found.winner, found.wrong) == (2, (1,))
    assert (alone.winner, alone.significant, alone.gain) == (0, False, None)


def test_winner_is_verified_before_and_after_final() -> None:
    trials = Synthetic([MS, 0.8 * MS, 0.9 * MS, 0.95 * MS, 0.97 * MS], even(0.001))

    assert run(trials).winner == 1
    assert trials.verified == [1, 2, 3, 1]


def test_candidate_that_cannot_run_is_skipped() -> None:
    trials = Synthetic([MS, 0.5 * MS, 0.9 * MS], cannot=frozenset({1}))
    found = run(trials)

    assert (found.winner, found.tried) == (2, 2)


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
    trials = Synthetic([MS] * (count + 1), even(noise), seed)
    found = run(trials, Limits(time_s, iterations), seed)

    longest = max((len(order) for order in trials.rounds), default=0)
    assert trials.now_s <= time_s + longest * MS * (1 + noise)
    assert all(trials.samples(number) <= iterations for number in range(1, count + 1))
    assert found.tried <= count + 1


def test_search_at_time_limit_decides_by_final_so_far() -> None:
    times = [MS, 0.8 * MS, *[MS] * 500]
    trials = Synthetic(times, even(0.001))
    found = run(trials, Limits(time_s=0.3))

    assert found.stopped == "time"
    assert found.tried < len(times)
    assert (found.winner, found.significant) == (1, True)


@pytest.mark.parametrize(("at", "winner"), [(1, 0), (3, 0), (8, 0), (45, 1)])
def test_interrupted_search_returns_outcome_so_far(at: int, winner: int) -> None:
    trials = Synthetic([MS, 0.8 * MS, 0.9 * MS, 0.95 * MS], even(0.001))
    left = at

    def tell(stage: str, fraction: float) -> None:
        nonlocal left
        assert stage
        assert 0 <= fraction <= 1
        left -= 1
        if not left:
            raise KeyboardInterrupt

    found = search(trials, 4, LONG, seed=0, now=trials.now, progress=tell)

    assert (found.stopped, found.winner) == ("interrupted", winner)


def test_every_round_has_the_default_and_an_order_of_its_own() -> None:
    trials = Synthetic([MS] * 9, even(0.2))
    run(trials)

    assert all(0 in order for order in trials.rounds)
    assert len({order.index(0) for order in trials.rounds}) > 3


def test_seed_reproduces_search() -> None:
    first, again, other = (Synthetic([MS] * 30, even(0.2)) for _ in range(3))
    run(first, seed=1)
    run(again, seed=1)
    run(other, seed=2)

    assert first.rounds == again.rounds
    assert first.rounds != other.rounds


def test_invalid_reading_is_left_out_of_round() -> None:
    found = run(Synthetic([MS, 0.9 * MS], even(0.01), invalid=0.3))
    never = run(Synthetic([MS, 0.9 * MS], even(0.01), invalid=1.0))

    assert found.winner == 1
    assert (never.winner, never.gain) == (0, None)


def test_released_candidate_frees_its_resources() -> None:
    trials = Synthetic([MS] * 200, even(0.3))
    found = run(trials)
    widest = max(len(order) for order in trials.rounds)

    assert found.tried == 200
    assert widest <= 17
    assert len(trials.open) <= 2 * FINALISTS


def test_search_without_candidates_keeps_default() -> None:
    trials = Synthetic([MS])

    assert run(trials) == Outcome(0, None, None, False, 1, (), 0, "complete")
    assert trials.rounds == []


def most_of(n: int, probability: float, tail: float) -> int:
    """Return the number of n events that is exceeded with a small probability only."""
    chances = [comb(n, k) * probability**k * (1 - probability) ** (n - k) for k in range(n + 1)]
    return next(k for k in range(n + 1) if sum(chances[k + 1 :]) < tail)
