"""The one place where text from a file becomes safe to print."""

from __future__ import annotations

import re

# Long enough for any sentence of ours; a name that is longer was made to flood the terminal.
LIMIT = 600

# Printable to Python, yet they change the width or the look of the character before them.
_VARIATION_SELECTOR = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]")


def escaped(text: str, *, limit: int = LIMIT) -> str:
    r"""Make text harmless: one line, nothing invisible, at most ``limit`` characters.

    What Unicode does not count as printable (controls, ESC, newlines, bidirectional overrides,
    zero-width and unassigned characters, lone surrogates) is written as ``\x1b``, ``\n``, ``\u202e``.
    """
    head = text[: limit + 1]
    if not head.isprintable() or _VARIATION_SELECTOR.search(head):
        head = "".join(map(_visible, head))
    return head if len(head) <= limit else head[: limit - 1] + "…"


def _visible(character: str) -> str:
    if character.isprintable() and not _VARIATION_SELECTOR.match(character):
        return character
    return character.encode("unicode_escape").decode("ascii")
