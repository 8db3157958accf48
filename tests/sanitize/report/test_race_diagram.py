"""The diagram of a race on the page."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from markup_tree import Node, read

from cudakit.report.document import Columns, Document, Note, View
from cudakit.report.html import render
from cudakit.report.svg import figure
from cudakit.sanitize.report.race_diagram import race_diagram


def columns(
    *,
    lanes: tuple[str, ...] = ("stream 7", "the default stream"),
    lane: tuple[int, ...] = (0, 1, 0, 1),
    after: tuple[int, ...] = (-1, 0, -1, 2),
    label: str = "add",
) -> Columns:
    count = len(lane)
    return Columns(
        "race-1",
        {
            "lane": np.array(lane),
            "seq": np.array([101, 104, 107, 0][:count], np.uint64),
            "label": np.arange(count),
            "place": np.arange(count),
            "operation": np.array([False, False, True, True][:count]),
            "after": np.array(after),
        },
        {
            "lane": lanes,
            "label": ("event recorded", "wait", "copy", label)[:count],
            "place": ("a.py:1", "a.py:2", "", "a.py:4")[:count],
        },
    )


def drawn(columns_made: Columns) -> Node:
    return read(figure(race_diagram([columns_made]))).one("figure")


def fraction(node: Node, name: str) -> float:
    return float(str(node.attributes[name]).removesuffix("%"))


def test_lanes_and_calls_are_labelled() -> None:
    words = [text.words for text in drawn(columns()).all("text")]

    assert words[:2] == [
        "stream 7stream 7",
        "the default streamthe default stream",
    ]  # each text contains its tooltip
    assert words[2:] == [
        "event recorded",
        "a.py:1 · call 101",
        "wait",
        "a.py:2 · call 104",
        "copy",
        "call 107",
        "add",
        "a.py:4",
    ]


def test_missing_synchronization_is_drawn_differently() -> None:
    diagram = drawn(columns()).one("svg", "chart")

    assert len(diagram.all("line", "order")) == 1
    assert len(diagram.all("line", "missing")) == 1
    assert [item.words for item in drawn(columns()).all("li")] == [
        "synchronization",
        "missing synchronization",
    ]


def test_without_synchronization_no_arrow_and_no_legend_is_drawn() -> None:
    diagram = drawn(columns(lane=(0, 1), after=(-1, -1)))

    assert diagram.all("li") == []
    assert diagram.one("svg", "chart").all("line", "missing") == []


def test_calls_are_drawn_in_order_without_overlap() -> None:
    diagram = drawn(columns(lane=(0, 0, 0, 1), after=(-1, -1, -1, 2))).one("svg", "chart")
    boxes = [(fraction(box, "x"), fraction(box, "width")) for box in diagram.all("svg")]

    assert all(x + width < after for (x, width), (after, _) in pairwise(boxes[:3]))
    assert boxes[2][0] < boxes[3][0]
    assert all(x + width <= 100 for x, width in boxes)


@pytest.mark.parametrize(("lane", "down"), [((0, 1), True), ((1, 0), False)])
def test_arrow_is_drawn_between_the_lanes(lane: tuple[int, int], down: bool) -> None:
    columns_made = columns(lane=lane, after=(-1, 0))
    diagram = drawn(columns_made).one("svg", "chart")
    (line,) = diagram.all("line", "order")
    start, end = (fraction(line, name) for name in ("y1", "y2"))

    assert (start < end) is down
    assert min(start, end) > 0


def test_hostile_label_is_escaped() -> None:
    view = View("race", ("race-1",), race_diagram, Note("info", "no"))
    page = render(Document("t", (columns(label="<script>"), view)))

    assert "<script>" not in page
    assert read(page).one("figure", "race")


def test_page_defines_the_arrow_heads() -> None:
    page = read(render(Document("t", ())))

    assert {marker.attributes["id"] for marker in page.all("marker")} == {
        "head-order",
        "head-missing",
    }
