"""Write tables of columns as CSV (RFC 4180)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cudakit.errors import UsageError
from cudakit.report.document import Array, Columns, Document, walk
from cudakit.report.escape import escape_invisible

# Rows per chunk: about 64 KiB of text if each row has a stack.
_CHUNK_ROWS = 512

# Spreadsheets evaluate a cell that begins with one of these as a formula (OWASP, "CSV Injection"). The last
# four characters are the full-width forms of the first four.
_FORMULA_STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
# In locales with a decimal comma, spreadsheets read the semicolon as the separator of cells.
_NEEDS_QUOTES = re.compile('[",;]')


def render(source: Document | Sequence[Columns]) -> Iterator[str]:
    """Yield rows as CSV, in chunks of lines that end in CR LF.

    ``source`` is tables with the same columns, or a document, whose first table of columns is written.

    The header has the names of the arrays. An id is written as its ``text``; an id without a text, NaN and
    masked items are empty cells. Unsigned integers named ``address`` or ``*_address`` are hexadecimal. Text
    that a spreadsheet would evaluate as a formula has a leading apostrophe.

    Raises UsageError if the document has no Columns, ValueError if the arrays of a table differ in length.
    """
    tables: Sequence[Columns]
    if not isinstance(source, Document):
        tables = source
    else:
        tables = [node for node in walk(source.nodes) if isinstance(node, Columns)][:1]
        if not tables:
            raise UsageError(
                f"{source.title!r} has no rows to write as CSV",
                hint="choose another output format, such as json",
            )
    for table in tables:
        lengths = {name: len(array) for name, array in table.arrays.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the arrays of {table.name!r} differ in length: {lengths}")
    return _csv_chunks(tables)


def _csv_chunks(tables: Sequence[Columns]) -> Iterator[str]:
    yield ",".join(map(_text_cell, tables[0].arrays if tables else ())) + "\r\n"
    for table in tables:
        arrays_with_writers = [
            (array, _cell_writer(name, array, table.text.get(name)))
            for name, array in table.arrays.items()
        ]
        row_count = max(map(len, table.arrays.values()), default=0)
        for first_row in range(0, row_count, _CHUNK_ROWS):
            cells_by_column = [
                cells_of(array[first_row : first_row + _CHUNK_ROWS])
                for array, cells_of in arrays_with_writers
            ]
            # Readers skip empty lines, so an empty cell alone in its line is quoted.
            yield "".join(
                [(",".join(row) or '""') + "\r\n" for row in zip(*cells_by_column, strict=True)]
            )


def _cell_writer(
    name: str, array: Array, texts: tuple[str, ...] | None
) -> Callable[[Array], list[str]]:
    """Return the function that formats the items of one column."""
    if texts is not None:
        cell_by_id = np.array([*map(_text_cell, texts), ""], dtype=object)
        last = len(texts)

        def text_cells(ids: Array) -> list[str]:
            indices = ids.astype(np.int64)
            known_indices = np.where((indices >= 0) & (indices < last), indices, last)
            cells: list[str] = cell_by_id[known_indices].tolist()
            return cells

        return text_cells
    match array.dtype.kind:
        case "u" if name == "address" or name.endswith("_address"):
            return lambda array: list(map(hex, array.tolist()))
        case "b":
            return lambda array: ["true" if item else "false" for item in array.tolist()]
        case "i" | "u":
            # tolist() returns None for a masked item.
            return lambda array: ["" if item is None else str(item) for item in array.tolist()]
        case "f":
            return lambda array: ["" if math.isnan(item) else str(item) for item in array.tolist()]
    return lambda array: [_text_cell(str(item)) for item in array.tolist()]


def _text_cell(text: str) -> str:
    """Format text as a cell: no formula, no invisible characters, quoted if it has separators."""
    cell = escape_invisible(text)
    if cell.startswith(_FORMULA_STARTS):
        cell = "'" + cell
    return '"' + cell.replace('"', '""') + '"' if _NEEDS_QUOTES.search(cell) else cell
