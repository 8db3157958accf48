"""The search for an algorithm that is faster than the library's default; ``Trials`` measure the candidates.

A round measures some candidates and the default once each, in random order; a candidate is ranked by the
ratios of its time to that of the default in the same round. Stages:

screen    all candidates in small groups; one that is significantly not faster is dropped after a few rounds
halving   the best candidates again; the slower half is dropped each time (successive halving)
final     the best three candidates, with a fixed number of new samples; only these samples decide
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import median
from typing import Literal, Protocol, TypeAlias

from cudakit.bench.pipeline import Progress
from cudakit.bench.stats import autocorrelation_time, median_ci
from cudakit.errors import InputError

# --- Statistics of paired samples, and the final comparison that decides a search ------------------
#
# Two algorithms are measured in the same round, at the same clock. The statistics only use whether the ratio
# of their times is above 1: if both are equally fast, that has a probability of 1/2 for every distribution.

# The probability that a search finds a winner although no algorithm is faster than the default.
FALSE_POSITIVE_RATE = 0.01
# The minimum gain of a winner. The speed of an algorithm differs by this much between addresses of its
# buffers.
MIN_GAIN = 0.01


def sign_test(count_above: int, count: int) -> float:
    """Return the probability that ``count_above`` or more of ``count`` ratios are above 1 by chance."""
    return sum(comb(count, i) for i in range(count_above, count + 1)) / 2.0**count


def is_median_above(ratios: Sequence[float], threshold: float, level: float) -> bool:
    """Return whether the true median is above a threshold, with an error probability of at most ``level``."""
    return sign_test(sum(ratio > threshold for ratio in ratios), len(ratios)) <= level


def ratio_interval(ratios: Sequence[float], level: float) -> tuple[float, float] | None:
    """Return a CI of the median of ratios, or None if there are too few ratios.

    The true median is below the CI with a probability of at most ``level``, and above it likewise. Correlated
    ratios widen the CI; see ``stats.median_ci``.
    """
    if not ratios:
        return None
    correlation = autocorrelation_time(ratios)
    if 0.5 ** (len(ratios) / correlation) > level:
        return None
    return median_ci(ratios, 1 - 2 * level, correlation=correlation)


def median_or_inf(ratios: Sequence[float]) -> float:
    """Return the median of ratios, or infinity if there are none."""
    return median(ratios) if ratios else float("inf")


class FinalComparison:
    """The ratios of finalists to the default, measured after the finalists were chosen.

    Among thousands of algorithms, some are the fastest by chance. The final does not use the samples that
    selected the finalists. It makes one comparison per finalist, each with the significance level
    FALSE_POSITIVE_RATE divided by the number of finalists (Bonferroni). Each part of the final has new
    buffers.
    """

    def __init__(self, finalists: Sequence[int] = ()) -> None:
        self.finalists = tuple(finalists)
        self.round_count = 0
        self._ratios_by_part: list[dict[int, list[float]]] = []

    def begin_part(self) -> None:
        """Begin a part of the final, which is measured with new buffers."""
        self._ratios_by_part.append(defaultdict(list))

    def add(self, ratios: dict[int, float]) -> None:
        """Add the ratio of each finalist in one round."""
        self.round_count += 1
        for finalist_index, ratio in ratios.items():
            self._ratios_by_part[-1][finalist_index].append(ratio)

    def ranked_finalists(self) -> list[int]:
        return sorted(self.finalists, key=lambda number: median_or_inf(self._ratios(number)))

    def gain(self, finalist_index: int) -> float | None:
        ratios = self._ratios(finalist_index)
        return 1 - median_or_inf(ratios) if ratios else None

    def gain_interval(self, finalist_index: int) -> tuple[float, float] | None:
        interval = ratio_interval(
            self._ratios(finalist_index), FALSE_POSITIVE_RATE / len(self.finalists)
        )
        return (1 - interval[1], 1 - interval[0]) if interval else None

    def is_faster(self, finalist_index: int) -> bool:
        """Return whether a finalist is significantly faster than the default, by MIN_GAIN or more.

        A finalist that is slower in one of three parts has a third of its ratios above 1, and is therefore
        not significantly faster.
        """
        gain, interval = self.gain(finalist_index), self.gain_interval(finalist_index)
        if gain is None or interval is None:
            return False
        return interval[0] > 0 and gain >= MIN_GAIN

    def _ratios(self, finalist_index: int) -> list[float]:
        return [
            ratio for ratios in self._ratios_by_part for ratio in ratios.get(finalist_index, ())
        ]


# Minimum value of --tune-iterations. Half of the samples are for the final, whose three finalists need 9
# pairs each: the probability that all ratios are below 1 by chance is then 2 ** -9, less than
# FALSE_POSITIVE_RATE / 3.
MIN_ITERATIONS = 20

DEFAULT_CANDIDATE = 0  # Number of the candidate that is the library's default algorithm.
FINALISTS = 3

_GROUP_SIZE = 8  # Candidates per round while screening; few, so that a round is short.
_POOL_SIZE = 16  # Candidates that remain after screening.
_SCREEN_ROUNDS = 6
_HALVING_ROUNDS = 5
# Number of parts of the final. Each part has new buffers, because their addresses affect which algorithm is
# faster.
_PART_COUNT = 3
_FINAL_ROUNDS = 16  # Number of rounds in each part of the final.
# Shares of the time limit at which screening and halving end.
_SCREEN_TIME_SHARE, _HALVING_TIME_SHARE = 0.55, 0.7
# Significance level of dropping a candidate early: slower in 5 of 5 rounds, or in 7 of 8.
_DROP_LEVEL = 0.05
# A candidate is dropped if its time divided by the default's is at least this ratio: in its only round, or in
# each of several rounds.
_SLOW_RATIO_IN_ONE, _SLOW_RATIO_IN_ALL = 1.5, 1.1

StopReason: TypeAlias = Literal["complete", "time", "interrupted"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the search for one GEMM. Raises InputError for invalid values."""

    time_s: float = 30.0  # Approximate total time per GEMM.
    iterations: int = 100  # Maximum number of samples of a candidate.

    def __post_init__(self) -> None:
        if not 0 < self.time_s < math.inf:
            raise InputError(f"the tuning time is {self.time_s:g} s; it must be a number above 0")
        if self.iterations < MIN_ITERATIONS:
            raise InputError(
                f"the number of samples per algorithm is {self.iterations}; it must be at least "
                f"{MIN_ITERATIONS}",
                hint=f"use --tune-iterations {MIN_ITERATIONS} or more; with fewer samples no gain is "
                "significant",
            )


class Trials(Protocol):
    """The measurements of candidates, which have numbers; number 0 is the default algorithm."""

    def prepare(self, candidate_index: int) -> bool:
        """Prepare a candidate; return False if it cannot run or is several times slower than the default."""
        ...

    def release(self, candidate_index: int) -> None:
        """Release the resources of a candidate."""
        ...

    def measure(self, ordered_candidates: Sequence[int]) -> Sequence[float]:
        """Return the time of each candidate, measured once in this order; NaN for an invalid reading."""
        ...

    def verify(self, candidate_index: int) -> bool:
        """Return whether a candidate computes correct values."""
        ...

    def reallocate(self) -> None:
        """Replace the buffers by new ones with the same data."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the search for a faster algorithm."""

    winner_index: (
        int  # Index of the fastest candidate; DEFAULT_CANDIDATE if none is significantly faster.
    )
    # Share of the time that the fastest finalist saves: 0.05 is 5%; None without a final.
    gain: float | None
    gain_interval: tuple[float, float] | None  # CI of the gain; None with too few samples.
    is_significant: bool  # Whether the fastest finalist won.
    tried_count: int  # Number of candidates that were measured, including the default.
    wrong_finalists: tuple[int, ...]  # Finalists that computed wrong values.
    rounds: int  # Number of rounds of the final.
    stop_reason: StopReason  # Reason why the search ended.


def search(
    trials: Trials,
    candidate_count: int,
    limits: Limits,
    *,
    seed: int,
    now_s: Callable[[], float],
    begin_s: float | None = None,
    progress: Progress = lambda stage, fraction: None,  # noqa: ARG005
) -> Outcome:
    """Search for a candidate that is significantly faster than the default, by MIN_GAIN or more.

    ``candidate_count`` is the number of candidates; those with small numbers are measured first. The time
    limit starts at ``begin_s``, by default now. ``progress`` is called before each round and may raise
    KeyboardInterrupt. After an interrupt the outcome is the default, unless the final has a winner already.
    """
    begin_s = now_s() if begin_s is None else begin_s
    generator = random.Random(seed)  # noqa: S311 not for cryptography
    search_state = _Search(trials, limits, generator, now_s, begin_s, progress)
    try:
        search_state.screen(range(1, candidate_count))
        search_state.halve()
        search_state.run_final()
    except KeyboardInterrupt:
        search_state.stop_reason = "interrupted"
    return search_state.outcome()


@dataclass
class _Search:
    """The state of a search; the stages are called in order."""

    _trials: Trials
    _limits: Limits
    _random: random.Random
    _now_s: Callable[[], float]
    _begin_s: float
    _progress: Progress
    stop_reason: StopReason = "complete"
    _stage: tuple[str, float] = ("", 0.0)
    _ratios: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _sample_counts: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _pool: list[int] = field(default_factory=list)  # The best candidates, the fastest first.
    _reserve: list[int] = field(default_factory=list)  # The best candidates that left the pool.
    _final: FinalComparison = field(default_factory=FinalComparison)
    _tried_count: int = 1
    _wrong_finalists: list[int] = field(default_factory=list)

    def screen(self, candidates: Sequence[int]) -> None:
        """Measure all candidates a few times, and keep the best candidates in the pool."""
        count = len(candidates)
        for begin in range(0, count, _GROUP_SIZE):
            if self._is_over(_SCREEN_TIME_SHARE):
                self.stop_reason = "time"
                return
            self._stage = (f"{begin} of {count} algorithms", begin / count)
            prepared = list(filter(self._trials.prepare, candidates[begin : begin + _GROUP_SIZE]))
            self._tried_count += len(prepared)
            survivors = self._measure_rounds(prepared, _SCREEN_ROUNDS, _SCREEN_TIME_SHARE)
            ranked = self._rank([*self._pool, *survivors])
            self._pool = ranked[:_POOL_SIZE]
            self._release(ranked[_POOL_SIZE:])

    def halve(self) -> None:
        """Measure the pool again and keep its faster half, until FINALISTS candidates are left."""
        while len(self._pool) > FINALISTS:
            self._stage = (f"the best {len(self._pool)} algorithms", FINALISTS / len(self._pool))
            ranked = self._rank(
                self._measure_rounds(self._pool, _HALVING_ROUNDS, _HALVING_TIME_SHARE)
            )
            kept_count = max(FINALISTS, math.ceil(len(self._pool) / 2))
            self._pool, dropped = ranked[:kept_count], [*ranked[kept_count:], *self._reserve]
            self._reserve = dropped[:FINALISTS]
            self._release(dropped[FINALISTS:])

    def run_final(self) -> None:
        """Measure the best candidates that compute correct values a fixed number of times."""
        finalists: list[int] = []
        for candidate in (*self._pool, *self._reserve):
            if len(finalists) == FINALISTS:
                break
            is_correct = self._trials.verify(candidate)
            (finalists if is_correct else self._wrong_finalists).append(candidate)
        self._final = FinalComparison(finalists)
        if not finalists:
            return
        taken_count = max(self._sample_counts[candidate] for candidate in finalists)
        rounds = min(_FINAL_ROUNDS, (self._limits.iterations - taken_count) // _PART_COUNT)
        for part in range(_PART_COUNT):
            if part:
                self._trials.reallocate()
            self._final.begin_part()
            for index in range(rounds):
                if self._is_over(1.0):
                    self.stop_reason = "time"
                    return
                self._stage = ("the final", (part + index / rounds) / _PART_COUNT)
                self._final.add(self._measure_round(finalists))

    def outcome(self) -> Outcome:
        """Return the outcome. Only the samples of the final decide whether a candidate wins."""
        final = self._final
        ranked = final.ranked_finalists()
        winner = DEFAULT_CANDIDATE
        for candidate in filter(final.is_faster, ranked):
            if self._trials.verify(candidate):
                winner = candidate
                break
            self._wrong_finalists.append(candidate)
        correct = [candidate for candidate in ranked if candidate not in self._wrong_finalists]
        fastest = winner if winner != DEFAULT_CANDIDATE else next(iter(correct), None)
        return Outcome(
            winner_index=winner,
            gain=None if fastest is None else final.gain(fastest),
            gain_interval=None if fastest is None else final.gain_interval(fastest),
            is_significant=winner != DEFAULT_CANDIDATE,
            tried_count=self._tried_count,
            wrong_finalists=tuple(self._wrong_finalists),
            rounds=final.round_count,
            stop_reason=self.stop_reason,
        )

    def _measure_rounds(
        self, candidates: Sequence[int], rounds: int, time_share: float
    ) -> list[int]:
        """Measure candidates in rounds, and return the candidates that may still win."""
        survivors = list(candidates)
        # The final takes as many samples of a candidate as the stages before it.
        max_samples = self._limits.iterations // 2
        for _ in range(rounds):
            measurable = [
                candidate for candidate in survivors if self._sample_counts[candidate] < max_samples
            ]
            if not measurable or self._is_over(time_share):
                break
            for candidate, ratio in self._measure_round(measurable).items():
                self._ratios[candidate].append(ratio)
            slow = set(filter(self._is_too_slow, measurable))
            self._release(slow)
            survivors = [candidate for candidate in survivors if candidate not in slow]
        return survivors

    def _is_too_slow(self, candidate: int) -> bool:
        """Return whether a candidate is, with significance, too slow to win."""
        ratios = self._ratios[candidate]
        if not ratios:
            return False
        max_ratio = _SLOW_RATIO_IN_ONE if len(ratios) == 1 else _SLOW_RATIO_IN_ALL
        return min(ratios) > max_ratio or is_median_above(ratios, 1 - MIN_GAIN, _DROP_LEVEL)

    def _measure_round(self, candidates: Sequence[int]) -> dict[int, float]:
        """Measure each candidate and the default once, and return the valid ratios."""
        self._progress(*self._stage)
        ordered = [DEFAULT_CANDIDATE, *candidates]
        self._random.shuffle(ordered)
        times = dict(zip(ordered, self._trials.measure(ordered), strict=True))
        for candidate in candidates:
            self._sample_counts[candidate] += 1
        ratios = {
            candidate: times[candidate] / times[DEFAULT_CANDIDATE] for candidate in candidates
        }
        return {candidate: ratio for candidate, ratio in ratios.items() if not math.isnan(ratio)}

    def _release(self, candidates: Iterable[int]) -> None:
        for candidate in candidates:
            self._trials.release(candidate)

    def _rank(self, candidates: Sequence[int]) -> list[int]:
        measured = filter(self._ratios.get, candidates)
        return sorted(measured, key=lambda candidate: median(self._ratios[candidate]))

    def _is_over(self, share: float) -> bool:
        return self._now_s() - self._begin_s >= share * self._limits.time_s
