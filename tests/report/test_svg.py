"""Charts and trees as SVG."""

from __future__ import annotations

import numpy as np
from markup_tree import Node, read

from cudakit.report.document import Chart, Marker, Series
from cudakit.report.svg import chart

KIB, MIB, GIB = 2**10, 2**20, 2**30


# --- charts


def draw_shape(node: Chart) -> Node:
    return read(chart(node)).one("figure")


def path(figure: Node) -> str:
    return figure.one("svg", "plot").all("path", "line")[0].attributes["d"] or ""


def curve(*, step: bool = True, **options: object) -> Chart:
    series = (Series("a", np.array([0, 4, 2]), step=step),)
    return Chart("t", np.arange(3), series, y_unit="count", **options)  # type: ignore[arg-type]


def test_step_holds_its_value_to_the_next_instant() -> None:
    assert path(draw_shape(curve())) == "M0 1000H1200V0H2400V500"


def test_last_step_of_a_curve_ends_at_the_end_of_the_chart() -> None:
    assert path(draw_shape(curve(x_end=4))) == "M0 1000H600V0H1200V500H2400"


def test_end_of_the_chart_adds_no_step_to_a_curve_without_steps() -> None:
    assert path(draw_shape(curve(step=False, x_end=4))) == "M0 1000L600 0L1200 500"


def test_curve_with_a_missing_last_value_has_no_last_step() -> None:
    series = (Series("a", np.array([0, 4, float("nan")])),)
    chart_with_gap = Chart("t", np.arange(3), series, y_unit="count", x_end=4)
    assert path(draw_shape(chart_with_gap)) == "M0 1000H600V0"


def test_curve_without_steps_has_straight_lines() -> None:
    assert path(draw_shape(curve(step=False))) == "M0 1000L1200 0L2400 500"


def drawn_path(x: list[float], y: list[float]) -> str:
    series = (Series("a", np.array(y), step=False),)
    return path(draw_shape(Chart("t", np.array(x), series, y_unit="count")))


def test_nan_and_infinity_interrupt_a_curve() -> None:
    nan, infinity = float("nan"), float("inf")
    drawn = drawn_path([0, 1, 2, 3, 4, 5, 6], [1, nan, 2, 3, infinity, infinity, 4])
    assert drawn == "M0 750M800 500L1200 250M2400 0"


def test_curve_that_is_out_of_order_is_sorted() -> None:
    assert drawn_path([3, 1, 2], [4, 0, 2]) == "M0 1000L1200 500L2400 0"


def test_value_too_large_to_draw_is_left_out() -> None:
    assert drawn_path([0, 1, 2], [0, 1e308, 4]) == "M0 1000M2400 0"


def test_chart_without_data_has_a_sentence() -> None:
    empty = Chart("Use", np.array([]), (Series("a", np.array([])),))
    assert read(chart(empty)).one("p").words == "Use: no data"


def test_legend_names_each_series_with_its_maximum() -> None:
    series = (Series("reserved", np.array([GIB, 0])), Series("used", np.array([0, np.nan])))
    figure = draw_shape(Chart("t", np.arange(2), series))
    assert [item.words for item in figure.all("li")] == ["reservedmax 1.00 GiB", "usedmax 0 B"]


def test_colors_repeat_with_dashes() -> None:
    many = tuple(Series(str(i), np.arange(2)) for i in range(9))
    paths = draw_shape(Chart("t", np.arange(2), many)).one("svg", "plot").all("path")
    assert len({node.attributes["class"] for node in paths}) == 9


def test_close_markers_use_several_lines_and_the_last_have_no_label() -> None:
    markers = tuple(Marker(1 + i / 1000, "step") for i in range(6))
    flags = draw_shape(curve(markers=markers)).all("g", "marker")
    heights = [node.all("text")[0].attributes["y"] for node in flags if node.all("text")]
    assert heights == ["13", "31", "49", "67"]
    assert [node.one("title").words for node in flags] == ["▾ step"] * 6


def test_label_of_a_marker_at_the_right_end_points_left() -> None:
    flag = draw_shape(curve(markers=(Marker(9, "OOM", "error"),))).one("g", "marker")
    assert flag.one("line").attributes["x1"] == "100%"
    assert "end" in flag.one("text").classes
    assert flag.one("text").words == "✗ OOM"


def test_plot_draws_the_first_markers_and_counts_the_others() -> None:
    figure = draw_shape(curve(markers=(Marker(1, "m"),) * 1200))
    assert len(figure.all("g", "marker")) == 200
    assert figure.one("p").words == "1,000 more markers are not drawn."
