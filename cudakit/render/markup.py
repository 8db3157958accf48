"""HTML and SVG text that is safe by construction: the only place that escapes for pages.

A plain string is text and is escaped; only ``element`` and ``join`` make Markup.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias

from cudakit.render.escape import escape_invisible, shorten

# A longer name would flood the page; a tooltip should fit a screen.
TEXT_LIMIT = 2000
TITLE_LIMIT = 300

_VOID = frozenset({"br", "link", "meta"})
_SHAPES = frozenset({"circle", "line", "path", "rect"})


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


Child: TypeAlias = str | None
Attribute: TypeAlias = str | int | float | bool | None


def element(tag: str, *children: Child, **attributes: Attribute) -> Markup:
    """Make an element; a child that is not Markup is text, None is nothing.

    Attribute names are given with ``_`` for ``-`` and may end in ``_`` (``class_``). None and False leave
    an attribute out, True writes it without a value. Raises ValueError for attributes that the page's
    content-security policy forbids: ``style``, event handlers, links that leave the page.
    """
    opening = tag + "".join(_attribute(key, value) for key, value in attributes.items())
    if tag in _VOID:
        return Markup(f"<{opening}>")
    content = join(children)
    if tag in _SHAPES and not content:
        return Markup(f"<{opening}/>")
    return Markup(f"<{opening}>{content}</{tag}>")


def join(children: Iterable[Child]) -> Markup:
    """Put elements and texts one after another."""
    return Markup("".join(_child(child) for child in children if child is not None))


def escape(text: str, *, limit: int = TEXT_LIMIT) -> Markup:
    """Escape text: no markup, nothing invisible, at most ``limit`` characters."""
    return Markup(html.escape(shorten(escape_invisible(text[: limit + 1]), limit)))


def _child(child: str) -> str:
    return child if isinstance(child, Markup) else escape(child)


def _attribute(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    text = str(value) if isinstance(value, str | int) else f"{value:.6g}"
    if name == "style" or name.startswith("on") or (name == "href" and not _is_inside(text)):
        raise ValueError(f'{name}="{text}" is against the page\'s content-security policy')
    return f' {name}="{escape(text, limit=_limit(name))}"'


def _limit(attribute: str) -> int:
    # Path data is long and contains no text of a file.
    return 1 << 30 if attribute == "d" else TITLE_LIMIT


def _is_inside(link: str) -> bool:
    return link.startswith(("#", "data:,"))
