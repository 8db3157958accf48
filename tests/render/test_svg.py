"""Pictures: ticks, thinning, charts, icicles and the memory layout."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markup_tree import Node, read

from cudakit.document import Array, Bytes, Chart, Columns, Count, Marker, Series, Tree
from cudakit.render.svg.chart import chart
from cudakit.render.svg.flame import flame
from cudakit.render.svg.layout import memory_layout
from cudakit.render.svg.pieces import IN_USE, PENDING, ROUNDING, Pieces, pieces_of, spans_of
from cudakit.render.svg.scale import Unit, rounded_axis, tight_axis
from cudakit.render.svg.segments import grouped, largest_segments, rows
from cudakit.render.svg.thin import thinned

KIB, MIB, GIB = 2**10, 2**20, 2**30

finite_floats = st.floats(-1e15, 1e15)


# --- axes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "unit", "labels"),
    [
        (0, 54 * GIB, "bytes", "0 B, 16 GiB, 32 GiB, 48 GiB"),
        (0, 1300 * MIB, "bytes", "0 B, 512 MiB, 1 GiB"),
        (0, 5 * GIB, "bytes", "0 B, 1 GiB, 2 GiB, 3 GiB, 4 GiB, 5 GiB"),
        (0, 3, "bytes", "0 B, 1 B, 2 B, 3 B"),
        (0, 0.0013, "seconds", "0 us, 500 us, 1000 us"),
        (0, 100, "seconds", "0 s, 20 s, 40 s, 60 s, 80 s, 100 s"),
        (0, 1000, "seconds", "0 min, 5 min, 10 min, 15 min"),
        (0, 90_000, "seconds", "0 h, 6 h, 12 h, 18 h, 24 h"),
        (0, 1e6, "seconds", "0 d, 5 d, 10 d"),
        (1_999_990, 2_000_010, "count", "1,999,990, 1,999,995, 2,000,000, 2,000,005, 2,000,010"),
        (0, 0.3, "count", "0"),
        (-0.1, 0.31, "ratio", "-10%, 0%, 10%, 20%, 30%"),
    ],
)
def test_ticks_are_round_in_the_unit_of_their_axis(
    low: float, high: float, unit: Unit, labels: str
) -> None:
    assert ", ".join(tick.label for tick in tight_axis(low, high, unit).ticks) == labels


@given(finite_floats, finite_floats, st.sampled_from(["bytes", "seconds", "count", "ratio"]))
def test_an_axis_of_amounts_holds_zero_and_its_data_and_ends_at_ticks(
    one: float, other: float, unit: Unit
) -> None:
    low, high = min(one, other), max(one, other)
    axis = rounded_axis(low, high, unit)
    assert axis.share(low) >= -1e-9
    assert axis.share(high) <= 1 + 1e-9
    assert axis.low <= 0 <= axis.high
    assert 2 <= len(axis.ticks) <= 13
    assert axis.share(axis.ticks[0].value) == pytest.approx(0)
    assert axis.share(axis.ticks[-1].value) == pytest.approx(1)


def test_an_axis_of_a_single_instant_has_a_width() -> None:
    axis = tight_axis(5, 5, "count")
    assert (axis.low, axis.high, [tick.label for tick in axis.ticks]) == (4.5, 5.5, ["5"])


# --- thinning --------------------------------------------------------------------------------------


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
    kept = thinned(x, y, low=low, high=high, columns=columns)
    assert len(kept.x) <= 2 * columns + 2
    for column in range(columns):
        inside, left = (_in_column(xs, column, columns, high) for xs in (x, kept.x))
        if inside.any():
            assert kept.y[left].min() == y[inside].min()
            assert kept.y[left].max() == y[inside].max()
    assert (np.diff(kept.x) >= 0).all()


def _in_column(x: Array, column: int, columns: int, high: float) -> Array:
    columns_of_x: Array = np.clip(x * (columns / high), 0, columns - 1).astype(int)
    return columns_of_x == column


def test_a_value_held_over_empty_columns_is_the_last_before_them() -> None:
    x = np.append(np.linspace(0, 1, 9), 100)
    y = np.array([5, 9, 1, 9, 7, 7, 7, 7, 7, 2])
    kept = thinned(x, y, low=0, high=100, columns=4)
    assert kept.y.tolist() == [5, 9, 1, 7, 2]


@pytest.mark.parametrize("value", [1e17, -1e300, 5e-324])
def test_an_axis_of_one_value_has_a_width_however_large_or_small_it_is(value: float) -> None:
    for axis in (tight_axis(value, value, "seconds"), rounded_axis(value, value, "seconds")):
        assert axis.low < axis.high
        assert len(axis.ticks) <= 13


def test_nan_interrupts_a_curve_and_infinity_too() -> None:
    y = np.array([1, np.nan, 2, 3, np.inf, np.inf, 4])
    kept = thinned(np.arange(7), y, low=0, high=6, columns=100)
    assert kept.y.tolist() == [1, 2, 3, 4]
    assert kept.starts.tolist() == [True, True, False, True]


def test_a_curve_that_is_out_of_order_is_sorted() -> None:
    kept = thinned(np.array([3, 1, 2]), np.array([30, 10, 20]), low=1, high=3, columns=9)
    assert kept.y.tolist() == [10, 20, 30]


# --- charts ----------------------------------------------------------------------------------------


def drawn(node: Chart) -> Node:
    return read(chart(node)).one("figure")


def path(figure: Node, kind: str) -> str:
    return figure.one("svg", "plot").all("path", kind)[0].attributes["d"] or ""


def curve(*, kind: str = "line", step: bool = True, **options: object) -> Chart:
    series = (Series("a", np.array([0, 4, 2]), step=step),)
    return Chart(kind, "t", np.arange(3), series, y_unit="count", **options)  # type: ignore[arg-type]


def test_a_step_holds_its_value_to_the_next_instant() -> None:
    assert path(drawn(curve()), "line") == "M0 1000H1200V0H2400V500"


def test_a_curve_without_steps_goes_straight() -> None:
    assert path(drawn(curve(step=False)), "line") == "M0 1000L1200 0L2400 500"


def test_an_area_reaches_down_to_zero() -> None:
    assert path(drawn(curve(kind="area")), "area") == "M0 1000L0 1000H1200V0H2400V500L2400 1000Z"


def test_a_million_points_become_a_path_of_a_few_kilobytes() -> None:
    x = np.arange(10**6)
    y = np.random.default_rng(0).integers(0, 10**11, len(x))
    assert len(chart(Chart("line", "t", x, (Series("a", y),)))) < 40_000


@pytest.mark.parametrize("kind", ["line", "area", "scatter", "bar", "matrix"])
def test_a_chart_without_data_says_so(kind: str) -> None:
    empty = Chart(kind, "Use", np.array([]), (Series("a", np.array([])),))  # type: ignore[arg-type]
    assert read(chart(empty)).one("p").words == "Use: no data"


def test_the_legend_names_each_series_with_its_peak() -> None:
    series = (Series("reserved", np.array([GIB, 0])), Series("used", np.array([0, np.nan])))
    figure = drawn(Chart("line", "t", np.arange(2), series))
    assert [item.words for item in figure.all("li")] == ["reservedpeak 1.00 GiB", "usedpeak 0 B"]


def test_colours_repeat_with_dashes() -> None:
    many = tuple(Series(str(i), np.arange(2)) for i in range(9))
    paths = drawn(Chart("line", "t", np.arange(2), many)).one("svg", "plot").all("path")
    assert len({node.attributes["class"] for node in paths}) == 9


def test_markers_that_are_close_stand_below_one_another_and_the_last_ones_lose_their_label() -> (
    None
):
    markers = tuple(Marker(1 + i / 1000, "step") for i in range(6))
    flags = drawn(curve(markers=markers)).all("g", "marker")
    heights = [node.all("text")[0].attributes["y"] for node in flags if node.all("text")]
    assert heights == ["13", "31", "49", "67"]
    assert [node.one("title").words for node in flags] == ["▾ step"] * 6


def test_the_label_of_a_marker_at_the_right_end_points_left() -> None:
    flag = drawn(curve(markers=(Marker(9, "OOM", "error"),))).one("g", "marker")
    assert flag.one("line").attributes["x1"] == "100%"
    assert "end" in flag.one("text").classes
    assert flag.one("text").words == "✗ OOM"


def test_of_very_many_markers_the_first_are_drawn_and_the_rest_counted() -> None:
    figure = drawn(curve(markers=(Marker(1, "m"),) * 1200))
    assert len(figure.all("g", "marker")) == 200
    assert figure.one("p").words == "1,000 more markers are not drawn."


def test_bars_rise_from_zero_and_fall_below_it() -> None:
    series = (Series("a", np.array([1, -1])),)
    figure = drawn(Chart("bar", "t", np.array(["up", "down"]), series, y_unit="count"))
    bars = [node.attributes for node in figure.all("rect", "bar")]
    assert [(bar["y"], bar["height"]) for bar in bars] == [("0%", "50%"), ("50%", "50%")]
    assert [bar.words for bar in figure.all("rect", "bar")] == ["up, a: 1", "down, a: -1"]


def test_points_that_coincide_are_one_dot() -> None:
    node = Chart("scatter", "t", np.zeros(9), (Series("a", np.ones(9)),), y_unit="count")
    assert path(drawn(node), "scatter").count("M") == 1


def test_the_largest_cell_of_a_matrix_is_the_darkest() -> None:
    rows_ = tuple(Series(f"gpu {i}", np.array([0, i * GIB, np.nan])) for i in range(3))
    figure = drawn(Chart("matrix", "peer", np.arange(3), rows_))
    shades = [node.attributes["fill-opacity"] for node in figure.all("rect", "cell")]
    assert shades == ["0", "0", "0", "0", "0.5", "0", "0", "1", "0"]
    assert figure.all("text", "figure")[-1].words == "n/a"


# --- trees -----------------------------------------------------------------------------------------


def widths(tree: Tree) -> list[float]:
    parts = read(flame(tree)).one("svg", "flame").all("svg")
    return [float((part.attributes["width"] or "").rstrip("%")) for part in parts]


def test_parts_are_as_wide_as_their_share_of_the_whole() -> None:
    half = Tree("half", Bytes(50), (Tree("tenth", Bytes(10)),))
    assert widths(Tree("all", Bytes(100), (half, Tree("quarter", Bytes(25))))) == [100, 50, 25, 10]


def test_parts_that_exceed_their_whole_share_it() -> None:
    assert widths(Tree("all", Bytes(1), (Tree("a", Bytes(3)), Tree("b", Bytes(1))))) == [
        100,
        75,
        25,
    ]


def test_a_tree_that_is_very_deep_is_cut_and_the_cut_is_named() -> None:
    tree = Tree("end", Count(1))
    for _ in range(5000):
        tree = Tree("f", Count(1), (tree,))
    assert len(widths(tree)) == 40
    assert "1 parts are too small or too deep to be drawn" in read(flame(tree)).words


def test_a_tree_of_nothing_is_drawn_as_one_part() -> None:
    assert widths(Tree("all", Bytes(0), (Tree("a", Bytes(0)),))) == [100]


# --- memory layout ---------------------------------------------------------------------------------


def segments(*sizes: int, kind: int = 0) -> Columns:
    count = len(sizes)
    arrays = {
        "address": np.arange(count, dtype=np.uint64) * np.uint64(2**44) + np.uint64(2**62),
        "size": np.array(sizes, np.int64),
        "stream": np.zeros(count, np.int32),
        "pool": np.zeros(count, np.int32),
        "kind": np.full(count, kind, np.uint8),
    }
    return Columns("segments", arrays, {"pool": ("default pool",), "kind": ("small", "large")})


def blocks(*rows_: tuple[int, int, int, int, int]) -> Columns:
    names = ("segment", "offset", "size", "requested", "state")
    table = np.array(rows_, np.int64).reshape(-1, 5)
    return Columns("blocks", dict(zip(names, table.T, strict=True)))


def test_a_block_is_divided_into_what_was_requested_and_rounding() -> None:
    pieces = pieces_of(
        blocks((0, 0, 512, 100, 1), (0, 512, 512, 0, 2), (0, 1024, 512, 0, 0)), np.array([4096])
    )
    rows_ = zip(pieces.use.tolist(), pieces.start.tolist(), pieces.size.tolist(), strict=True)
    assert list(rows_) == [(IN_USE, 0, 100), (ROUNDING, 100, 412), (PENDING, 512, 512)]


@pytest.mark.parametrize(
    "row", [(7, 0, 9, 9, 1), (-1, 0, 9, 9, 1), (0, 99, 9, 9, 1), (0, 5, -3, 1, 1), (0, 0, 9, 9, 77)]
)
def test_a_block_that_cannot_be_is_not_drawn(row: tuple[int, int, int, int, int]) -> None:
    assert len(pieces_of(blocks(row), np.array([64]))) == 0


@settings(deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=80), st.integers(2, 60), st.data())
def test_blocks_side_by_side_are_drawn_side_by_side(
    sizes: list[int], units: int, data: st.DataObject
) -> None:
    uses = data.draw(
        st.lists(st.sampled_from([IN_USE, PENDING]), min_size=len(sizes), max_size=len(sizes))
    )
    total = sum(sizes)
    starts = np.cumsum([0, *sizes[:-1]])
    zeros = np.zeros(len(sizes), np.int64)
    pieces = Pieces(zeros, starts, np.array(sizes), np.array(uses))
    spans = spans_of(pieces, np.array([units / total]))
    covered = np.zeros(units + 1, bool)
    for low, high in zip(spans.low, spans.high, strict=True):
        assert 0 <= low < high <= units
        covered[low:high] = True
    # The blocks leave no hole, and so must not what is drawn.
    assert covered[:units].all()
    # Drawn parts share a unit at most at each border of a wide block.
    wide = sum(size * units >= total for size in sizes)
    assert (spans.high - spans.low).sum() <= units + 2 * wide


def test_a_unit_with_several_thin_blocks_goes_to_the_use_that_has_most_of_it() -> None:
    pieces = Pieces(
        np.zeros(3, np.int64),
        np.array([0, 10, 40]),
        np.array([10, 30, 10]),
        np.array([IN_USE, PENDING, IN_USE]),
    )
    spans = spans_of(pieces, np.array([0.01]))
    assert (spans.low.tolist(), spans.high.tolist(), spans.use.tolist()) == ([0], [1], [PENDING])


def test_a_million_thin_blocks_are_no_more_spans_than_units() -> None:
    count = 10**6
    pieces = Pieces(
        np.zeros(count, np.int64),
        np.arange(count) * 2,
        np.ones(count, np.int64),
        np.arange(count) % 3,
    )
    assert len(spans_of(pieces, np.array([1000 / (2 * count)])).low) <= 1000


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=60))
def test_rows_hold_every_segment_once_within_their_width(sizes: list[int]) -> None:
    columns = segments(*sizes)
    (group,) = grouped(columns, largest_segments(columns, most=200))
    found = []
    for row in rows(group.segments):
        found += [segment.index for segment in row.segments]
        ends = [left + s.width for left, s in zip(row.lefts, row.segments, strict=True)]
        assert ends[-1] <= 1 + 1e-9
        assert all(end < left for end, left in zip(ends, row.lefts[1:], strict=False))
    assert sorted(found) == list(range(len(sizes)))


def layout(segment_columns: Columns, block_columns: Columns) -> Node:
    return read(memory_layout([segment_columns, block_columns])).one("figure")


def test_the_legend_of_a_layout_adds_up_to_what_is_reserved() -> None:
    figure = layout(segments(8 * MIB), blocks((0, 0, 4 * MIB, 3 * MIB, 1), (0, 4 * MIB, MIB, 0, 2)))
    assert [item.words for item in figure.all("li")] == [
        "in use 3.00 MiB",
        "rounding waste 1.00 MiB",
        "pending free 1.00 MiB",
        "free 3.00 MiB",
    ]


def test_segments_are_as_wide_as_large_but_never_too_thin_to_see() -> None:
    figure = layout(segments(GIB, GIB // 4, 2 * MIB), blocks())
    bars = [node.attributes["width"] for node in figure.all("rect", "ground")]
    assert bars == ["100%", "24.7%", "1.6%"]
    assert "Segments below 16.4 MiB are drawn as large as that." in figure.words


def test_two_segments_of_half_the_largest_share_a_row() -> None:
    (group,) = grouped(segments(32, 16, 16), np.arange(3))
    assert [row.label for row in rows(group.segments)] == ["32 B", "2 × 16 B"]


def test_segments_are_grouped_by_pool_stream_and_kind_in_words() -> None:
    figure = layout(segments(GIB, GIB, kind=1), blocks((0, 0, GIB, GIB, 1)))
    heading = "default pool · stream 0 · large2 segments · 2.00 GiB · 50.0% in use"
    assert figure.one("p", "group").words == heading


def test_of_very_many_segments_the_largest_are_drawn_and_the_rest_named() -> None:
    figure = layout(segments(*[2 * MIB] * 100, *[20 * MIB] * 200), blocks((250, 0, MIB, MIB, 1)))
    assert len(figure.all("rect", "ground")) == 200
    assert "The largest 200 segments; 100 others (200 MiB) are left out." in figure.words


def test_a_block_lies_in_its_segment_and_says_what_it_is() -> None:
    figure = layout(segments(64 * MIB), blocks((0, 16 * MIB, 32 * MIB, 32 * MIB, 1)))
    assert figure.one("path", "used").attributes["d"] == "M0 .5m500 0h999"
    assert figure.one("rect", "over").one("title").words == "32.0 MiB in use, 16.0 MiB in"


def test_a_layout_of_a_hundred_thousand_blocks_stays_a_small_page() -> None:
    count, size = 100_000, 512
    many = blocks(*((i // 1000, i % 1000 * size, size, size, i % 3) for i in range(count)))
    markup = memory_layout([segments(*[1000 * size] * 100), many])
    assert len(markup) < 1_000_000
    assert not re.search(r"NaN|inf|-\d+%", markup)


def test_a_layout_without_segments_is_an_empty_legend() -> None:
    assert layout(segments(), blocks()).words.startswith("in use 0 B")
