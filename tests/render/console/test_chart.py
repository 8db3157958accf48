"""Charts on the terminal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.document import Chart, Marker, Series
from cudakit.render.console.chart import chart_lines
from cudakit.render.console.curves import column_maxima

X = np.arange(1000)
FLAT = Series("flat", np.full(1000, 100))


def drawn(chart: Chart, width: int = 60) -> list[str]:
    return [line.plain.rstrip() for line in chart_lines(chart, width)]


def area(*series: Series, **options: object) -> Chart:
    return Chart("area", "", X, series, **options)  # type: ignore[arg-type]


def test_a_peak_of_one_sample_is_seen() -> None:
    y = np.full(1000, 10)
    y[617] = 1000
    top = drawn(area(Series("memory", y)))[0]
    assert top.count("█") == 1


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=200),
    st.integers(1, 50),
    st.booleans(),
)
def test_the_highest_column_is_as_high_as_the_curve(y: list[int], columns: int, step: bool) -> None:
    heights = column_maxima(np.arange(len(y)), np.array(y), columns=columns, step=step)
    assert len(heights) == columns
    assert heights.max() == max(y)
    assert heights.min() >= min(y)


def test_a_step_holds_its_value_and_a_line_runs_on() -> None:
    x, y = np.array([0, 10]), np.array([0, 10])
    assert column_maxima(x, y, columns=5, step=True).tolist() == [0, 0, 0, 0, 10]
    assert column_maxima(x, y, columns=5, step=False).tolist() == [0, 2, 4, 6, 10]


def test_the_axes_carry_units() -> None:
    chart = Chart(
        "area", "Memory", np.array([0.0, 12.0]), (Series("allocated", np.array([0, 3 << 30])),),
        x_label="time", x_unit="seconds",
    )  # fmt: skip
    lines = drawn(chart, 40)
    assert lines[0] == "Memory"
    assert lines[1].startswith("3.00 GiB ┤")
    assert lines[5].startswith("1.50 GiB ┤")
    assert lines[9].startswith("     0 B ┼──")
    assert lines[10].split() == ["0", "s", "time", "12", "s"]
    assert lines[11] == "█ allocated  max 3.00 GiB"


def test_three_areas_differ_without_colour_and_the_lowest_is_the_darkest() -> None:
    chart = area(
        Series("reserved", np.full(1000, 90)),
        Series("active", np.full(1000, 30)),
        Series("allocated", np.full(1000, 60)),
    )
    lines = drawn(chart)
    assert lines[0][-1] == lines[1][-1] == "░"
    assert lines[3][-1] == "▒"
    assert lines[7][-1] == "█"
    assert " ".join(lines[-2:]).startswith("░ reserved")


@pytest.mark.parametrize("kind", ["line", "scatter"])
def test_lines_and_points_have_a_glyph_each(kind: str) -> None:
    series = tuple(Series(f"s{i}", np.full(1000, 30 * (i + 1))) for i in range(3))
    chart = Chart(kind, "", X, series)  # type: ignore[arg-type]
    glyphs = {line[-1] for line in drawn(chart)[:8] if line[-1] not in "│┤"}
    assert len(glyphs) == 3


def test_a_curve_that_another_hides_is_named_instead_of_drawn() -> None:
    lines = drawn(area(FLAT, Series("nearly", np.full(1000, 99))))
    assert lines[-2:] == [
        "█ flat  max 100 B",
        "nearly, max 99 B, is too close to flat to be drawn.",
    ]


def test_curves_beyond_the_third_are_named() -> None:
    series = [Series(f"s{i}", np.full(1000, 30 * (i + 1))) for i in range(5)]
    assert drawn(area(*series))[-1] == "Not drawn: s3, s4."


def test_gaps_in_a_curve_stay_empty() -> None:
    y = np.full(1000, 10.0)
    y[300:700] = np.nan
    row = drawn(area(Series("memory", y)))[7].partition("│")[2]
    assert [len(part) for part in row.split()] == [17, 17]


def test_markers_stand_under_their_instants_with_symbols_of_their_level() -> None:
    markers = (
        Marker(0, "start"), Marker(500, "peak", "warn"), Marker(999, "OOM", "error"),
    )  # fmt: skip
    lines = drawn(area(FLAT, markers=markers))
    axis, pointers = lines[8], lines[10]
    assert pointers.index("▲") == axis.index("┼") + 1
    assert abs(pointers.index("! peak") - (axis.index("┼") + len(axis)) // 2) <= 1
    assert pointers.endswith("OOM ✗")
    assert len(pointers) == len(axis)


def test_markers_too_close_to_one_another_take_lines_of_their_own() -> None:
    markers = tuple(Marker(500 + i, f"marker {i}") for i in range(5))
    lines = drawn(area(FLAT, markers=markers))
    assert [line.strip() for line in lines[10:14]] == [
        "▲ marker 0",
        "▲ marker 1",
        "▲ marker 2",
        "… 2 more markers",
    ]


def test_bars_become_a_table_of_the_highest() -> None:
    chart = Chart(
        "bar", "Sizes", np.arange(100), (Series("blocks", np.arange(100)),), y_unit="count"
    )
    lines = drawn(chart)
    assert len(lines) == 3 + 16 + 1
    assert lines[-2].split() == ["99", "99", "██████████", "100%"]
    assert lines[-1] == "84 lower bars are left out."


def test_a_matrix_becomes_a_table() -> None:
    rows = tuple(Series(f"cuda:{i}", np.array([i, i + 1])) for i in range(2))
    lines = drawn(Chart("matrix", "", np.arange(2), rows, y_unit="count"))
    assert [line.split() for line in lines[2:]] == [["cuda:0", "0", "1"], ["cuda:1", "1", "2"]]


def test_negative_values_lower_the_axis() -> None:
    lines = drawn(area(Series("change", np.linspace(-1024, 1024, 1000))))
    assert lines[0].startswith(" 1.00 KiB ┤")
    assert lines[8].startswith("-1.00 KiB ┼")


@pytest.mark.parametrize("kind", ["line", "area", "bar", "scatter", "matrix"])
def test_a_chart_without_data_says_so(kind: str) -> None:
    chart = Chart(kind, "Empty", np.array([]), (Series("a", np.array([])),))  # type: ignore[arg-type]
    assert drawn(chart) == ["Empty", "(no data)"]


def test_unknown_values_only_leave_an_empty_picture() -> None:
    lines = drawn(area(Series("power", np.full(1000, np.nan))))
    assert lines[-1].endswith("power  max n/a")
