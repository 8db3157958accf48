"""Synthetic trials: each candidate has a true time with added noise, without a device."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# The noise of a sample, as a factor.
Noise = Callable[[random.Random], float]


def none(chance: random.Random) -> float:  # noqa: ARG001
    return 1.0


def even(width: float) -> Noise:
    return lambda chance: 1 + width * (2 * chance.random() - 1)


def tailed(width: float) -> Noise:
    """Return noise like that of a device: mostly small, with rare outliers."""
    return lambda chance: (
        1 + width * (abs(chance.gauss(0, 1)) + 30 * (chance.random() < 0.02) * chance.random())
    )


@dataclass
class Synthetic:
    """Times by candidate; ``drift`` changes all of them together."""

    times_s: Sequence[float]
    noise: Noise = none
    seed: int = 0
    drift: float = 0.0
    cannot: frozenset[int] = frozenset()
    wrong: frozenset[int] = frozenset()
    wrong_later: frozenset[int] = frozenset()  # only after the final
    invalid: float = 0.0  # the share of measurements that are none
    places: Mapping[int, Sequence[float]] = field(default_factory=dict)  # by buffers, a factor
    now_s: float = 0.0
    rounds: list[list[int]] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    verified: list[int] = field(default_factory=list)
    renewed: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def now(self) -> float:
        return self.now_s

    def prepare(self, number: int) -> bool:
        if number in self.cannot:
            return False
        self.open.add(number)
        return True

    def release(self, number: int) -> None:
        self.open.remove(number)

    def measure(self, order: Sequence[int]) -> Sequence[float]:
        assert set(order) <= {0, *self.open}
        assert len(set(order)) == len(order)
        self.rounds.append(list(order))
        return [self._sample(number) for number in order]

    def verify(self, number: int) -> bool:
        self.verified.append(number)
        later = number in self.wrong_later and self.verified.count(number) > 1
        return number not in self.wrong and not later

    def reallocate(self) -> None:
        self.renewed += 1

    def samples(self, number: int) -> int:
        return sum(number in order for order in self.rounds)

    def _sample(self, number: int) -> float:
        time_s = self.times_s[number] * self.noise(self.chance)
        time_s *= 1 + self.drift * math.sin(len(self.rounds) / 20)
        time_s *= self.places.get(number, (1.0,) * 3)[self.renewed]
        self.now_s += time_s
        return math.nan if self.chance.random() < self.invalid else time_s
