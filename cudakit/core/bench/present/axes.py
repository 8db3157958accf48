"""Axes of cases: which vary and deserve a column, and how their values are shown."""

from __future__ import annotations

from collections.abc import Sequence

from cudakit.core.bench.result import Axis, CaseResult
from cudakit.document import Bytes, Text, Value


def axis_names(cases: Sequence[CaseResult]) -> list[str]:
    """List the axes of all cases, in the order of first appearance."""
    return list(dict.fromkeys(name for case in cases for name in case.axes))


def varying(cases: Sequence[CaseResult]) -> list[str]:
    """List the axes that tell the cases apart; all of them for a single case."""
    names = axis_names(cases)
    if len(cases) < 2:
        return names
    return [name for name in names if len({case.axes.get(name) for case in cases}) > 1]


def fixed_words(cases: Sequence[CaseResult]) -> str:
    """Name the axes that are the same everywhere: ``dtype bf16, layout nn``."""
    shown = set(varying(cases))
    return ", ".join(
        f"{name} {value}"
        for name, value in (cases[0].axes.items() if cases else ())
        if name not in shown
    )


def axis_value(name: str, value: Axis | None) -> Value:
    """Give an axis its unit, which its name ends in; what a case does not name is as usual."""
    if value is None:
        return Text("-")
    return Bytes(value) if name.endswith("_bytes") and isinstance(value, int) else Text(str(value))


def axis_title(name: str) -> str:
    """Head the column of an axis."""
    return name.removesuffix("_bytes").replace("_", " ")
