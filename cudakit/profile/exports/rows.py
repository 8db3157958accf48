"""Write the GPU work of a profile as CSV (RFC 4180): one row for each kernel, copy and memset."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np

from cudakit.profile.activities import Activities
from cudakit.profile.call_sites import call_site
from cudakit.profile.exports.texts import cache_texts, printable_text, row_slices
from cudakit.profile.timeline import Column, Timeline, WorkKind, timeline
from cudakit.trace.kinds import EventKind

_COLUMNS = (
    "process", "device", "stream", "kind", "name", "start_ns", "duration_ns", "correlation",
    "graph_node", "size_bytes", "grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z",
    "registers", "shared_bytes", "call_site",
)  # fmt: skip
_KERNEL_COLUMNS = 8  # number of columns that only kernels have, from ``grid_x`` on
# Spreadsheets evaluate a cell that begins with one of these characters as a formula (OWASP, "CSV
# Injection"). The last four are the full-width forms.
_FORMULA_CHARACTERS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
# In locales with a decimal comma, spreadsheets read the semicolon as the separator of cells.
_NEEDS_QUOTES = re.compile('[",;]')


def write_csv(activities: Sequence[Activities], file: BinaryIO) -> None:
    """Write a row for each kernel, copy and memset, in the order of their starts within each process."""
    file.write((",".join(_COLUMNS) + "\r\n").encode())
    for process_activities in activities:
        for csv_text in _rows(timeline(process_activities)):
            file.write(csv_text.encode())


def _rows(process_timeline: Timeline) -> Iterator[str]:
    work = process_timeline.work
    name_cell = cache_texts(lambda name: _cell(process_timeline.names[name]))
    site_cell = cache_texts(
        lambda site: _cell(call_site(process_timeline.stacks[site])) if site else ""
    )
    kind_names = [kind.name.lower() for kind in WorkKind]
    for row_slice in row_slices(len(work.start_ns)):
        columns = (
            [str(process_timeline.process)] * len(work.start_ns[row_slice]),
            _number_texts(work.device[row_slice]),
            _number_texts(work.stream[row_slice]),
            [kind_names[kind] for kind in work.kind[row_slice].tolist()],
            map(name_cell, work.name[row_slice].tolist()),
            _number_texts(work.start_ns[row_slice]),
            _number_texts(work.end_ns[row_slice] - work.start_ns[row_slice]),
            _number_texts(work.correlation[row_slice]),
            _number_texts(work.graph_node[row_slice]),
            _number_texts(work.size_bytes[row_slice]),
            _kernel_cells(process_timeline, work.kind[row_slice], work.record[row_slice]),
            map(site_cell, work.site[row_slice].tolist()),
        )
        yield "".join(",".join(row) + "\r\n" for row in zip(*columns, strict=True))


def _kernel_cells(process_timeline: Timeline, kind: Column, record: Column) -> list[str]:
    """Return the cells of the columns that only kernels have, joined by commas."""
    cells = np.full(len(kind), "," * (_KERNEL_COLUMNS - 1), object)
    is_kernel = kind == WorkKind.KERNEL
    kernels = process_timeline.activities.records_of(EventKind.KERNEL_RUN)[record[is_kernel]]
    columns = (
        *(kernels["grid"][:, axis] for axis in range(3)),
        *(kernels["block"][:, axis] for axis in range(3)),
        kernels["registers"],
        kernels["shared_bytes"],
    )
    cells[is_kernel] = [",".join(row) for row in zip(*map(_number_texts, columns), strict=True)]
    cell_texts: list[str] = cells.tolist()
    return cell_texts


def _number_texts(column: Column) -> list[str]:
    return list(map(str, column.tolist()))


def _cell(cell_text: str) -> str:
    """Return text as a cell: no formula, no control characters, quoted if it has separators."""
    cell = printable_text(cell_text)
    if cell.startswith(_FORMULA_CHARACTERS):
        cell = "'" + cell
    return '"' + cell.replace('"', '""') + '"' if _NEEDS_QUOTES.search(cell) else cell
