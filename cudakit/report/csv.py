"""Render the first Columns of a Document as CSV (RFC 4180)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from cudakit.errors import UsageError
from cudakit.report.columns import Texts, is_address, text_decoder
from cudakit.report.document import Array, Columns, Document, walk
from cudakit.report.escape import escape_invisible

# Rows per chunk: about 64 KiB of text if each row has a stack.
_CHUNK_ROWS = 512

# Spreadsheets evaluate a cell that begins with one of these as a formula (OWASP, "CSV Injection"). The last
# four characters are the full-width forms of the first four.
_FORMULA_STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
# In locales with a decimal comma, spreadsheets read the semicolon as the separator of cells.
_NEEDS_QUOTES = re.compile('[",;]')


def render(document: Document) -> Iterator[str]:
    """Yield the first Columns node as CSV, in chunks of lines that end in CR LF.

    The header has the names of the arrays. An id is written as its ``text``; an id without a text, NaN and
    masked items are empty cells. Unsigned integers named ``address`` or ``*_address`` are hexadecimal. Text
    that a spreadsheet would evaluate as a formula has a leading apostrophe.

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
    return _csv_chunks(columns, rows=max(lengths.values(), default=0))


def _csv_chunks(columns: Columns, *, rows: int) -> Iterator[str]:
    yield ",".join(map(_text_cell, columns.arrays)) + "\r\n"
    arrays_with_writers = [
        (array, _cell_writer(name, array, columns.text.get(name)))
        for name, array in columns.arrays.items()
    ]
    for first_row in range(0, rows, _CHUNK_ROWS):
        cells_by_column = [
            cells_of(array[first_row : first_row + _CHUNK_ROWS])
            for array, cells_of in arrays_with_writers
        ]
        # Readers skip empty lines, so an empty cell alone in its line is quoted.
        yield "".join(
            [(",".join(row) or '""') + "\r\n" for row in zip(*cells_by_column, strict=True)]
        )


def _cell_writer(name: str, array: Array, texts: tuple[str, ...] | None) -> Texts:
    """Return the function that formats the items of one column."""
    if texts is not None:
        return text_decoder(map(_text_cell, texts), unknown_text="")
    if is_address(name, array):
        return _address_cells
    kind = array.dtype.kind
    return {"b": _bool_cells, "i": _int_cells, "u": _int_cells, "f": _float_cells}.get(
        kind, _text_cells
    )


def _address_cells(array: Array) -> list[str]:
    return list(map(hex, array.tolist()))


def _bool_cells(array: Array) -> list[str]:
    return ["true" if item else "false" for item in array.tolist()]


def _int_cells(array: Array) -> list[str]:
    # tolist() returns None for a masked item.
    return ["" if item is None else str(item) for item in array.tolist()]


def _float_cells(array: Array) -> list[str]:
    return ["" if math.isnan(item) else str(item) for item in array.tolist()]


def _text_cells(array: Array) -> list[str]:
    return [_text_cell(str(item)) for item in array.tolist()]


def _text_cell(text: str) -> str:
    """Format text as a cell: no formula, no invisible characters, quoted if it has separators."""
    cell = escape_invisible(text)
    if cell.startswith(_FORMULA_STARTS):
        cell = "'" + cell
    return '"' + cell.replace('"', '""') + '"' if _NEEDS_QUOTES.search(cell) else cell
