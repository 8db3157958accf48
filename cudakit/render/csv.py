"""The first Columns of a Document as CSV (RFC 4180), for spreadsheets and data frames."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.document import Columns, Document, walk
from cudakit.errors import UsageError

# Rows a chunk: near 64 KiB of text where each row names a stack.
_CHUNK_ROWS = 512

# A spreadsheet takes a cell that begins so for a formula (OWASP, "CSV Injection").
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NEEDS_QUOTES = re.compile('[",\r\n]')
_SURROGATE = re.compile("[\ud800-\udfff]")

_Array: TypeAlias = npt.NDArray[Any]
_Cells: TypeAlias = Callable[[_Array], list[str]]


def render(document: Document) -> Iterator[str]:
    """Write the first Columns node as CSV, in chunks of lines that end in CR LF.

    The header is the array names. Ids are written as their words in ``text``; an id without a word
    is an empty cell, as are NaN and masked items. Unsigned integers named ``address`` or
    ``*_address`` are written as ``0x`` hex. A word that a spreadsheet would take
    for a formula gets a leading apostrophe.

    Raises UsageError if the document has no Columns, ValueError if its arrays differ in length.
    """
    columns = next((node for node in walk(document.nodes) if isinstance(node, Columns)), None)
    if columns is None:
        raise UsageError(
            f"{document.title!r} has no rows to write as CSV",
            hint="choose another output format, such as json",
        )
    lengths = {name: len(array) for name, array in columns.arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the arrays of {columns.name!r} differ in length: {lengths}")
    return _chunks(columns, rows=max(lengths.values(), default=0))


def _chunks(columns: Columns, *, rows: int) -> Iterator[str]:
    yield ",".join(map(_word, columns.arrays)) + "\r\n"
    writers = [
        (array, _cells(name, array, columns.text.get(name)))
        for name, array in columns.arrays.items()
    ]
    for start in range(0, rows, _CHUNK_ROWS):
        block = [cells(array[start : start + _CHUNK_ROWS]) for array, cells in writers]
        # A line of nothing would be no row at all: a lone empty cell is quoted.
        yield "".join([(",".join(row) or '""') + "\r\n" for row in zip(*block, strict=True)])


def _cells(name: str, array: _Array, words: tuple[str, ...] | None) -> _Cells:
    """Choose how the items of one column are written."""
    if words is not None:
        return partial(_decoded, np.array([*map(_word, words), ""], dtype=object))
    kind = array.dtype.kind
    if kind == "u" and (name == "address" or name.endswith("_address")):
        return _addresses
    return {"b": _truths, "i": _integers, "u": _integers, "f": _decimals}.get(kind, _words)


def _decoded(words: _Array, ids: _Array) -> list[str]:
    empty = len(words) - 1
    index = ids.astype(np.int64)
    cells: list[str] = words[np.where((index >= 0) & (index < empty), index, empty)].tolist()
    return cells


def _addresses(array: _Array) -> list[str]:
    return list(map(hex, array.tolist()))


def _truths(array: _Array) -> list[str]:
    return ["true" if item else "false" for item in array.tolist()]


def _integers(array: _Array) -> list[str]:
    # A masked item, one that does not exist, is None here.
    return ["" if item is None else str(item) for item in array.tolist()]


def _decimals(array: _Array) -> list[str]:
    return ["" if math.isnan(item) else str(item) for item in array.tolist()]


def _words(array: _Array) -> list[str]:
    return [_word(str(item)) for item in array.tolist()]


def _word(word: str) -> str:
    """Make a cell of text: no formula, quoted where RFC 4180 asks for it, valid UTF-8."""
    cell = _SURROGATE.sub("\ufffd", word)
    if cell.startswith(_FORMULA):
        cell = "'" + cell
    return '"' + cell.replace('"', '""') + '"' if _NEEDS_QUOTES.search(cell) else cell
