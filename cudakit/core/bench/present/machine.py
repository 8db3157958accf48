"""Which device, in which state, measured how: the lines above the table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from cudakit.core.bench.environment import Environment
from cudakit.core.bench.present.libraries import library_rows
from cudakit.core.bench.present.methods import method_rows
from cudakit.core.bench.present.refusals import measured
from cudakit.core.bench.result import BenchResult, CaseResult
from cudakit.document import Facts, Text, Value
from cudakit.units import Unavailable


def title(result: BenchResult) -> str:
    """Say first of all whether this is real, then what ran where."""
    words = f"{'Simulated: ' if result.simulated else ''}bench {result.bench}"
    if not result.results:
        return words
    gpu = result.results[0].environment.gpu
    return words if isinstance(gpu, Unavailable) else f"{words}, {gpu}"


def machine_facts(cases: Sequence[CaseResult]) -> Facts:
    """Name what the figures depend on: the method first, then the machine and its state at the begin."""
    known = measured(cases) or cases
    first = known[0]
    rows = [*method_rows(known), *library_rows(known)]
    rows += [("versions", Text(_versions(first.environment)))] if first.environment.versions else []
    state = _state(first)
    return Facts((*rows, ("state", Text(state))) if state else tuple(rows))


def clock_words(clock_hz: tuple[float, ...]) -> Value:
    """Write the clock that was measured during the samples."""
    if not clock_hz:
        return Unavailable("the clock was not measured")
    return Text(f"{median(clock_hz) / 1e6:.0f} MHz")


def _versions(environment: Environment) -> str:
    return ", ".join(f"{name} {version}" for name, version in environment.versions.items())


def _state(case: CaseResult) -> str:
    moment = case.environment.after or case.environment.before
    if moment is None:
        return ""
    parts = [
        f"{amount:.0f} {unit}"
        for amount, unit in (
            (moment.temperature_c, "°C"),
            (moment.power_w, "W"),
            (moment.memory_clock_mhz, "MHz memory"),
        )
        if not isinstance(amount, Unavailable)
    ]
    limit = case.environment.power_limit_w
    if not isinstance(limit, Unavailable):
        parts.append(f"power limit {limit:.0f} W")
    return ", ".join(parts)
