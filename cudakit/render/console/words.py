"""Values as words that are safe to print, and the style that each kind calls for."""

from __future__ import annotations

from rich.text import Text

from cudakit.document import (
    Change,
    Value,
)
from cudakit.render import amounts
from cudakit.render.console import theme
from cudakit.render.console.escape import escaped
from cudakit.units import Unavailable


def words(value: Value) -> str:
    """Write a value on one line; a stack is the frame that a reader should see first."""
    return escaped(amounts.words(value))


def styled(value: Value) -> Text:
    """Write a value as a Text of rich, in its style."""
    return Text(words(value), style_of(value))


def style_of(value: Value) -> str:
    """Choose the style of a value: growth, shrinking and absence can be told from the rest."""
    match value:
        case Unavailable():
            return theme.FAINT
        case Change(size_bytes) if size_bytes > 0:
            return theme.WARN
        case Change(size_bytes) if size_bytes < 0:
            return theme.OK
        case _:
            return theme.PLAIN
