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
from typing import Literal, Protocol, TypeAlias

from cudakit.bench.pipeline import Progress
from cudakit.bench.tuning.significance import (
    MIN_GAIN,
    FinalComparison,
    is_median_above,
    median_or_inf,
)
from cudakit.errors import InputError

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
    _search_limits: Limits
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
    _final_comparison: FinalComparison = field(default_factory=FinalComparison)
    _tried_count: int = 1
    _wrong_finalists: list[int] = field(default_factory=list)

    def screen(self, candidates: Sequence[int]) -> None:
        """Measure all candidates a few times, and keep the best candidates in the pool."""
        for group_start in range(0, len(candidates), _GROUP_SIZE):
            if self._is_over(_SCREEN_TIME_SHARE):
                self.stop_reason = "time"
                return
            self._stage = (
                f"{group_start} of {len(candidates)} algorithms",
                group_start / len(candidates),
            )
            group_candidates = candidates[group_start : group_start + _GROUP_SIZE]
            prepared_candidates = [
                candidate_index
                for candidate_index in group_candidates
                if self._trials.prepare(candidate_index)
            ]
            self._tried_count += len(prepared_candidates)
            survivors = self._measure_rounds(
                prepared_candidates, _SCREEN_ROUNDS, _SCREEN_TIME_SHARE
            )
            ranked_candidates = self._rank([*self._pool, *survivors])
            self._pool = ranked_candidates[:_POOL_SIZE]
            self._release(ranked_candidates[_POOL_SIZE:])

    def halve(self) -> None:
        """Measure the pool again and keep its faster half, until FINALISTS candidates are left."""
        while len(self._pool) > FINALISTS:
            self._stage = (f"the best {len(self._pool)} algorithms", FINALISTS / len(self._pool))
            ranked_candidates = self._rank(
                self._measure_rounds(self._pool, _HALVING_ROUNDS, _HALVING_TIME_SHARE)
            )
            kept_count = max(FINALISTS, math.ceil(len(self._pool) / 2))
            self._pool, dropped_candidates = (
                ranked_candidates[:kept_count],
                [*ranked_candidates[kept_count:], *self._reserve],
            )
            self._reserve = dropped_candidates[:FINALISTS]
            self._release(dropped_candidates[FINALISTS:])

    def run_final(self) -> None:
        """Measure the best correct candidates a fixed number of times."""
        self._final_comparison = FinalComparison(self._find_finalists())
        finalists = self._final_comparison.finalists
        if not finalists:
            return
        taken_sample_count = max(
            self._sample_counts[candidate_index] for candidate_index in finalists
        )
        rounds = min(
            _FINAL_ROUNDS, (self._search_limits.iterations - taken_sample_count) // _PART_COUNT
        )
        for part_number in range(_PART_COUNT):
            if part_number:
                self._trials.reallocate()
            self._final_comparison.begin_part()
            for index in range(rounds):
                if self._is_over(1.0):
                    self.stop_reason = "time"
                    return
                self._stage = ("the final", (part_number + index / rounds) / _PART_COUNT)
                self._final_comparison.add(self._measure_round(finalists))

    def outcome(self) -> Outcome:
        """Return the outcome. Only the samples of the final decide whether a candidate wins."""
        comparison = self._final_comparison
        ranked_finalists = comparison.ranked_finalists()
        for candidate_index in ranked_finalists:
            if comparison.is_faster(candidate_index):
                if self._trials.verify(candidate_index):
                    return self._outcome(candidate_index, candidate_index)
                self._wrong_finalists.append(candidate_index)
        correct_finalists = [
            candidate_index
            for candidate_index in ranked_finalists
            if candidate_index not in self._wrong_finalists
        ]
        return self._outcome(DEFAULT_CANDIDATE, correct_finalists[0] if correct_finalists else None)

    def _is_too_slow(self, candidate_index: int) -> bool:
        """Return whether a candidate is, with significance, too slow to win."""
        ratios = self._ratios[candidate_index]
        if not ratios:
            return False
        max_ratio = _SLOW_RATIO_IN_ONE if len(ratios) == 1 else _SLOW_RATIO_IN_ALL
        return min(ratios) > max_ratio or is_median_above(ratios, 1 - MIN_GAIN, _DROP_LEVEL)

    def _find_finalists(self) -> list[int]:
        """Return the best candidates that compute correct values."""
        correct_candidates: list[int] = []
        for candidate_index in (*self._pool, *self._reserve):
            if len(correct_candidates) == FINALISTS:
                break
            is_correct = self._trials.verify(candidate_index)
            (correct_candidates if is_correct else self._wrong_finalists).append(candidate_index)
        return correct_candidates

    def _outcome(self, winner_index: int, fastest_finalist_index: int | None) -> Outcome:
        comparison = self._final_comparison
        return Outcome(
            winner_index=winner_index,
            gain=None
            if fastest_finalist_index is None
            else comparison.gain(fastest_finalist_index),
            gain_interval=None
            if fastest_finalist_index is None
            else comparison.gain_interval(fastest_finalist_index),
            is_significant=winner_index != DEFAULT_CANDIDATE,
            tried_count=self._tried_count,
            wrong_finalists=tuple(self._wrong_finalists),
            rounds=comparison.round_count,
            stop_reason=self.stop_reason,
        )

    def _measure_rounds(
        self, candidates: Sequence[int], rounds: int, time_share: float
    ) -> list[int]:
        """Measure candidates in rounds, and return the candidates that may still win."""
        survivors = list(candidates)
        for _ in range(rounds):
            measurable_candidates = [
                candidate_index
                for candidate_index in survivors
                if self._sample_counts[candidate_index] < self._max_samples
            ]
            if not measurable_candidates or self._is_over(time_share):
                break
            for candidate_index, ratio in self._measure_round(measurable_candidates).items():
                self._ratios[candidate_index].append(ratio)
            slow_candidates = {
                candidate_index
                for candidate_index in measurable_candidates
                if self._is_too_slow(candidate_index)
            }
            self._release(slow_candidates)
            survivors = [
                candidate_index
                for candidate_index in survivors
                if candidate_index not in slow_candidates
            ]
        return survivors

    def _measure_round(self, candidates: Sequence[int]) -> dict[int, float]:
        """Measure each candidate and the default once, and return the valid ratios."""
        self._progress(*self._stage)
        ordered_candidates = [DEFAULT_CANDIDATE, *candidates]
        self._random.shuffle(ordered_candidates)
        time_by_candidate = dict(
            zip(ordered_candidates, self._trials.measure(ordered_candidates), strict=True)
        )
        for candidate_index in candidates:
            self._sample_counts[candidate_index] += 1
        ratios = {
            candidate_index: time_by_candidate[candidate_index]
            / time_by_candidate[DEFAULT_CANDIDATE]
            for candidate_index in candidates
        }
        return {
            candidate_index: ratio
            for candidate_index, ratio in ratios.items()
            if not math.isnan(ratio)
        }

    def _release(self, candidates: Iterable[int]) -> None:
        for candidate_index in candidates:
            self._trials.release(candidate_index)

    def _rank(self, candidates: Sequence[int]) -> list[int]:
        measured_candidates = [
            candidate_index for candidate_index in candidates if self._ratios[candidate_index]
        ]
        return sorted(
            measured_candidates,
            key=lambda candidate_index: median_or_inf(self._ratios[candidate_index]),
        )

    def _is_over(self, share: float) -> bool:
        return self._now_s() - self._begin_s >= share * self._search_limits.time_s

    @property
    def _max_samples(self) -> int:
        """Maximum number of samples of a candidate before the final; the final takes as many again."""
        return self._search_limits.iterations // 2
