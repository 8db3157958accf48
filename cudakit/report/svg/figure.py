"""Render shapes and figures as markup."""

from __future__ import annotations

from cudakit.report.markup import Markup, element, escape, join
from cudakit.report.picture import Caption, Drawing, Figure, Key, Legend, Shape


def draw_shape(shape: Shape) -> Markup:
    """Return a shape with its children; labels and tooltips are escaped."""
    title = None if shape.title is None else element("title", shape.title)
    children = (
        escape(child, limit=shape.max_length) if isinstance(child, str) else draw_shape(child)
        for child in shape.children
    )
    return element(shape.kind, title, *children, **shape.attributes)


def figure(node: Figure) -> Markup:
    """Return the parts of a figure, from top to bottom."""
    title = element("figcaption", node.title) if node.title else None
    return element("figure", title, *map(_draw_part, node.parts), class_=node.kind)


def _draw_part(part: Legend | Drawing | Caption) -> Markup:
    match part:
        case Legend(keys, width):
            return element("ul", *(_legend_item(key, width) for key in keys), class_="legend")
        case Drawing():
            return _drawing(part)
        case Caption(text):
            return element("p", text, class_="caption")


def _legend_item(key: Key, width: int) -> Markup:
    sample_element = element(
        "svg", draw_shape(key.sample), class_="key", width=width, height=12, aria_hidden="true"
    )
    remark = join((" ", element("span", key.remark, class_="muted"))) if key.remark else None
    return element("li", sample_element, key.name, remark)


def _drawing(drawing: Drawing) -> Markup:
    return element(
        "svg",
        element("title", drawing.title),
        element("desc", drawing.description) if drawing.description else None,
        *map(draw_shape, drawing.shapes),
        class_="chart",
        role="img",
        width="100%",
        height=drawing.height,
    )
