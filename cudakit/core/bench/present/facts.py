"""The method, libraries, versions and GPU state of a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from cudakit.core.bench.case import CUDAKIT
from cudakit.core.bench.environment import Environment
from cudakit.core.bench.labels import axis_names, format_axis, short_labels, varying_axes
from cudakit.core.bench.method import Method
from cudakit.core.bench.result import BenchResult, CaseResult
from cudakit.document import Facts, Text, Value
from cudakit.units import Unavailable, format_bytes, format_seconds

_MODES = {
    "isolated": "one execution per sample, timed by CUDA events",
    "batch": "{n} per sample, timed by CUDA events",
    "graph": "a CUDA graph of {n} per sample, timed by CUDA events",
    "host": "host time until the GPU has finished",
    "call": "host time of the call",
}
_CACHES = {
    "rotate": "L2 cold, {sets} buffer sets in rotation",
    "flush": "L2 flushed before each sample",
    "hot": "L2 hot",
}
_FILLS = {
    "uniform": "uniform random data",
    "normal": "normal random data",
    "int": "random small integers",
    "bits": "random bits",
    "no": "",
}
_MAX_NAMES = 7  # if there are more, their number is shown


def title(result: BenchResult) -> str:
    """Return the title of a report: the bench and the GPU, behind "Simulated" if it is."""
    text = f"{'Simulated: ' if result.simulated else ''}bench {result.bench}"
    if not result.results:
        return text
    gpu = result.results[0].environment.gpu
    return text if isinstance(gpu, Unavailable) else f"{text}, {gpu}"


def machine_facts(cases: Sequence[CaseResult]) -> Facts:
    """Return the methods, libraries, versions and the GPU state at the end of the first case that was run."""
    supported = [case for case in cases if not case.is_unsupported] or cases
    first = supported[0]
    rows = [*method_rows(supported), *library_rows(supported)]
    rows += [("versions", Text(_versions(first.environment)))] if first.environment.versions else []
    state = _state(first)
    return Facts((*rows, ("GPU state", Text(state))) if state else tuple(rows))


def library_rows(cases: Sequence[CaseResult]) -> list[tuple[str, Value]]:
    """Return the libraries with their settings in one row; no row if no case has one."""
    names = dict.fromkeys(_describe_library(case) for case in cases if "library" in case.settings)
    return [("library", Text("; ".join(names)))] if names else []


def _describe_library(case: CaseResult) -> str:
    settings = case.settings
    named = " ".join(str(settings[name]) for name in ("library", "version") if name in settings)
    allowed = settings.get("workspace_bytes")
    parts = [
        named,
        *([f"workspace up to {format_bytes(allowed)}"] if isinstance(allowed, int) else []),
        *([str(settings["asked"])] if settings.get("asked") else []),
    ]
    return ", ".join(parts)


def method_rows(cases: Sequence[CaseResult]) -> list[tuple[str, Value]]:
    """Return a row per method, with the names of its cases if there are several methods."""
    groups: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in cases:
        method = case.method
        alike = (method.mode, method.cache, method.fill)
        groups.setdefault(alike, []).append(case)
    rows: list[tuple[str, Value]] = []
    for group in groups.values():
        text = describe_method([case.method for case in group], own=_first_varying_values(group))
        rows.append(
            ("method", Text(text if len(groups) == 1 else f"{_name_group(group, cases)}: {text}"))
        )
    return rows


def describe_method(methods: Sequence[Method], *, own: Sequence[str] = ()) -> str:
    """Describe methods that differ only in numbers, which become ranges.

    ``own`` names the interleaved workloads if all of them are cudakit's own.
    """
    first = methods[0]
    warmup = _range(
        [method.warmup_s for method in methods],
        lambda s: format_seconds(s, pad=True) if s else "0 s",
    )
    executions = _range([method.executions for method in methods], str)
    parts = [
        _MODES[first.mode].format(n=_counted(executions, "execution")),
        _CACHES[first.cache].format(sets=_range([method.buffer_sets for method in methods], str)),
        *filter(None, (_FILLS.get(first.fill, f"data: {first.fill}"),)),
        f"warm-up {warmup}" if any(method.warmup_s for method in methods) else "no warm-up",
    ]
    if any(method.rounds > 1 for method in methods):
        rounds = _range([method.rounds for method in methods], str)
        parts.append(f"{rounds} rounds, each with new buffers")
    names = list(dict.fromkeys(name for method in methods for name in method.interleaved))
    if names := list(own) if names == [CUDAKIT] else names:
        parts.append(f"interleaved: {', '.join(names)}")
    return "; ".join(parts)


def _first_varying_values(cases: Sequence[CaseResult]) -> list[str]:
    """Return the values of the first axis that varies and has text values."""
    for name in varying_axes(cases):
        values = [case.axes.get(name) for case in cases]
        if len(set(values)) > 1 and all(isinstance(value, str) for value in values):
            return list(dict.fromkeys(map(str, values)))
    return []


def _name_group(group: Sequence[CaseResult], cases: Sequence[CaseResult]) -> str:
    """Name the cases of a group among all cases.

    The name has values of an axis that only cases of the group have, then labels of its other cases; the axis
    is the one that leaves the fewest. A group with too many names is counted.
    """
    rest = [case for case in cases if not any(case is member for member in group)]
    labels = dict(zip(map(id, cases), short_labels(cases), strict=True))
    best: tuple[int, list[str]] | None = None
    values: list[Callable[[CaseResult], str]] = [lambda case: case.name]
    values += [partial(_value, name) for name in axis_names(cases)]
    for value in values:
        elsewhere = {value(case) for case in rest}
        whole = dict.fromkeys(value(case) for case in group if value(case) not in elsewhere)
        single = [labels[id(case)] for case in group if value(case) in elsewhere]
        if best is None or len(single) < best[0]:
            best = len(single), [*whole, *single]
    names = best[1] if best else []
    # A case that was measured by two methods has one label.
    ambiguous = not {labels[id(case)] for case in rest}.isdisjoint(names)
    return _count_group(group) if ambiguous or len(names) > _MAX_NAMES else ", ".join(names)


def _count_group(group: Sequence[CaseResult]) -> str:
    """Return the number of cases and their range of sizes."""
    counted = _counted(str(len(group)), "case")
    for name in varying_axes(group):
        sizes = [case.axes.get(name) for case in group]
        if name.endswith("_bytes") and all(isinstance(size, int) for size in sizes):
            numeric = [size for size in sizes if isinstance(size, int)]
            return f"{counted} of {format_axis(name, min(numeric))} to {format_axis(name, max(numeric))}"
    return counted


def _value(name: str, case: CaseResult) -> str:
    return format_axis(name, case.axes.get(name))


def _counted(number: str, noun: str) -> str:
    return f"{number} {noun}" if number == "1" else f"{number} {noun}s"


def _range(values: Sequence[float], show: Callable[[float], str]) -> str:
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"


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
