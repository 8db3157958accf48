"""How it was measured, in words: once for all cases that were measured alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cudakit.core.bench.method import Method
from cudakit.core.bench.present.axes import axis_names
from cudakit.core.bench.result import CaseResult
from cudakit.document import Text, Value
from cudakit.units import format_seconds

_MODES = {
    "isolated": "one execution between two events",
    "batch": "{n} executions between two events",
    "graph": "{n} executions in a graph",
    "host": "clock of the host, until the device has finished",
    "call": "clock of the host, until the call returns",
}
_CACHES = {
    "rotate": "{sets} buffer sets in turn, so that the L2 cache is cold",
    "flush": "L2 cache overwritten before each",
    "hot": "L2 cache hot",
}


def method_rows(cases: Sequence[CaseResult]) -> list[tuple[str, Value]]:
    """Describe each method in a row, with the cases that it is of where there are several."""
    groups: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in cases:
        method = case.method
        alike = (method.mode, method.cache, method.fill)
        groups.setdefault(alike, []).append(case)
    rows: list[tuple[str, Value]] = []
    for group in groups.values():
        words = method_words([case.method for case in group])
        rows.append(
            ("method", Text(words if len(groups) == 1 else f"{_of(group, cases)}: {words}"))
        )
    return rows


def method_words(methods: Sequence[Method]) -> str:
    """Describe methods that differ in their numbers only."""
    first = methods[0]
    warmup = _range(
        [method.warmup_s for method in methods], lambda s: format_seconds(s) if s else "0 s"
    )
    parts = [
        _MODES[first.mode].format(n=_range([method.executions for method in methods], str)),
        _CACHES[first.cache].format(sets=_range([method.buffer_sets for method in methods], str)),
        f"{first.fill} data",
        f"warm-up {warmup}" if any(method.warmup_s for method in methods) else "no warm-up",
    ]
    if any(method.rounds > 1 for method in methods):
        parts.append(
            f"{_range([method.rounds for method in methods], str)} rounds on new buffers each"
        )
    if others := dict.fromkeys(name for method in methods for name in method.interleaved):
        parts.append(f"{', '.join(others)} in turn")
    return "; ".join(parts)


def _of(group: Sequence[CaseResult], cases: Sequence[CaseResult]) -> str:
    """Name the values of an axis that no case outside of the group has."""
    rest = [case for case in cases if not any(case is one for one in group)]
    for name in axis_names(cases):
        inside = dict.fromkeys(str(case.axes.get(name)) for case in group)
        if not inside.keys() & {str(case.axes.get(name)) for case in rest}:
            return ", ".join(inside)
    return "1 case" if len(group) == 1 else f"{len(group)} cases"


def _range(values: Sequence[float], words: Callable[[float], str]) -> str:
    low, high = words(min(values)), words(max(values))
    return low if low == high else f"{low} to {high}"
