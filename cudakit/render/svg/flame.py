"""Trees as icicle graphs: the root on top, children below their parent, widths proportional to values."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from zlib import crc32

from cudakit.document import Ratio, Tree
from cudakit.document.picture import percent
from cudakit.render.markup import Markup, element
from cudakit.render.values import format_value, magnitude

_ROW = 20
_LEVELS = 40
_PARTS = 3000
# Shares of the whole: a pixel of the page; and the width of a short label.
_NARROWEST = 0.001
_LABELLED = 0.02
# The number of tints in the stylesheet.
_TINTS = 6


@dataclass(frozen=True, slots=True)
class _Part:
    """A node of the tree on the page: ``left`` and ``width`` are shares of the whole."""

    tree: Tree
    left: float
    width: float
    level: int


def flame(tree: Tree) -> Markup:
    """Draw a tree, with the number of parts too narrow, too deep or too many to draw."""
    parts, left_out = _laid_out(tree)
    levels = 1 + max(part.level for part in parts)
    picture = element(
        "svg",
        element("title", tree.label),
        element("desc", f"{len(parts)} parts of {format_value(tree.value)} on {levels} levels"),
        *(_drawn(part, tree) for part in parts),
        class_="flame",
        role="img",
        width="100%",
        height=levels * _ROW,
    )
    remark = f"{left_out:,} parts are too small or too deep to be drawn." if left_out else None
    caption = element("p", remark, class_="caption") if remark else None
    return element("figure", picture, caption)


def _laid_out(tree: Tree) -> tuple[list[_Part], int]:
    """Place nodes level by level, so that a limit cuts the deepest ones first."""
    parts: list[_Part] = []
    waiting = deque([_Part(tree, 0.0, 1.0, 0)])
    left_out = 0
    while waiting:
        part = waiting.popleft()
        if part.width < _NARROWEST or part.level >= _LEVELS or len(parts) >= _PARTS:
            left_out += 1
            continue
        parts.append(part)
        waiting.extend(_children(part))
    return parts, left_out


def _children(part: _Part) -> list[_Part]:
    """Divide a part's width among its children; children that exceed their parent share its width."""
    values = [magnitude(child.value) for child in part.tree.children]
    whole = max(magnitude(part.tree.value), sum(values)) or 1.0
    left, children = part.left, []
    for child, value in zip(part.tree.children, values, strict=True):
        width = part.width * (value / whole)
        children.append(_Part(child, left, width, part.level + 1))
        left += width
    return children


def _drawn(part: _Part, root: Tree) -> Markup:
    """Draw a part as an SVG of its own, which cuts a label that is too long."""
    label, amount = part.tree.label, format_value(part.tree.value)
    whole = magnitude(root.value)
    share = f" ({format_value(Ratio(magnitude(part.tree.value) / whole))})" if whole else ""
    return element(
        "svg",
        element("title", f"{label} · {amount}{share}"),
        element("rect", class_=f"f{crc32(label.encode(errors='replace')) % _TINTS}"),
        element("text", f"{label}  {amount}", x=5, y=14) if part.width >= _LABELLED else None,
        x=percent(part.left),
        y=part.level * _ROW,
        width=percent(part.width),
        height=_ROW - 1,
    )
