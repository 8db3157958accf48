"""The method of a measurement: mode, L2 state, stopping rule, warm-up, rounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

# The value of a parameter of a case.
Axis: TypeAlias = str | int | float

# The value of the field ``library`` for workloads that are no baseline.
CUDAKIT = "cudakit"

# A sample is, in mode isolated: one execution between two events; batch: many executions between two events;
# graph: a graph of many executions between two events; host: host time of the call and a synchronization;
# call: host time of the call alone, or the mean of several calls.
Mode: TypeAlias = Literal["isolated", "batch", "graph", "host", "call"]

# The L2 state. rotate: executions use buffer sets in rotation, which together exceed the cache. flush: the
# cache is overwritten before each sample. hot: all executions use the same buffers.
Cache: TypeAlias = Literal["rotate", "flush", "hot"]

# device: the time between two events; host: the host time until the device has finished; call: the host time
# until the call returns.
Clock: TypeAlias = Literal["device", "host", "call"]

_SETTLING_S = 3.0


@dataclass(frozen=True, slots=True)
class Rule:
    """The stopping rule of sampling: how many samples, and how long."""

    min_samples: int = 10  # Minimum number of samples.
    min_time_s: float = 0.5  # Minimum time since the start of the first sample.
    precision: float = 0.01  # Maximum half-width of the 95% CI, relative to the median.
    timeout_s: float = 15.0  # Maximum time since the start of the first sample.


@dataclass(frozen=True, slots=True)
class Method:
    """How the samples of one case are measured."""

    mode: Mode  # How a sample is timed.
    cache: Cache  # L2 state before each sample.
    warmup_s: float = 0.0  # Minimum or, in a result, actual duration of the warm-up.
    rule: Rule = field(default_factory=Rule)  # When sampling stops.
    blocker: bool = True  # Whether a blocking kernel hides the gaps between launches.
    # Number of rounds. Each has new buffers, because the addresses of buffers affect the speed.
    rounds: int = 1
    # Approximate duration of a sample of many executions. It makes the resolution of events, 0.5 us (CUDA
    # Driver API, cuEventElapsedTime), negligible.
    sample_s: float = 1e-3
    # Number of executions per sample; the sample is their mean. In mode "call", the case sets this
    # number; in the other modes, a trial measurement determines it.
    executions: int = 1
    buffer_sets: int = 1  # Number of buffer sets in rotation.
    # Input data: uniform (in (-1, 1)), normal, int or small integers, bits, zeros, ones, or no (no data).
    fill: str = "uniform"
    seed: int = 0  # Seed of the random data.
    interleaved: tuple[str, ...] = ()  # Libraries or workloads whose samples alternate.
    # Maximum duration of the warm-up; null: 3 s, or twice the minimum if that is longer.
    warmup_most_s: float | None = None
    energy_s: float = 0.0  # Minimum duration of the energy measurement; 0 measures no energy.

    @property
    def clock(self) -> Clock:
        """The clock that times the samples of the mode."""
        return self.mode if self.mode == "host" or self.mode == "call" else "device"

    def differences_from(self, other_method: Method) -> tuple[str, ...]:
        """Return the differences that make results of two methods incomparable."""
        return tuple(
            f"{name}: {_option_text(this_value)} before, {_option_text(other_value)} after"
            for name in ("mode", "cache", "blocker", "fill")
            if (this_value := getattr(self, name)) != (other_value := getattr(other_method, name))
        )


def _option_text(value: str | bool) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return value


def max_warmup_s(min_s: float) -> float:
    """Return the default maximum duration of a warm-up that lasts at least ``min_s``."""
    return max(_SETTLING_S, 2 * min_s) if min_s else 0.0
