"""Untrusted text without invisible characters, for all writers, and the only place that escapes for pages."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias


def escape_invisible(text: str) -> str:
    r"""Replace characters that Unicode does not count as printable by ``\x1b``, ``\n``, ``\u202e`` and so on.

    These characters are control characters, line ends, bidirectional overrides, zero-width and unassigned
    characters, and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else escape_sequence(character) for character in text
    )


def escape_sequence(character: str) -> str:
    """Return the escape sequence of a character in a Python string."""
    return character.encode("unicode_escape").decode("ascii")


def shorten(text: str, limit: int) -> str:
    """Cut text to ``limit`` characters, with an ellipsis at the end."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


# --- HTML and SVG ----------------------------------------------------------------------------------
#
# A plain string is text and is escaped. Only ``element``, ``join`` and ``escape`` return Markup.

# Maximum number of characters: of a text, which must not fill the page, and of a tooltip, which must fit the
# screen.
TEXT_LIMIT = 2000
TITLE_LIMIT = 300

_VOID_TAGS = frozenset({"br", "link", "meta"})
_SHAPE_TAGS = frozenset({"circle", "line", "path", "rect"})


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


Child: TypeAlias = str | None
Attribute: TypeAlias = str | int | float | bool | None


def element(tag: str, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element. A child that is not Markup is text; None is left out.

    In attribute names, "_" stands for "-", and a final "_" is ignored, as in "class_". An attribute that is
    None or False is left out; an attribute that is True has no value. Raises ValueError for attributes that
    the content-security policy of the page forbids: ``style``, event handlers and external links.
    """
    opening_tag = tag + "".join(_attribute_text(key, value) for key, value in attributes.items())
    if tag in _VOID_TAGS:
        return Markup(f"<{opening_tag}>")
    content = join(children)
    if tag in _SHAPE_TAGS and not content:
        return Markup(f"<{opening_tag}/>")
    return Markup(f"<{opening_tag}>{content}</{tag}>")


def join(children: Iterable[Child]) -> Markup:
    """Return elements and texts as one Markup."""
    return Markup(
        "".join(
            child if isinstance(child, Markup) else escape(child)
            for child in children
            if child is not None
        )
    )


def escape(text: str, *, limit: int = TEXT_LIMIT) -> Markup:
    """Escape markup and invisible characters, and cut the text to ``limit`` characters."""
    return Markup(html.escape(shorten(escape_invisible(text[: limit + 1]), limit)))


def _attribute_text(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    text = str(value) if isinstance(value, str | int) else f"{value:.6g}"
    is_external = name == "href" and not text.startswith(("#", "data:,"))
    if name == "style" or name.startswith("on") or is_external:
        raise ValueError(f'{name}="{text}" violates the page\'s content-security policy')
    # The data of a path and a content-security policy are long, and contain no text of a user.
    limit = 1 << 30 if name in {"d", "content"} else TITLE_LIMIT
    return f' {name}="{escape(text, limit=limit)}"'
