"""Untrusted text without invisible characters, for all renderers."""

from __future__ import annotations


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
