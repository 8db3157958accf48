"""Charts on the terminal."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cudakit.report.console.chart import chart_lines, column_maxima
from cudakit.report.document import Chart, Marker, Series

X = np.arange(1000)
FLAT = Series("flat", np.full(1000, 100))


def drawn(chart: Chart, width: int = 60) -> list[str]:
    return [line.plain.rstrip() for line in chart_lines(chart, width)]


def lines_of(*series: Series, **options: object) -> Chart:
    return Chart("", X, series, **options)  # type: ignore[arg-type]


def test_peak_of_one_sample_is_drawn() -> None:
    y = np.full(1000, 10)
    y[617] = 1000
    top = drawn(lines_of(Series("memory", y)))[0]
    assert top.count("⠛") == 1


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=200),
    st.integers(1, 50),
    st.booleans(),
)
def test_highest_column_is_as_high_as_the_curve(y: list[int], columns: int, step: bool) -> None:
    heights = column_maxima(np.arange(len(y)), np.array(y), columns=columns, step=step)
    assert len(heights) == columns
    assert heights.max() == max(y)
    assert heights.min() >= min(y)


def test_step_keeps_its_value_and_line_is_interpolated() -> None:
    x, y = np.array([0, 10]), np.array([0, 10])
    assert column_maxima(x, y, columns=5, step=True).tolist() == [0, 0, 0, 0, 10]
    assert column_maxima(x, y, columns=5, step=False).tolist() == [0, 2, 4, 6, 10]


def test_axes_carry_units() -> None:
    chart = Chart(
        "Memory", np.array([0.0, 12.0]), (Series("allocated", np.array([0, 3 << 30])),),
        x_label="time", x_unit="seconds",
    )  # fmt: skip
    lines = drawn(chart, 40)
    assert lines[0] == "Memory"
    assert lines[1].startswith("3.00 GiB ┤")
    assert lines[5].startswith("1.50 GiB ┤")
    assert lines[9].startswith("     0 B ┼──")
    assert lines[10].split() == ["0", "s", "time", "12", "s"]
    assert lines[11] == "⠶ allocated  max 3.00 GiB"


def test_curves_have_different_glyphs() -> None:
    series = tuple(Series(f"s{i}", np.full(1000, 30 * (i + 1))) for i in range(3))
    chart = Chart("", X, series)
    glyphs = {line[-1] for line in drawn(chart)[:8] if line[-1] not in "│┤"}
    assert len(glyphs) == 3


def test_coinciding_curve_is_named_instead_of_drawn() -> None:
    lines = drawn(lines_of(FLAT, Series("nearly", np.full(1000, 99))))
    assert lines[-2:] == [
        "⠶ flat  max 100 B",
        "nearly (max 99 B) is too close to flat to be drawn.",
    ]


def test_curves_beyond_the_third_are_named() -> None:
    series = [Series(f"s{i}", np.full(1000, 30 * (i + 1))) for i in range(5)]
    assert drawn(lines_of(*series))[-1] == "Not drawn: s3, s4."


def test_gaps_in_a_curve_stay_empty() -> None:
    y = np.full(1000, 10.0)
    y[300:700] = np.nan
    row = drawn(lines_of(Series("memory", y)))[0].partition("┤")[2]
    assert [len(part) for part in row.split()] == [17, 17]


def test_markers_are_below_their_instants_with_the_symbol_of_their_level() -> None:
    markers = (
        Marker(0, "start"), Marker(500, "peak", "warn"), Marker(999, "OOM", "error"),
    )  # fmt: skip
    lines = drawn(lines_of(FLAT, markers=markers))
    axis, pointers = lines[8], lines[10]
    assert pointers.index("▲") == axis.index("┼") + 1
    assert abs(pointers.index("! peak") - (axis.index("┼") + len(axis)) // 2) <= 1
    assert pointers.endswith("OOM ✗")
    assert len(pointers) == len(axis)


def test_overlapping_markers_use_several_lines() -> None:
    markers = tuple(Marker(500 + i, f"marker {i}") for i in range(5))
    lines = drawn(lines_of(FLAT, markers=markers))
    assert [line.strip() for line in lines[10:14]] == [
        "▲ marker 0",
        "▲ marker 1",
        "▲ marker 2",
        "… 2 more markers",
    ]


def test_negative_values_lower_the_axis() -> None:
    lines = drawn(lines_of(Series("change", np.linspace(-1024, 1024, 1000))))
    assert lines[0].startswith(" 1.00 KiB ┤")
    assert lines[8].startswith("-1.00 KiB ┼")


def test_chart_without_data_has_a_sentence() -> None:
    chart = Chart("Empty", np.array([]), (Series("a", np.array([])),))
    assert drawn(chart) == ["Empty", "(no data)"]


def test_chart_of_nan_is_empty() -> None:
    lines = drawn(lines_of(Series("power", np.full(1000, np.nan))))
    assert lines[-1].endswith("power  max n/a")
