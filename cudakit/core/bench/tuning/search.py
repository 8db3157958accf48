"""The search for a candidate that is faster than the default. Pure: ``Trials`` measure the candidates.

Every round measures candidates and the default once each, in random order; only the ratio of the two in the
same round counts. Three stages:

screen    candidates in groups of a few; a candidate that is significantly not better leaves after few rounds
halving   the best again; the slower half leaves each time (successive halving)
final     the best three on new samples, whose number is fixed in advance; it alone decides
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from cudakit.core.bench.prepare import Progress
from cudakit.core.bench.tuning.significance import LEAST_GAIN, Final, is_above, middle
from cudakit.errors import InputError

# Half of them are for the final, whose three finalists need 9 pairs: the probability that all lie on one side
# is then 2 ** -9, less than LEVEL / 3.
LEAST_ITERATIONS = 20

DEFAULT = 0
FINALISTS = 3

_GROUP = 8  # candidates, few, so that a round is short
_POOL = 16  # candidates that remain after all groups
_SCREEN_ROUNDS = 6
_HALVING_ROUNDS = 5
# Parts of the final, each on buffers of its own: their addresses change which algorithm is faster.
_PARTS = 3
_FINAL_ROUNDS = 16  # of each part
# Shares of the time after which screening and halving end.
_SCREEN_UNTIL, _HALVING_UNTIL = 0.55, 0.7
# Level of leaving early, which only costs a candidate: slower in 5 of 5 rounds, or in 7 of 8.
_LEAVES = 0.05
# Slowdown in the first round, or in each of two or more, that no noise explains.
_HOPELESS_AT_ONCE, _HOPELESS = 1.5, 1.1

Stopped: TypeAlias = Literal["complete", "time", "interrupted"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the search for one product. Raises InputError for what makes no sense."""

    time_s: float = 30.0  # about, all that is done for a product included
    iterations: int = 100  # samples of each candidate at most; the default has one beside each

    def __post_init__(self) -> None:
        if not 0 < self.time_s < math.inf:
            raise InputError(
                f"the time for tuning is {self.time_s:g} s, and must be a number above 0"
            )
        if self.iterations < LEAST_ITERATIONS:
            raise InputError(
                f"the number of iterations is {self.iterations}, and must be at least {LEAST_ITERATIONS}",
                hint="with fewer samples no gain is significant",
            )


class Trials(Protocol):
    """Measures candidates by number; 0 is the default."""

    def enter(self, number: int) -> bool:
        """Prepare a candidate; return False if it cannot run, or takes many times as long as the default."""
        ...

    def leave(self, number: int) -> None:
        """Release a candidate."""
        ...

    def measure(self, order: Sequence[int]) -> Sequence[float]:
        """Measure each once, in this order, in one unit; NaN for an invalid reading."""
        ...

    def verify(self, number: int) -> bool:
        """Return whether a candidate computes correct values."""
        ...

    def renew(self) -> None:
        """Continue with other buffers."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a search."""

    winner: int  # DEFAULT if nothing is significantly faster
    gain: (
        float | None
    )  # of the fastest finalist over the default: 0.05 takes 5 % less; None without a final
    gain_interval: tuple[float, float] | None  # that covers it; None where it is not known so well
    significant: bool  # whether that finalist won
    tried: int  # candidates that were measured, the default among them
    wrong: tuple[int, ...]  # that computed wrong values
    rounds: int  # of the final, the last that were measured
    stopped: Stopped  # why there was no more


def search(
    trials: Trials,
    count: int,
    limits: Limits,
    *,
    seed: int,
    now: Callable[[], float],
    begin_s: float | None = None,
    progress: Progress = lambda stage, fraction: None,  # noqa: ARG005
) -> Outcome:
    """Search for a candidate that is significantly faster than the default, by LEAST_GAIN or more.

    ``count`` is that of the candidates; those with small numbers come first. The time runs from ``begin_s``,
    or from now. ``progress`` is called before each round. An interrupt, which it may raise, ends the search
    with what is known: the default, unless the final says otherwise.
    """
    begin_s = now() if begin_s is None else begin_s
    chance = random.Random(seed)  # noqa: S311 an order, and no secret
    found = _Search(trials, limits, chance, now, begin_s, progress)
    try:
        found.screen(range(1, count))
        found.halve()
        found.run_final()
    except KeyboardInterrupt:
        found.stopped = "interrupted"
    return found.conclude()


@dataclass
class _Search:
    """The state of a search."""

    _trials: Trials
    _limits: Limits
    _random: random.Random
    _now: Callable[[], float]
    _begin_s: float
    _progress: Progress
    stopped: Stopped = "complete"
    _stage: tuple[str, float] = ("", 0.0)
    _ratios: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _samples: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _pool: list[int] = field(default_factory=list)  # the best first
    _reserve: list[int] = field(default_factory=list)  # left the pool, but not significantly worse
    _final: Final = field(default_factory=Final)
    _tried: int = 1
    _wrong: list[int] = field(default_factory=list)

    def screen(self, numbers: Sequence[int]) -> None:
        """Measure all candidates a few times and keep the best."""
        for at in range(0, len(numbers), _GROUP):
            if self._is_over(_SCREEN_UNTIL):
                self.stopped = "time"
                return
            self._stage = (f"{at} of {len(numbers)} algorithms", at / len(numbers))
            group = [number for number in numbers[at : at + _GROUP] if self._trials.enter(number)]
            self._tried += len(group)
            left = self._measure_rounds(group, _SCREEN_ROUNDS, _SCREEN_UNTIL)
            ranked = self._ranked([*self._pool, *left])
            self._pool = ranked[:_POOL]
            self._leave(ranked[_POOL:])

    def halve(self) -> None:
        """Measure the best again and keep the faster half, until FINALISTS are left."""
        while len(self._pool) > FINALISTS:
            self._stage = (f"the best {len(self._pool)} algorithms", FINALISTS / len(self._pool))
            ranked = self._ranked(self._measure_rounds(self._pool, _HALVING_ROUNDS, _HALVING_UNTIL))
            half = max(FINALISTS, math.ceil(len(self._pool) / 2))
            self._pool, others = ranked[:half], [*ranked[half:], *self._reserve]
            self._reserve = others[:FINALISTS]
            self._leave(others[FINALISTS:])

    def run_final(self) -> None:
        """Measure the best correct candidates a fixed number of times, dropping none."""
        self._final = Final(self._verified())
        finalists = self._final.finalists
        if not finalists:
            return
        used = max(self._samples[number] for number in finalists)
        rounds = min(_FINAL_ROUNDS, (self._limits.iterations - used) // _PARTS)
        for part in range(_PARTS):
            if part:
                self._trials.renew()
            self._final.begin_part()
            for at in range(rounds):
                if self._is_over(1.0):
                    self.stopped = "time"
                    return
                self._stage = ("the final", (part + at / rounds) / _PARTS)
                self._final.add(self._round(finalists))

    def conclude(self) -> Outcome:
        """Return the outcome, decided by the final alone."""
        final = self._final
        ranked = final.ranked()
        for number in ranked:
            if final.is_faster(number):
                if self._trials.verify(number):
                    return self._outcome(number, number)
                self._wrong.append(number)
        right = [number for number in ranked if number not in self._wrong]
        return self._outcome(DEFAULT, right[0] if right else None)

    def _is_worse(self, number: int) -> bool:
        """Return whether a candidate is significantly not fast enough to win."""
        ratios = self._ratios[number]
        if not ratios:
            return False
        hopeless = _HOPELESS_AT_ONCE if len(ratios) == 1 else _HOPELESS
        return min(ratios) > hopeless or is_above(ratios, 1 - LEAST_GAIN, _LEAVES)

    def _verified(self) -> list[int]:
        """Return the best candidates that compute correct values."""
        right: list[int] = []
        for number in (*self._pool, *self._reserve):
            if len(right) == FINALISTS:
                break
            good = self._trials.verify(number)
            (right if good else self._wrong).append(number)
        return right

    def _outcome(self, winner: int, fastest: int | None) -> Outcome:
        final = self._final
        return Outcome(
            winner=winner,
            gain=None if fastest is None else final.gain(fastest),
            gain_interval=None if fastest is None else final.gain_interval(fastest),
            significant=winner != DEFAULT,
            tried=self._tried,
            wrong=tuple(self._wrong),
            rounds=final.rounds,
            stopped=self.stopped,
        )

    def _measure_rounds(self, numbers: Sequence[int], rounds: int, until: float) -> list[int]:
        """Measure candidates in rounds; return those that are not significantly worse."""
        left = list(numbers)
        for _ in range(rounds):
            able = [number for number in left if self._samples[number] < self._most]
            if not able or self._is_over(until):
                break
            for number, ratio in self._round(able).items():
                self._ratios[number].append(ratio)
            worse = {number for number in able if self._is_worse(number)}
            self._leave(worse)
            left = [number for number in left if number not in worse]
        return left

    def _round(self, numbers: Sequence[int]) -> dict[int, float]:
        """Measure each and the default once; return the valid ratios."""
        self._progress(*self._stage)
        order = [DEFAULT, *numbers]
        self._random.shuffle(order)
        values = dict(zip(order, self._trials.measure(order), strict=True))
        for number in numbers:
            self._samples[number] += 1
        ratios = {number: values[number] / values[DEFAULT] for number in numbers}
        return {number: ratio for number, ratio in ratios.items() if not math.isnan(ratio)}

    def _leave(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._trials.leave(number)

    def _ranked(self, numbers: Sequence[int]) -> list[int]:
        measured = [number for number in numbers if self._ratios[number]]
        return sorted(measured, key=lambda number: middle(self._ratios[number]))

    def _is_over(self, share: float) -> bool:
        return self._now() - self._begin_s >= share * self._limits.time_s

    @property
    def _most(self) -> int:
        """Most samples of a candidate before the final, which takes the other half."""
        return self._limits.iterations // 2
