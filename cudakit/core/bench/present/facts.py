"""The facts above a table of cases: which device, in which state, measured by which method and library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from cudakit.core.bench.case import OURSELVES
from cudakit.core.bench.environment import Environment
from cudakit.core.bench.method import Method
from cudakit.core.bench.present.labels import axis_names, axis_words, short_labels, varying
from cudakit.core.bench.result import BenchResult, CaseResult
from cudakit.document import Facts, Text, Value
from cudakit.units import Unavailable, format_bytes, format_seconds

_MODES = {
    "isolated": "one execution between two events",
    "batch": "{n} between two events",
    "graph": "{n} in a graph",
    "host": "clock of the host, until the device has finished",
    "call": "clock of the host, until the call returns",
}
_CACHES = {
    "rotate": "{sets} buffer sets in turn, so that the L2 cache is cold",
    "flush": "L2 cache overwritten before each",
    "hot": "L2 cache hot",
}
# More names than this are replaced by a count.
_MOST_NAMES = 7


def title(result: BenchResult) -> str:
    """Return the title: simulated or not, bench, GPU."""
    words = f"{'Simulated: ' if result.simulated else ''}bench {result.bench}"
    if not result.results:
        return words
    gpu = result.results[0].environment.gpu
    return words if isinstance(gpu, Unavailable) else f"{words}, {gpu}"


def machine_facts(cases: Sequence[CaseResult]) -> Facts:
    """Return the method, the libraries, the versions and the state of the GPU."""
    known = [case for case in cases if not case.refused] or cases
    first = known[0]
    rows = [*method_rows(known), *library_rows(known)]
    rows += [("versions", Text(_versions(first.environment)))] if first.environment.versions else []
    state = _state(first)
    return Facts((*rows, ("state", Text(state))) if state else tuple(rows))


def library_rows(cases: Sequence[CaseResult]) -> list[tuple[str, Value]]:
    """Return each library once, with its settings; nothing if no case has one."""
    words = dict.fromkeys(_library_words(case) for case in cases if "library" in case.settings)
    return [("library", Text("; ".join(words)))] if words else []


def _library_words(case: CaseResult) -> str:
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
    """Describe each method in a row, with its cases if there are several methods."""
    groups: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in cases:
        method = case.method
        alike = (method.mode, method.cache, method.fill)
        groups.setdefault(alike, []).append(case)
    rows: list[tuple[str, Value]] = []
    for group in groups.values():
        words = method_words([case.method for case in group], own=_distinguishing(group))
        rows.append(
            ("method", Text(words if len(groups) == 1 else f"{_of(group, cases)}: {words}"))
        )
    return rows


def method_words(methods: Sequence[Method], *, own: Sequence[str] = ()) -> str:
    """Describe methods that differ only in their numbers.

    ``own`` names interleaved workloads that are all cudakit's own.
    """
    first = methods[0]
    warmup = _range(
        [method.warmup_s for method in methods], lambda s: format_seconds(s) if s else "0 s"
    )
    executions = _range([method.executions for method in methods], str)
    parts = [
        _MODES[first.mode].format(n=_counted(executions, "execution")),
        _CACHES[first.cache].format(sets=_range([method.buffer_sets for method in methods], str)),
        f"{first.fill} data",
        f"warm-up {warmup}" if any(method.warmup_s for method in methods) else "no warm-up",
    ]
    if any(method.rounds > 1 for method in methods):
        rounds = _range([method.rounds for method in methods], str)
        parts.append(f"{rounds} rounds on new buffers each")
    names = list(dict.fromkeys(name for method in methods for name in method.interleaved))
    if names := list(own) if names == [OURSELVES] else names:
        parts.append(f"{' and '.join(filter(None, (', '.join(names[:-1]), names[-1])))} in turn")
    return "; ".join(parts)


def _distinguishing(cases: Sequence[CaseResult]) -> list[str]:
    """Return the values of the first text axis that distinguishes cases."""
    for name in varying(cases):
        values = [case.axes.get(name) for case in cases]
        if len(set(values)) > 1 and all(isinstance(value, str) for value in values):
            return list(dict.fromkeys(map(str, values)))
    return []


def _of(group: Sequence[CaseResult], cases: Sequence[CaseResult]) -> str:
    """Name a group by values that no other case has, the rest one by one; count many."""
    rest = [case for case in cases if not any(case is one for one in group)]
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
    # A case measured by two methods has one name.
    ambiguous = not {labels[id(case)] for case in rest}.isdisjoint(names)
    return _many(group) if ambiguous or len(names) > _MOST_NAMES else ", ".join(names)


def _many(group: Sequence[CaseResult]) -> str:
    """Count the cases, with their range of sizes."""
    counted = _counted(str(len(group)), "case")
    for name in varying(group):
        sizes = [case.axes.get(name) for case in group]
        if name.endswith("_bytes") and all(isinstance(size, int) for size in sizes):
            known = [size for size in sizes if isinstance(size, int)]
            return f"{counted} of {axis_words(name, min(known))} to {axis_words(name, max(known))}"
    return counted


def _value(name: str, case: CaseResult) -> str:
    return axis_words(name, case.axes.get(name))


def _counted(number: str, what: str) -> str:
    return f"{number} {what}" if number == "1" else f"{number} {what}s"


def _range(values: Sequence[float], words: Callable[[float], str]) -> str:
    low, high = words(min(values)), words(max(values))
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
