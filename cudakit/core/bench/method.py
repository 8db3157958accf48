"""How a figure is measured: mode, cache state, stopping rule, warm-up, rounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

# isolated: an execution between two events, nothing else on the device. batch: many between two events.
# graph: many, captured and replayed as one. host: the clock of the host, around call and synchronization.
# call: the clock of the host, around the call alone.
Mode: TypeAlias = Literal["isolated", "batch", "graph", "host", "call"]

# rotate: each execution gets another set of buffers, more than the L2 cache holds. flush: the cache is
# overwritten between executions. hot: the same buffers again and again.
Cache: TypeAlias = Literal["rotate", "flush", "hot"]

_MOST_WARMUP_S = 3.0


@dataclass(frozen=True, slots=True)
class Rule:
    """When to stop."""

    min_samples: int = 10  # at least
    min_time_s: float = 0.5  # since the first sample began, at least
    precision: float = 0.01  # half the 95 % interval of the median, relative to it
    timeout_s: float = 15.0  # since the first sample began


@dataclass(frozen=True, slots=True)
class Method:
    """What was done to get the samples of one case."""

    mode: Mode  # what lies between the two readings of the clock
    cache: Cache  # what the L2 cache held
    warmup_s: float = 0.0  # spent before the first sample
    rule: Rule = field(default_factory=Rule)  # when it stopped
    blocker: bool = True  # whether a spinning kernel hid the gaps between launches
    rounds: int = 1  # for each of which the buffers are made anew: where they lie changes the speed
    # That a sample of many executions fills, about: what events resolve, 0.5 us (CUDA Driver API,
    # cuEventElapsedTime), is then lost in it.
    sample_s: float = 1e-3
    executions: int = 1  # in each sample, which is their mean
    buffer_sets: int = 1  # that were taken in turn
    fill: str = "uniform"  # the data: uniform in [-1, 1], normal, bits, zeros, ones, int, or no
    seed: int = 0  # of the data
    interleaved: tuple[str, ...] = ()  # who else ran in turn with it, in the same process
    # When the warm-up ends, settled or not; None is after 3 seconds, or twice ``warmup_s``.
    warmup_most_s: float | None = None
    # That the energy counter is watched for, behind the samples; 0 is not at all.
    energy_s: float = 0.0

    @property
    def at_host(self) -> bool:
        """Whether the host's clock times it."""
        return self.mode in ("host", "call")

    def unlike(self, other: Method) -> tuple[str, ...]:
        """List the differences that make figures of two methods incomparable."""
        return tuple(
            f"{name} {mine} and {others}"
            for name in ("mode", "cache", "blocker", "fill")
            if (mine := getattr(self, name)) != (others := getattr(other, name))
        )


def most_warmup_s(least_s: float) -> float:
    """Return the default time after which a warm-up ends, settled or not."""
    return max(_MOST_WARMUP_S, 2 * least_s) if least_s else 0.0
