"""Sections of charts along an axis: the rate or time of cases that differ only in that axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.core.bench.present.columns import limit_s, number
from cudakit.core.bench.present.labels import SIZES, axis_names, axis_title, is_cube, short_labels
from cudakit.core.bench.present.sweep import sweep
from cudakit.core.bench.result import CaseResult, GraphCosts
from cudakit.document import Array, Chart, Columns, Node, Section, Series, View
from cudakit.units import Unavailable

# Fewer points are a table, not a curve.
_LEAST_POINTS = 3
# More lines in one chart cannot be distinguished.
_MOST_LINES = 9
# An axis with at least this ratio is logarithmic.
_WIDE = 8
# The axis of GEMMs of square matrices.
_CUBES = "m=n=k"


@dataclass(frozen=True, slots=True)
class _Line:
    """Cases that differ in one axis only, sorted along it."""

    name: str
    points: tuple[CaseResult, ...]
    colour: int  # the same for the same work, whoever did it
    contender: int  # 0 is ours


def sweeps(cases: Sequence[CaseResult], graphs: Sequence[GraphCosts] = ()) -> Iterator[Node]:
    """Chart the rate or the time along each numeric axis with enough points.

    The fits of ``graphs`` are drawn with their steps.
    """
    known = [case for case in cases if not isinstance(case.median_s, Unavailable)]
    # Square matrices have an additional axis.
    cubes = [_CUBES] if any(map(is_cube, known)) else []
    for name in [*cubes, *axis_names(known)]:
        if groups := _groups(known, name):
            pictures = (
                node for group in _panels(groups) for node in _picture(name, *group, graphs)
            )
            yield Section(f"Along {axis_title(name).replace('=', ' = ')}", tuple(pictures))


def _groups(cases: Sequence[CaseResult], name: str) -> list[list[CaseResult]]:
    """Group the cases that differ only in one numeric axis, sorted along it."""
    groups: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in cases:
        if _at(case, name) is not None:
            others = ((k, v) for k, v in case.axes.items() if k not in _axes_of(name))
            groups.setdefault((case.name, case.contender, *others), []).append(case)
    return [
        sorted(group, key=lambda case: _place(case, name))
        for group in groups.values()
        if len({_at(case, name) for case in group}) >= _LEAST_POINTS
    ]


def _axes_of(name: str) -> tuple[str, ...]:
    return SIZES if name == _CUBES else (name,)


def _at(case: CaseResult, name: str) -> float | None:
    if name == _CUBES:
        return _at(case, SIZES[0]) if is_cube(case) else None
    value = case.axes.get(name)
    return float(value) if isinstance(value, int | float) else None


def _place(case: CaseResult, name: str) -> float:
    return _at(case, name) or 0.0


def _panels(
    groups: Sequence[list[CaseResult]],
) -> Iterator[tuple[str, list[list[CaseResult]]]]:
    """Split many groups into titled charts, by the text axis that makes the fewest."""
    firsts = [group[0] for group in groups]
    by: dict[str, dict[str, list[list[CaseResult]]]] = {}
    for name in axis_names(firsts):
        panels: dict[str, list[list[CaseResult]]] = {}
        for group in groups:
            panels.setdefault(str(group[0].axes.get(name, "-")), []).append(group)
        if len(panels) > 1 and all(isinstance(first.axes.get(name), str) for first in firsts):
            by[name] = panels
    if len(groups) <= _MOST_LINES or not by:
        yield "", list(groups)
        return
    fitting = [one for one in by.values() if max(map(len, one.values())) <= _MOST_LINES]
    yield from min(fitting or by.values(), key=len).items()


def _picture(
    name: str, panel: str, groups: Sequence[list[CaseResult]], graphs: Sequence[GraphCosts]
) -> tuple[Node, ...]:
    lines = _lines(name, groups)
    columns = _columns(f"{name}: {panel}" if panel else name, name, lines, graphs)
    return columns, View("sweep", (columns.name,), sweep, _chart(name, lines))


def _lines(name: str, groups: Sequence[list[CaseResult]]) -> list[_Line]:
    firsts = [group[0] for group in groups]
    without = _axes_of(name)
    works = short_labels(firsts, without=without, contender=False)
    who = list(dict.fromkeys(["cudakit", *(first.contender for first in firsts)]))
    colours = list(dict.fromkeys(works))
    names = short_labels(firsts, without=without)
    return [
        _Line(words, tuple(group), colours.index(work), who.index(group[0].contender))
        for words, work, group in zip(names, works, groups, strict=True)
    ]


def _columns(
    title: str, name: str, lines: Sequence[_Line], graphs: Sequence[GraphCosts]
) -> Columns:
    points = [(at, line, case) for at, line in enumerate(lines) for case in line.points]
    cases = [case for _, _, case in points]
    nowhere = (np.nan, np.nan)
    intervals = [nowhere if isinstance(c.ci95_s, Unavailable) else c.ci95_s for c in cases]
    return Columns(
        f"sweep {title}",
        {
            "line": np.array([at for at, _, _ in points], np.int64),
            "colour": np.array([line.colour for _, line, _ in points], np.int64),
            "contender": np.array([line.contender for _, line, _ in points], np.int64),
            name: _floats(_place(case, name) for case in cases),
            "median_s": _floats(number(case.median_s) for case in cases),
            "ci95_low_s": _floats(low for low, _ in intervals),
            "ci95_high_s": _floats(high for _, high in intervals),
            "limit_s": _floats(map(limit_s, cases)),
            "fit_s": _floats(_fit_s(case, name, graphs) for case in cases),
            "amount": _floats(case.amount or np.nan for case in cases),
            "unit": np.zeros(len(cases), np.int64),
        },
        {"line": tuple(line.name for line in lines), "unit": (_unit(cases),)},
    )


def _fit_s(case: CaseResult, name: str, graphs: Sequence[GraphCosts]) -> float:
    """Return the fitted time of a step; NaN without a fit."""
    for graph in graphs:
        if (graph.topology, graph.kind) == (case.axes.get("topology"), case.axes.get("kind")):
            for step in graph.steps:
                if step.step == case.axes.get("step") and name == "nodes":
                    return number(step.fixed_s) + number(step.node_s) * _place(case, name)
    return float("nan")


def _unit(cases: Sequence[CaseResult]) -> str:
    """Return the unit of the rates; OP for mixed operations."""
    units = {case.unit for case in cases}
    return units.pop() if len(units) == 1 else "OP"


def _chart(name: str, lines: Sequence[_Line]) -> Chart:
    """Chart the share of the limit if all have one, else the time, for a terminal and for Markdown."""
    cases = [case for line in lines for case in line.points]
    places = sorted({_place(case, name) for case in cases})
    by_limit = not any(isinstance(case.ratio_to_limit, Unavailable) for case in cases)
    wide = places[0] > 0 and places[-1] / places[0] >= _WIDE
    title = axis_title(name)
    return Chart(
        title="Share of the limit" if by_limit else "Time",
        x=np.log2(places) if wide else np.array(places, np.float64),
        series=tuple(
            Series(line.name, _heights(line, name, places, by_limit=by_limit), step=False)
            for line in lines
        ),
        x_label=f"log2 of {title}" if wide else title,
        y_unit="ratio" if by_limit else "seconds",
    )


def _heights(line: _Line, name: str, places: list[float], *, by_limit: bool) -> Array:
    heights = {
        _place(case, name): number(case.ratio_to_limit if by_limit else case.median_s)
        for case in line.points
    }
    return _floats(heights.get(place, np.nan) for place in places)


def _floats(values: Iterable[float]) -> Array:
    return np.fromiter(values, np.float64)
