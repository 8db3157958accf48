"""Untrusted text without invisible characters, for all renderers."""

from __future__ import annotations


def escape_invisible(text: str) -> str:
    r"""Escape the characters that are not printable in Unicode, as ``\x1b``, ``\n`` or ``\u202e``.

    These are controls, ESC, newlines, bidirectional overrides, zero-width and unassigned characters, and lone
    surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else escape_sequence(c) for c in text)


def escape_sequence(character: str) -> str:
    """Return the escape sequence of a character in a Python string."""
    return character.encode("unicode_escape").decode("ascii")


def shorten(text: str, limit: int) -> str:
    """Cut text to ``limit`` characters, the last of which is then an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
