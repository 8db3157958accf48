"""What a page draws: curves along an axis, and the roofline with the cases under it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cudakit.core.bench.compare import label
from cudakit.core.bench.limits import Limit
from cudakit.core.bench.present.axes import axis_names, axis_title
from cudakit.core.bench.present.cases import rate
from cudakit.core.bench.result import Axis, CaseResult
from cudakit.document import (
    Chart,
    Column,
    Columns,
    Node,
    Rate,
    Ratio,
    Section,
    Series,
    Table,
    Text,
    View,
)
from cudakit.units import Unavailable

# Fewer points are a table, not a curve.
_LEAST_POINTS = 3
# An axis that spans more than this is drawn by its logarithm.
_WIDE = 32


def sweeps(cases: Sequence[CaseResult]) -> Iterator[Node]:
    """Draw the share of the limit, or the time, along each axis of numbers that is long enough."""
    for name in axis_names(cases):
        lines = {
            words: points
            for words, points in _lines(cases, name).items()
            if len({point.axes[name] for point in points}) >= _LEAST_POINTS
        }
        if lines:
            columns = _sweep_columns(name, lines)
            picture = View("bench", (columns.name,), fallback=_curves(name, lines))
            yield Section(f"Along {axis_title(name)}", (columns, picture))


def roofline(cases: Sequence[CaseResult]) -> Iterator[Node]:
    """Place the cases that compute and move data by operations per byte, under what bounds them."""
    placed = [
        (case, case.limit)
        for case in cases
        if case.operations
        and case.bytes_moved
        and isinstance(case.limit, Limit)
        and not isinstance(case.median_s, Unavailable)
        and not isinstance(case.limit.operations_per_s, Unavailable)
        and not isinstance(case.limit.bytes_per_s, Unavailable)
    ]
    if placed:
        columns = _roofline_columns(placed)
        picture = View("bench", (columns.name,), fallback=_roofline_table(placed))
        yield Section("Roofline", (columns, picture))


def _lines(cases: Sequence[CaseResult], name: str) -> dict[str, list[CaseResult]]:
    """Group the cases that differ in one axis of numbers only, sorted along it."""
    lines: dict[str, list[CaseResult]] = {}
    for case in cases:
        value = case.axes.get(name)
        if not isinstance(value, int | float) or isinstance(case.median_s, Unavailable):
            continue
        others = [f"{k}={v}" for k, v in case.axes.items() if k != name]
        contender = [] if case.contender == "cudakit" else [f"by {case.contender}"]
        lines.setdefault(" ".join([case.name, *others, *contender]), []).append(case)
    return {words: sorted(line, key=lambda c: _at(c, name)) for words, line in lines.items()}


def _at(case: CaseResult, name: str) -> float:
    value: Axis = case.axes[name]
    return float(value) if isinstance(value, int | float) else 0.0


def _sweep_columns(name: str, lines: dict[str, list[CaseResult]]) -> Columns:
    points = [(at, case) for at, line in enumerate(lines.values()) for case in line]
    intervals = [
        (np.nan, np.nan) if isinstance(case.ci95_s, Unavailable) else case.ci95_s
        for _, case in points
    ]
    return Columns(
        f"sweep {name}",
        {
            "line": np.array([at for at, _ in points], np.int64),
            name: np.array([_at(case, name) for _, case in points], np.float64),
            "median_s": np.array([_known(case.median_s) for _, case in points], np.float64),
            "ci95_low_s": np.array([low for low, _ in intervals], np.float64),
            "ci95_high_s": np.array([high for _, high in intervals], np.float64),
            "ratio_to_limit": np.array([_known(case.ratio_to_limit) for _, case in points]),
        },
        {"line": tuple(lines)},
    )


def _curves(name: str, lines: dict[str, list[CaseResult]]) -> Chart:
    places = sorted({_at(case, name) for line in lines.values() for case in line})
    by_limit = all(
        not isinstance(case.ratio_to_limit, Unavailable) for line in lines.values() for case in line
    )
    wide = places[0] > 0 and places[-1] / places[0] > _WIDE
    title = axis_title(name)
    return Chart(
        kind="line",
        title="Share of the limit" if by_limit else "Time",
        x=np.log2(places) if wide else np.array(places, np.float64),
        series=tuple(
            Series(words, _heights(line, name, places, by_limit=by_limit), step=False)
            for words, line in lines.items()
        ),
        x_label=f"log2 of {title}" if wide else title,
        y_unit="ratio" if by_limit else "seconds",
    )


def _heights(
    line: list[CaseResult], name: str, places: list[float], *, by_limit: bool
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    heights = {
        _at(case, name): _known(case.ratio_to_limit if by_limit else case.median_s) for case in line
    }
    return np.array([heights.get(place, np.nan) for place in places], np.float64)


def _roofline_columns(placed: Sequence[tuple[CaseResult, Limit]]) -> Columns:
    cases = [case for case, _ in placed]
    limits = [found for _, found in placed]
    return Columns(
        "roofline",
        {
            "case": np.arange(len(placed)),
            "operations_per_byte": np.array([c.operations / c.bytes_moved for c in cases]),
            "operations_per_s": np.array([_known(c.per_second(c.operations)) for c in cases]),
            "peak_operations_per_s": np.array([_known(one.operations_per_s) for one in limits]),
            "peak_bytes_per_s": np.array([_known(one.bytes_per_s) for one in limits]),
        },
        {"case": tuple(map(label, cases))},
    )


def _roofline_table(placed: Sequence[tuple[CaseResult, Limit]]) -> Table:
    return Table(
        columns=(
            Column("case", "text"),
            Column("operations per byte", "number"),
            Column("rate", "number"),
            Column("roof", "number"),
            Column("of roof", "bar"),
        ),
        rows=tuple(
            (
                Text(label(case)),
                Text(f"{case.operations / case.bytes_moved:.3g}"),
                rate(case),
                Rate(case.operations / found.seconds, case.operation),
                Ratio(_known(case.ratio_to_limit)),
            )
            for case, found in placed
        ),
        caption="The roof is the least of peak arithmetic, and bandwidth times operations per byte.",
    )


def _known(value: float | Unavailable) -> float:
    return float("nan") if isinstance(value, Unavailable) else value
