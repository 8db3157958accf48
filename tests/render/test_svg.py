"""Charts and trees as SVG."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from markup_tree import Node, read

from cudakit.document import Array, Chart, Marker, Series
from cudakit.render.svg.chart import chart
from cudakit.render.svg.thin import thin_curve

KIB, MIB, GIB = 2**10, 2**20, 2**30


# --- thinning


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**4), st.integers(-50, 50)), min_size=1, max_size=300),
    st.integers(1, 30),
)
def test_thinning_keeps_the_extremes_of_every_column_in_two_points_each(
    points: list[tuple[int, int]], columns: int
) -> None:
    x, y = np.array(sorted(points), float).T
    low, high = 0.0, 10.0**4
    points = thin_curve(x, y, low=low, high=high, columns=columns)
    assert len(points.x) <= 2 * columns + 2
    for column in range(columns):
        inside, left = (_in_column(xs, column, columns, high) for xs in (x, points.x))
        if inside.any():
            assert points.y[left].min() == y[inside].min()
            assert points.y[left].max() == y[inside].max()
    assert (np.diff(points.x) >= 0).all()


def _in_column(x: Array, column: int, columns: int, high: float) -> Array:
    columns_of_x: Array = np.clip(x * (columns / high), 0, columns - 1).astype(int)
    return columns_of_x == column


def test_value_over_empty_columns_is_the_last_before_them() -> None:
    x = np.append(np.linspace(0, 1, 9), 100)
    y = np.array([5, 9, 1, 9, 7, 7, 7, 7, 7, 2])
    points = thin_curve(x, y, low=0, high=100, columns=4)
    assert points.y.tolist() == [5, 9, 1, 7, 2]


def test_nan_and_infinity_interrupt_a_curve() -> None:
    y = np.array([1, np.nan, 2, 3, np.inf, np.inf, 4])
    points = thin_curve(np.arange(7), y, low=0, high=6, columns=100)
    assert points.y.tolist() == [1, 2, 3, 4]
    assert points.starts.tolist() == [True, True, False, True]


def test_curve_that_is_out_of_order_is_sorted() -> None:
    points = thin_curve(np.array([3, 1, 2]), np.array([30, 10, 20]), low=1, high=3, columns=9)
    assert points.y.tolist() == [10, 20, 30]


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


def test_curve_without_steps_has_straight_lines() -> None:
    assert path(draw_shape(curve(step=False))) == "M0 1000L1200 0L2400 500"


def test_million_points_become_a_path_of_a_few_kilobytes() -> None:
    x = np.arange(10**6)
    y = np.random.default_rng(0).integers(0, 10**11, len(x))
    assert len(chart(Chart("t", x, (Series("a", y),)))) < 40_000


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
