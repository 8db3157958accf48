"""Synthetic trials: each candidate has a true time with added noise, without a device."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# A function that returns the noise of a sample as a factor of its time.
Noise = Callable[[random.Random], float]


def no_noise(generator: random.Random) -> float:  # noqa: ARG001
    return 1.0


def uniform_noise(width: float) -> Noise:
    return lambda generator: 1 + width * (2 * generator.random() - 1)


def tailed_noise(width: float) -> Noise:
    """Return noise like that of a device: mostly small, with rare outliers."""
    return lambda generator: (
        1
        + width
        * (abs(generator.gauss(0, 1)) + 30 * (generator.random() < 0.02) * generator.random())
    )


@dataclass
class Synthetic:
    """Trials with a true time per candidate; ``drift`` is the amplitude of a change of all times together."""

    times_s: Sequence[float]
    noise: Noise = no_noise
    seed: int = 0
    drift: float = 0.0
    unsupported: frozenset[int] = frozenset()
    wrong: frozenset[int] = frozenset()
    wrong_later: frozenset[int] = frozenset()  # Candidates that are wrong only after the final.
    invalid: float = 0.0  # Share of measurements that are invalid.
    # For each candidate, a factor of its time with the first, second and third buffers.
    buffer_factors: Mapping[int, Sequence[float]] = field(default_factory=dict)
    now_s: float = 0.0
    rounds: list[list[int]] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    verified: list[int] = field(default_factory=list)
    reallocations: int = 0

    def __post_init__(self) -> None:
        self.generator = random.Random(self.seed)

    def now(self) -> float:
        return self.now_s

    def prepare(self, number: int) -> bool:
        if number in self.unsupported:
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
        is_wrong_now = number in self.wrong_later and self.verified.count(number) > 1
        return number not in self.wrong and not is_wrong_now

    def reallocate(self) -> None:
        self.reallocations += 1

    def samples(self, number: int) -> int:
        return sum(number in order for order in self.rounds)

    def _sample(self, number: int) -> float:
        time_s = self.times_s[number] * self.noise(self.generator)
        time_s *= 1 + self.drift * math.sin(len(self.rounds) / 20)
        time_s *= self.buffer_factors.get(number, (1.0,) * 3)[self.reallocations]
        self.now_s += time_s
        return math.nan if self.generator.random() < self.invalid else time_s
