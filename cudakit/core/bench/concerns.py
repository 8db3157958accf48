"""What of a machine's state makes figures doubtful, before they are measured and after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cudakit.core.bench.environment import Environment
from cudakit.core.bench.result import CaseResult
from cudakit.units import Unavailable, format_seconds

# Reasons for a lower clock that are nobody's trouble.
_NORMAL = ("idle", "application clocks setting", "display clock setting")
# Variables that make CUDA slower on purpose, and how they are set when they do nothing.
_SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "every launch waits for its kernel",
    "CUDA_INJECTION64_PATH": "a profiler or checker is in the process",
    "NVIDIA_TF32_OVERRIDE": "tf32 is forced on or off",
}


def concerns(environment: Environment) -> tuple[str, ...]:
    """Say what should make a reader doubt the figures, in whole sentences; nothing where all is well."""
    return tuple(_concerns(environment))


def environments(cases: Sequence[CaseResult]) -> list[Environment]:
    """List the environment of each case once: those who took turns in one met the same."""
    first: dict[tuple[str, str], Environment] = {}
    for case in cases:
        first.setdefault((case.name, str(case.axes)), case.environment)
    return [*first.values()]


def concerns_of(environments: Sequence[Environment]) -> tuple[str, ...]:
    """Say it of several, each thing once; for how long the clock was held down is added up."""
    standing = (sentence for each in environments for sentence in concerns(_without_moments(each)))
    return tuple(dict.fromkeys([*standing, *_slowed_in_all(environments)]))


def _without_moments(environment: Environment) -> Environment:
    """Leave out what differs from case to case."""
    return replace(environment, before=None, after=None)


def _slowed_in_all(environments: Sequence[Environment]) -> Iterator[str]:
    """Add up for how long the clock was held down, by reason; without counters, name the reasons."""
    total: dict[str, float] = {}
    for environment in environments:
        for why, seconds in environment.slowed.items():
            total[why] = total.get(why, 0.0) + seconds
    for why, seconds in total.items():
        yield f"the clock was held down by {why} for {format_seconds(seconds)}"
    if not total:
        for environment in environments:
            yield from sorted(set(_slowed(environment)))


def _concerns(environment: Environment) -> Iterator[str]:
    others = environment.other_processes
    if isinstance(others, int) and others:
        yield f"{others} other {_plural('process', others)} on the GPU: figures may be too low"
    yield from _power_limit(environment)
    if environment.modes.get("mps_enabled") is True:
        yield "MPS is on: others may share the GPU unseen"
    for name, effect in _SLOWING.items():
        if environment.variables.get(name, "0") not in ("", "0"):
            yield f"{name} is set: {effect}"
    yield from _slowed(environment)


def _power_limit(environment: Environment) -> Iterator[str]:
    limit, default = environment.power_limit_w, environment.power_limit_default_w
    if isinstance(limit, Unavailable) or isinstance(default, Unavailable):
        return
    if limit < default:
        yield f"the power limit is {limit:.0f} W, not the default of {default:.0f} W"


def _slowed(environment: Environment) -> Iterator[str]:
    """Say why the clock was held down: by the counters, or where there are none by the last look."""
    if environment.slowed:
        for why, seconds in environment.slowed.items():
            yield f"the clock was held down by {why} for {format_seconds(seconds)}"
        return
    last = environment.after or environment.before
    if last is not None and isinstance(last.clock_reasons, tuple) and not last.slowed_ns:
        for why in last.clock_reasons:
            if why not in _NORMAL:
                yield f"the clock was held down: {why}"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}es"
