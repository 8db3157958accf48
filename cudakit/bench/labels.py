"""Labels of cases by their axes, and the axes that differ between cases."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

from cudakit.report.document import Bytes, Text, Value
from cudakit.units import format_bytes

# The value of a parameter of a case.
Axis: TypeAlias = str | int | float
# The value of the field ``library`` for workloads that are no baseline.
CUDAKIT = "cudakit"
# The dimensions of a GEMM, which a label shows together: "4096³".
DIMENSIONS = ("m", "n", "k")
# The axis with the name of a measurement of an overlap. The measurements of one direction and size are shown
# as one case.
MEASUREMENT_AXIS = "measurement"
# A label shows the values of these axes before the name of the axis: "8 nodes".
_COUNTED_AXES = ("nodes", "elements")
# A label of a copy to GPU 1 is "peer GPU 1", because its direction is "peer" already.
_NOUN_BY_AXIS = {"peer": "GPU"}
# Values of these axes are large numbers, which are shown with separators: "1,000,000".
_LARGE_NUMBER_AXES = ("elements",)
# Words for values that would be ambiguous: "both" is also a direction of copies.
_WORD_BY_VALUE: Mapping[tuple[str, Axis], str] = {(MEASUREMENT_AXIS, "both"): "together"}
# Labels show the command of a bench whose name is not that of its command.
_COMMAND_BY_BENCH = {"copy-overlap": "copy --overlap"}
# Some axes have a title that differs from their name: "kind" is the node type of a graph.
_TITLE_BY_AXIS = {"kind": "node type"}


class LabelledCase(Protocol):
    """A case that a label can name: a result, or a comparison of two results."""

    @property
    def name(self) -> str: ...
    @property
    def axes(self) -> Mapping[str, Axis]: ...
    @property
    def library(self) -> str: ...


class _CaseWithSettings(LabelledCase, Protocol):
    @property
    def settings(self) -> Mapping[str, object]: ...


def called_library(case: _CaseWithSettings) -> str:
    """Return the library of a case as reports name it; for cudakit, the library that cudakit calls."""
    words = str(case.settings.get("library", "")).split()
    return words[0] if case.library == CUDAKIT and words else case.library


def axis_names(cases: Sequence[LabelledCase]) -> list[str]:
    """Return the axes of all cases, in the order of first appearance."""
    return list(dict.fromkeys(name for case in cases for name in case.axes))


def varying_axes(cases: Sequence[LabelledCase]) -> list[str]:
    """Return the axes whose values differ between cases; all axes of a single case."""
    all_axes = axis_names(cases)
    if len(cases) < 2:
        return all_axes
    return [name for name in all_axes if len({case.axes.get(name) for case in cases}) > 1]


def describe_common_axes(cases: Sequence[LabelledCase]) -> str:
    """Return the axes that have one value in all cases: ``dtype bf16, layout nn``."""
    varying = varying_axes(cases)
    return ", ".join(
        f"{axis_title(name)} {format_axis(name, value)}"
        for name, value in (cases[0].axes.items() if cases else ())
        if name not in varying
    )


def short_labels(
    cases: Sequence[LabelledCase], *, omitted_axes: Collection[str] = (), with_library: bool = True
) -> list[str]:
    """Return for each case a label of the axes that vary: ``bf16 8192³ by torch``.

    The labels leave out ``omitted_axes``. With ``with_library``, labels of baselines end with their library.
    If no axis varies, the label is the name of the bench.
    """
    shown = [name for name in varying_axes(cases) if name not in omitted_axes]
    if not set(DIMENSIONS).isdisjoint(shown):
        # One dimension of a GEMM alone would be ambiguous.
        shown = [name for name in axis_names(cases) if name in shown or name in DIMENSIONS]
    with_bench = len({case.name for case in cases}) > 1
    return [
        _label(
            case.name,
            case.axes,
            shown,
            case.library if with_library else CUDAKIT,
            with_bench=with_bench,
        )
        for case in cases
    ]


def full_label(case: LabelledCase) -> str:
    """Return a label of all axes of a case: ``gemm 8192³ bf16 tn``."""
    return axes_label(case.name, case.axes, case.library)


def axes_label(name: str, axes: Mapping[str, Axis], library: str = CUDAKIT) -> str:
    """Return a label of all of these axes: ``memory copy 4.00 KiB``."""
    return _label(name, axes, list(axes), library, with_bench=True)


def describe_subset(
    described_cases: Sequence[LabelledCase], all_cases: Sequence[LabelledCase]
) -> str:
    """Return the first labels of a subset of cases and the number of others, or ``all 18 cases``."""
    if len(described_cases) == len(all_cases) > 1:
        return "both cases" if len(all_cases) == 2 else f"all {len(all_cases)} cases"
    label_by_id = dict(zip(map(id, all_cases), short_labels(all_cases), strict=True))
    return join_first_names([label_by_id[id(case)] for case in described_cases])


def join_first_names(names: Sequence[str], count: int = 3, separator: str = ", ") -> str:
    """Join the first ``count`` names, and append the number of others."""
    remaining_text = f" and {len(names) - count} more" if len(names) > count else ""
    return separator.join(names[:count]) + remaining_text


def count_cases(count: int) -> str:
    """Return ``1 case`` or ``3 cases``."""
    return "1 case" if count == 1 else f"{count} cases"


def describe_sizes(cases: Sequence[LabelledCase]) -> str:
    """Return the size or shape of the cases of each bench: ``copy 1.00 GiB, gemm 8192³``."""
    texts: dict[str, None] = {}
    for case in cases:
        if DIMENSIONS[0] in case.axes:
            texts[f"{case.name} {_format_dimensions(case.axes)}"] = None
        elif "size_bytes" in case.axes:
            texts[f"{case.name} {format_axis('size_bytes', case.axes['size_bytes'])}"] = None
    return ", ".join(texts)


def is_square(case: LabelledCase) -> bool:
    """Return whether m, n and k of a GEMM are equal."""
    sizes = [case.axes.get(name) for name in DIMENSIONS]
    return sizes[0] is not None and len(set(sizes)) == 1


def axis_value(name: str, value: Axis | None) -> Value:
    """Return the value of an axis as a cell of a table; "-" if the case does not have the axis."""
    if value is None:
        return Text("-")
    if name.endswith("_bytes") and isinstance(value, int):
        return Bytes(value)
    return Text(format_axis(name, value))


def format_axis(name: str, value: Axis | None) -> str:
    """Format the value of an axis with its unit."""
    if value is None:
        return "-"
    if not isinstance(value, int):
        return _WORD_BY_VALUE.get((name, value), str(value))
    if name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:,}" if name in _LARGE_NUMBER_AXES else str(value)


def axis_title(name: str) -> str:
    """Return the title of an axis: its name without the unit."""
    return _TITLE_BY_AXIS.get(name) or name.removesuffix("_bytes").replace("_", " ")


def _label(
    name: str,
    axes: Mapping[str, Axis],
    shown_axes: Sequence[str],
    library: str,
    *,
    with_bench: bool,
) -> str:
    # For the calls "launch" and "launch-to-start", the name of the call contains the name of the bench.
    call_names_bench = str(axes.get("call", "")).startswith(name)
    parts = [_COMMAND_BY_BENCH.get(name, name)] if with_bench and not call_names_bench else []
    for axis, value in axes.items():
        if axis not in shown_axes:
            continue
        if axis in DIMENSIONS and axes.keys() >= set(DIMENSIONS):
            parts += [_format_dimensions(axes)] if axis == DIMENSIONS[0] else []
        elif value is not None:
            parts.append(_format_with_title(axis, value))
    if library != CUDAKIT:
        parts = [*(parts or [name]), f"by {library}"]
    return " ".join(parts) or name


def _format_dimensions(axes: Mapping[str, Axis]) -> str:
    sizes = [axes[name] for name in DIMENSIONS]
    return f"{sizes[0]}³" if len(set(sizes)) == 1 else "×".join(map(str, sizes))


def _format_with_title(name: str, value: Axis) -> str:
    """Format a value for a label: words and sizes without title, other numbers after the axis title."""
    text = format_axis(name, value)
    if isinstance(value, str) or name.endswith("_bytes"):
        return text
    if name in _COUNTED_AXES:
        return f"{text} {name.removesuffix('s') if value == 1 else name}"
    return f"{_NOUN_BY_AXIS.get(name) or axis_title(name)} {text}"
