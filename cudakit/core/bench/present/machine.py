"""Which device, in which state, measured how: the lines above the table."""

from __future__ import annotations

from statistics import median

from cudakit.core.bench.environment import Environment
from cudakit.core.bench.method import Method
from cudakit.core.bench.result import BenchResult, CaseResult
from cudakit.document import Facts, Text, Value
from cudakit.units import Unavailable, format_seconds

_MODES = {
    "isolated": "one execution between two events",
    "batch": "{n} executions between two events",
    "graph": "{n} executions in a graph",
    "host": "clock of the host, until the device has finished",
}
_CACHES = {
    "rotate": "{sets} buffer sets in turn, so that the L2 cache is cold",
    "flush": "L2 cache overwritten before each",
    "hot": "L2 cache hot",
}


def title(result: BenchResult) -> str:
    """Say first of all whether this is real, then what ran where."""
    words = f"{'Simulated: ' if result.simulated else ''}bench {result.bench}"
    if not result.results:
        return words
    gpu = result.results[0].environment.gpu
    return words if isinstance(gpu, Unavailable) else f"{words}, {gpu}"


def machine_facts(case: CaseResult) -> Facts:
    """Name what the figures of a case depend on: the method first."""
    rows: list[tuple[str, Value]] = [("method", Text(method_words(case.method)))]
    rows += [("versions", Text(_versions(case.environment)))] if case.environment.versions else []
    state = _state(case)
    return Facts((*rows, ("state", Text(state))) if state else tuple(rows))


def method_words(method: Method) -> str:
    """Describe how it was measured."""
    parts = [
        _MODES[method.mode].format(n=method.executions),
        _CACHES[method.cache].format(sets=method.buffer_sets),
        f"{method.fill} data",
        f"warm-up {format_seconds(method.warmup_s)}" if method.warmup_s else "no warm-up",
    ]
    if method.interleaved:
        parts.append(f"in turn with {', '.join(method.interleaved)}")
    return "; ".join(parts)


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
