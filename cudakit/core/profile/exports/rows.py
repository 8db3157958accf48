"""Write the GPU work of a profile as CSV (RFC 4180): one row for each kernel, copy and memset."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np

from cudakit.core.profile.activities import Activities
from cudakit.core.profile.call_sites import call_site
from cudakit.core.profile.exports.texts import blocks, cached, printable
from cudakit.core.profile.timeline import Column, Timeline, WorkKind, timeline
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
    for process in activities:
        for text in _rows(timeline(process)):
            file.write(text.encode())


def _rows(process: Timeline) -> Iterator[str]:
    work = process.work
    names = cached(lambda name: _cell(process.names[name]))
    sites = cached(lambda site: _cell(call_site(process.stacks[site])) if site else "")
    kind_names = [kind.name.lower() for kind in WorkKind]
    for block in blocks(len(work.start_ns)):
        columns = (
            [str(process.process)] * len(work.start_ns[block]),
            _number_texts(work.device[block]),
            _number_texts(work.stream[block]),
            [kind_names[kind] for kind in work.kind[block].tolist()],
            map(names, work.name[block].tolist()),
            _number_texts(work.start_ns[block]),
            _number_texts(work.end_ns[block] - work.start_ns[block]),
            _number_texts(work.correlation[block]),
            _number_texts(work.graph_node[block]),
            _number_texts(work.size_bytes[block]),
            _kernel_cells(process, work.kind[block], work.record[block]),
            map(sites, work.site[block].tolist()),
        )
        yield "".join(",".join(row) + "\r\n" for row in zip(*columns, strict=True))


def _kernel_cells(process: Timeline, kind: Column, record: Column) -> list[str]:
    """Return the cells of the columns that only kernels have, joined by commas."""
    cells = np.full(len(kind), "," * (_KERNEL_COLUMNS - 1), object)
    is_kernel = kind == WorkKind.KERNEL
    kernels = process.activities.of(EventKind.KERNEL_RUN)[record[is_kernel]]
    columns = (
        *(kernels["grid"][:, axis] for axis in range(3)),
        *(kernels["block"][:, axis] for axis in range(3)),
        kernels["registers"],
        kernels["shared_bytes"],
    )
    cells[is_kernel] = [",".join(row) for row in zip(*map(_number_texts, columns), strict=True)]
    texts: list[str] = cells.tolist()
    return texts


def _number_texts(column: Column) -> list[str]:
    return list(map(str, column.tolist()))


def _cell(cell_text: str) -> str:
    """Return text as a cell: no formula, no control characters, quoted if it has separators."""
    cell = printable(cell_text)
    if cell.startswith(_FORMULA_CHARACTERS):
        cell = "'" + cell
    return '"' + cell.replace('"', '""') + '"' if _NEEDS_QUOTES.search(cell) else cell
