"""The drawing of the memory layout: segments in rows, with their blocks."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markup_tree import Node, read

from cudakit.core.memory.present.layout import memory_layout
from cudakit.core.memory.present.layout_pieces import (
    IN_USE,
    PENDING,
    ROUNDING,
    Pieces,
    pieces_of,
    spans_of,
)
from cudakit.core.memory.present.layout_rows import grouped, largest_segments, rows
from cudakit.document import Columns
from cudakit.render.svg.figure import figure

MIB, GIB = 2**20, 2**30


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


def test_block_is_divided_into_requested_bytes_and_rounding() -> None:
    pieces = pieces_of(
        blocks((0, 0, 512, 100, 1), (0, 512, 512, 0, 2), (0, 1024, 512, 0, 0)), np.array([4096])
    )
    rows_ = zip(pieces.use.tolist(), pieces.start.tolist(), pieces.size.tolist(), strict=True)
    assert list(rows_) == [(IN_USE, 0, 100), (ROUNDING, 100, 412), (PENDING, 512, 512)]


@pytest.mark.parametrize(
    "row", [(7, 0, 9, 9, 1), (-1, 0, 9, 9, 1), (0, 99, 9, 9, 1), (0, 5, -3, 1, 1), (0, 0, 9, 9, 77)]
)
def test_invalid_block_is_not_drawn(row: tuple[int, int, int, int, int]) -> None:
    assert len(pieces_of(blocks(row), np.array([64]))) == 0


@settings(deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=80), st.integers(2, 60), st.data())
def test_adjacent_blocks_are_drawn_adjacent(
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
    # The blocks have no gaps, so the drawing must have none.
    assert covered[:units].all()
    # Drawn parts share a unit only at the borders of wide blocks.
    wide = sum(size * units >= total for size in sizes)
    assert (spans.high - spans.low).sum() <= units + 2 * wide


def test_unit_with_several_thin_blocks_shows_the_largest_use() -> None:
    pieces = Pieces(
        np.zeros(3, np.int64),
        np.array([0, 10, 40]),
        np.array([10, 30, 10]),
        np.array([IN_USE, PENDING, IN_USE]),
    )
    spans = spans_of(pieces, np.array([0.01]))
    assert (spans.low.tolist(), spans.high.tolist(), spans.use.tolist()) == ([0], [1], [PENDING])


def test_million_thin_blocks_give_at_most_one_span_per_unit() -> None:
    count = 10**6
    pieces = Pieces(
        np.zeros(count, np.int64),
        np.arange(count) * 2,
        np.ones(count, np.int64),
        np.arange(count) % 3,
    )
    assert len(spans_of(pieces, np.array([1000 / (2 * count)])).low) <= 1000


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=60))
def test_rows_contain_every_segment_once(sizes: list[int]) -> None:
    columns = segments(*sizes)
    (group,) = grouped(columns, largest_segments(columns, limit=200))
    found = []
    for row in rows(group.segments):
        found += [segment.index for segment in row.segments]
        ends = [left + s.width for left, s in zip(row.lefts, row.segments, strict=True)]
        assert ends[-1] <= 1 + 1e-9
        assert all(end < left for end, left in zip(ends, row.lefts[1:], strict=False))
    assert sorted(found) == list(range(len(sizes)))


def layout(segment_columns: Columns, block_columns: Columns) -> Node:
    return read(figure(memory_layout([segment_columns, block_columns]))).one("figure")


def test_legend_sums_to_reserved_bytes() -> None:
    drawn = layout(segments(8 * MIB), blocks((0, 0, 4 * MIB, 3 * MIB, 1), (0, 4 * MIB, MIB, 0, 2)))
    assert [item.words for item in drawn.all("li")] == [
        "in use 3.00 MiB",
        "lost to rounding 1.00 MiB",
        "pending free 1.00 MiB",
        "free 3.00 MiB",
    ]


def test_segment_width_is_proportional_with_a_minimum() -> None:
    drawn = layout(segments(GIB, GIB // 4, 2 * MIB), blocks())
    bars = [node.attributes["width"] for node in drawn.all("rect", "ground")]
    assert bars == ["100%", "24.7%", "1.6%"]
    assert "Segments below 16.4 MiB are drawn at that size." in drawn.words


def test_two_segments_of_half_the_largest_share_a_row() -> None:
    (group,) = grouped(segments(32, 16, 16), np.arange(3))
    assert [row.label for row in rows(group.segments)] == ["32 B", "2 × 16 B"]


def test_segments_are_grouped_by_pool_stream_and_kind() -> None:
    drawn = layout(segments(GIB, GIB, kind=1), blocks((0, 0, GIB, GIB, 1)))
    heading = "default pool · stream 0 · large2 segments · 2.00 GiB · 50.0% in use"
    assert drawn.one("p", "group").words == heading


def test_only_the_largest_segments_are_drawn_and_the_rest_counted() -> None:
    drawn = layout(segments(*[2 * MIB] * 100, *[20 * MIB] * 200), blocks((250, 0, MIB, MIB, 1)))
    assert len(drawn.all("rect", "ground")) == 200
    assert "Only the largest 200 segments are drawn; 100 others (200 MiB) are not." in drawn.words


def test_layout_columns_have_segments_and_blocks() -> None:
    drawn = layout(segments(64 * MIB), blocks((0, 16 * MIB, 32 * MIB, 32 * MIB, 1)))
    assert drawn.one("path", "used").attributes["d"] == "M0 .5m500 0h999"
    assert drawn.one("rect", "over").one("title").words == "32.0 MiB in use, at offset 16.0 MiB"


def test_layout_of_100000_blocks_is_a_small_page() -> None:
    count, size = 100_000, 512
    many = blocks(*((i // 1000, i % 1000 * size, size, size, i % 3) for i in range(count)))
    markup = figure(memory_layout([segments(*[1000 * size] * 100), many]))
    assert len(markup) < 1_000_000
    assert not re.search(r"NaN|inf|-\d+%", markup)


def test_layout_without_segments_has_an_empty_legend() -> None:
    assert layout(segments(), blocks()).words.startswith("in use 0 B")
