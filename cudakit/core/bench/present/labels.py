"""Labels of cases by their axes, and which axes vary."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cudakit.core.bench.case import OURSELVES
from cudakit.core.bench.result import CaseResult
from cudakit.core.bench.workload import Axis
from cudakit.document import Bytes, Text, Value
from cudakit.units import format_bytes

# The sizes of a GEMM, which are shown together.
SIZES = ("m", "n", "k")
# Axes whose name is the unit: "8 nodes".
_COUNTED = ("nodes",)


def axis_names(cases: Sequence[CaseResult]) -> list[str]:
    """List the axes of all cases, in the order of first appearance."""
    return list(dict.fromkeys(name for case in cases for name in case.axes))


def varying(cases: Sequence[CaseResult]) -> list[str]:
    """List the axes that distinguish the cases; all of them for a single case."""
    names = axis_names(cases)
    if len(cases) < 2:
        return names
    return [name for name in names if len({case.axes.get(name) for case in cases}) > 1]


def fixed_words(cases: Sequence[CaseResult]) -> str:
    """Describe the axes that are the same everywhere: ``dtype bf16, layout nn``."""
    shown = set(varying(cases))
    return ", ".join(
        f"{axis_title(name)} {axis_words(name, value)}"
        for name, value in (cases[0].axes.items() if cases else ())
        if name not in shown
    )


def short_labels(
    cases: Sequence[CaseResult], *, without: Collection[str] = (), contender: bool = True
) -> list[str]:
    """Return a label for each case that distinguishes it: ``bf16 8192³ by torch``.

    ``without`` are axes that a chart shows in another way; ``contender`` adds the library. If no axis
    distinguishes them, the label is the name of the bench.
    """
    shown = [name for name in varying(cases) if name not in without]
    if not set(SIZES).isdisjoint(shown):
        # If one size varies, all are shown.
        shown = [name for name in axis_names(cases) if name in shown or name in SIZES]
    several = len({case.name for case in cases}) > 1
    return [_short(case, shown, named=several, contender=contender) for case in cases]


def brief_label(case: CaseResult, cases: Sequence[CaseResult]) -> str:
    """Return a label of the values that vary in a result."""
    words = [str(case.axes[name]) for name in varying(cases) if name in case.axes]
    by = [] if case.contender == OURSELVES else [f"by {case.contender}"]
    return " ".join((*words, *by)) or case.name


def first_few(names: Sequence[str], most: int = 3, separator: str = "; ") -> str:
    """Join the first names, and count the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def is_cube(case: CaseResult) -> bool:
    """Return whether all sizes of a GEMM are known and equal."""
    sizes = [case.axes.get(name) for name in SIZES]
    return sizes[0] is not None and len(set(sizes)) == 1


def axis_value(name: str, value: Axis | None) -> Value:
    """Return the value of an axis with the unit of its name; "-" for a default."""
    if value is None:
        return Text("-")
    return Bytes(value) if name.endswith("_bytes") and isinstance(value, int) else Text(str(value))


def axis_words(name: str, value: Axis | None) -> str:
    """Format the value of an axis."""
    if value is None:
        return "-"
    is_size = name.endswith("_bytes") and isinstance(value, int)
    return format_bytes(int(value)) if is_size else str(value)


def axis_title(name: str) -> str:
    """Return the column title of an axis."""
    return name.removesuffix("_bytes").replace("_", " ")


def _short(case: CaseResult, shown: Sequence[str], *, named: bool, contender: bool) -> str:
    words = [case.name] if named else []
    for name in shown:
        if name in SIZES and all(size in case.axes for size in SIZES):
            words += [_sizes(case)] if name == SIZES[0] else []
        elif (value := case.axes.get(name)) is not None:
            words.append(_words(name, value))
    if contender and case.contender != OURSELVES:
        words = [*(words or [case.name]), f"by {case.contender}"]
    return " ".join(words) or case.name


def _sizes(case: CaseResult) -> str:
    return f"{case.axes['m']}³" if is_cube(case) else "×".join(str(case.axes[s]) for s in SIZES)


def _words(name: str, value: Axis) -> str:
    """Format a value in a label: a number is given with the name of its axis."""
    words = axis_words(name, value)
    if isinstance(value, str) or name.endswith("_bytes"):
        return words
    if name in _COUNTED:
        return f"{words} {name.removesuffix('s') if value == 1 else name}"
    return f"{axis_title(name)} {words}"
