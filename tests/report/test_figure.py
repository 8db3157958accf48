"""Pictures of Views as markup: escaping of text, and attributes of shapes."""

from __future__ import annotations

import pytest
from markup_tree import read

from cudakit.report.axis import tight_axis
from cudakit.report.document import Document, Note, View
from cudakit.report.html import render
from cudakit.report.picture import (
    Caption,
    Drawing,
    Figure,
    Key,
    Legend,
    NoData,
    Picture,
    Plot,
    PlotKey,
    Shape,
    dots,
    polyline,
    shape,
)
from cudakit.report.svg import draw_shape

HOSTILE = "<script>alert(1)</script>\x1b\u202e"


def page(picture: Picture) -> str:
    view = View("picture", (), lambda _: picture, Note("info", "fallback"))
    return render(Document("t", (view,)))


def label(text: str) -> Shape:
    return shape("text", text, title=text, class_="name", x=0, y=0)


@pytest.mark.parametrize(
    "picture",
    [
        Figure(
            HOSTILE,
            (
                Legend((Key(shape("rect", width=1), HOSTILE, HOSTILE),), width=24),
                Drawing(HOSTILE, (label(HOSTILE),), height=10, description=HOSTILE),
                Caption(HOSTILE),
            ),
            title=HOSTILE,
        ),
        Plot(
            "line",
            HOSTILE,
            tight_axis(0, 1, "count"),
            tight_axis(0, 1, "count"),
            (label(HOSTILE),),
            (PlotKey(HOSTILE, HOSTILE, HOSTILE),),
            HOSTILE,
            HOSTILE,
        ),
        NoData(HOSTILE),
    ],
)
def test_every_text_of_a_picture_is_escaped(picture: Picture) -> None:
    text = page(picture)

    assert "<script>" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "&lt;script&gt;" in text


def test_picture_replaces_the_fallback_of_its_view() -> None:
    main = read(page(NoData("nothing to draw"))).one("main")

    assert main.one("p", "muted").words == "nothing to draw"
    assert "fallback" not in main.words


def test_long_label_is_cut_and_its_tooltip_is_whole() -> None:
    text = read(draw_shape(shape("text", "x" * 50, title="x" * 50, max_length=10))).one("text")

    assert text.one("title").words == "x" * 50
    assert text.text == "x" * 9 + "…"


def test_attribute_names_are_those_of_svg() -> None:
    markup = draw_shape(shape("g", shape("rect", width=1.5, x=None), class_="a", fill_opacity=0.5))

    assert markup == '<g class="a" fill-opacity="0.5"><rect width="1.5"/></g>'


@pytest.mark.parametrize("name", ["style", "onclick", "href"])
def test_shape_cannot_violate_the_content_security_policy(name: str) -> None:
    with pytest.raises(ValueError, match="content-security policy"):
        draw_shape(shape("rect", **{name: "https://example.com"}))


def test_paths_go_through_their_points() -> None:
    assert polyline([0, 10], [5, 6]) == "M0 5L10 6"
    assert dots([0, 10], [5, 6]) == "M0 5h0M10 6h0"
