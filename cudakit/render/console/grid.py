"""Lines put beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from rich.text import Text


def padded(line: Text, width: int, *, right: bool = False) -> Text:
    """Fill a line with spaces to ``width`` cells, behind the words or (``right``) before them."""
    missing = max(width - line.cell_len, 0)
    if right:
        line.pad_left(missing)
    else:
        line.pad_right(missing)
    return line


def beside(left: Sequence[Text], right: Sequence[Text], *, at: int) -> list[Text]:
    """Put two blocks of lines side by side, the second beginning in column ``at``."""
    pairs = zip_longest(left, right, fillvalue=None)
    return [
        padded(first.copy() if first else Text(), at).append_text(second or Text())
        for first, second in pairs
    ]
