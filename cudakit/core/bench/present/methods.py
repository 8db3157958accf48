"""How it was measured, in words: once for all cases that were measured alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from cudakit.core.bench.method import Method
from cudakit.core.bench.present.axes import axis_names, axis_words, short_labels, varying
from cudakit.core.bench.present.peers import OURSELVES
from cudakit.core.bench.result import CaseResult
from cudakit.document import Text, Value
from cudakit.units import format_seconds

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
# More names are not read.
_MOST_NAMES = 7


def method_rows(cases: Sequence[CaseResult]) -> list[tuple[str, Value]]:
    """Describe each method in a row, with the cases that it is of where there are several."""
    groups: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in cases:
        method = case.method
        alike = (method.mode, method.cache, method.fill)
        groups.setdefault(alike, []).append(case)
    rows: list[tuple[str, Value]] = []
    for group in groups.values():
        words = method_words([case.method for case in group], own=_telling(group))
        rows.append(
            ("method", Text(words if len(groups) == 1 else f"{_of(group, cases)}: {words}"))
        )
    return rows


def method_words(methods: Sequence[Method], *, own: Sequence[str] = ()) -> str:
    """Describe methods that differ in their numbers only.

    ``own`` is what took turns where that was our own work alone, which has no other name.
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


def _telling(cases: Sequence[CaseResult]) -> list[str]:
    """Return the values of the first axis of words that tells cases apart."""
    for name in varying(cases):
        values = [case.axes.get(name) for case in cases]
        if len(set(values)) > 1 and all(isinstance(value, str) for value in values):
            return list(dict.fromkeys(map(str, values)))
    return []


def _of(group: Sequence[CaseResult], cases: Sequence[CaseResult]) -> str:
    """Name what no other case is, and the rest of a group one by one; many are counted."""
    rest = [case for case in cases if not any(case is one for one in group)]
    labels = dict(zip(map(id, cases), short_labels(cases), strict=True))
    best: tuple[int, list[str]] | None = None
    telling: list[Callable[[CaseResult], str]] = [_name]
    telling += [partial(_value, name) for name in axis_names(cases)]
    for tells in telling:
        elsewhere = {tells(case) for case in rest}
        whole = dict.fromkeys(tells(case) for case in group if tells(case) not in elsewhere)
        single = [labels[id(case)] for case in group if tells(case) in elsewhere]
        if best is None or len(single) < best[0]:
            best = len(single), [*whole, *single]
    names = best[1] if best else []
    # The same case measured in two ways has but one name.
    ambiguous = not {labels[id(case)] for case in rest}.isdisjoint(names)
    return _many(group) if ambiguous or len(names) > _MOST_NAMES else ", ".join(names)


def _many(group: Sequence[CaseResult]) -> str:
    """Count the cases, and say of which sizes they are."""
    counted = _counted(str(len(group)), "case")
    for name in varying(group):
        sizes = [case.axes.get(name) for case in group]
        if name.endswith("_bytes") and all(isinstance(size, int) for size in sizes):
            known = [size for size in sizes if isinstance(size, int)]
            return f"{counted} of {axis_words(name, min(known))} to {axis_words(name, max(known))}"
    return counted


def _name(case: CaseResult) -> str:
    return case.name


def _value(name: str, case: CaseResult) -> str:
    return axis_words(name, case.axes.get(name))


def _counted(number: str, what: str) -> str:
    return f"{number} {what}" if number == "1" else f"{number} {what}s"


def _range(values: Sequence[float], words: Callable[[float], str]) -> str:
    low, high = words(min(values)), words(max(values))
    return low if low == high else f"{low} to {high}"
