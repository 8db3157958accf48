"""Texts of exports: names without control characters, frames, call sites and JSON strings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

# Number of rows that are formatted at once, which bounds the memory of an export.
BLOCK_ROWS = 4096
# Number of characters to which a name is cut. Names of C++ templates have thousands of characters.
_MAX_CHARACTERS = 4000

TextOfIndex: TypeAlias = Callable[[int], str]


def printable_text(text: str) -> str:
    r"""Return untrusted text in one line, with escape sequences for all characters that cannot be printed.

    Such characters include control characters, bidirectional overrides, and lone surrogates, which UTF-8
    cannot encode.
    """
    text = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def json_string(text: str) -> str:
    """Return untrusted text as a JSON string, without escaped surrogate pairs, which Perfetto rejects."""
    return json.dumps(printable_text(text), ensure_ascii=False)


def cache_texts(text_of: Callable[[int], str]) -> TextOfIndex:
    """Return a function that computes the text of each index once."""
    text_by_index: dict[int, str] = {}

    def text(index: int) -> str:
        if index not in text_by_index:
            text_by_index[index] = text_of(index)
        return text_by_index[index]

    return text


def json_string_getter(item_texts: Sequence[str]) -> TextOfIndex:
    """Return a function from an index of a sequence to the item as a JSON string."""
    return cache_texts(lambda index: json_string(item_texts[index]))


def row_slices(row_count: int) -> Iterator[slice]:
    """Yield slices that divide ``row_count`` rows into blocks."""
    return (
        slice(first_row, first_row + BLOCK_ROWS) for first_row in range(0, row_count, BLOCK_ROWS)
    )
