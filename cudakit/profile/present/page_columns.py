"""The columns of the interactive page: joined and sorted, and small enough to be sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cudakit.profile.timeline import Column

# Number of characters to which names from traces are cut.
_MAX_TEXT_LENGTH = 400

PageTable = dict[str, Column]


def cut_text(text: str) -> str:
    """Return a text of at most 400 characters, so that a damaged trace makes no huge page."""
    return text if len(text) <= _MAX_TEXT_LENGTH else f"{text[:_MAX_TEXT_LENGTH]}…"


def sorted_table(columns: Iterable[str], tables: Sequence[PageTable]) -> tuple[Column, PageTable]:
    """Join tables and sort the rows by start. Return the order of the rows, and the table."""
    empty_column = np.empty(0, np.int64)
    joined_columns = {
        name: np.concatenate([empty_column, *(table[name] for table in tables)]).astype(np.int64)
        for name in columns
    }
    row_order = np.argsort(joined_columns["start"], kind="stable")
    return row_order, {name: column[row_order] for name, column in joined_columns.items()}


def sorted_by_track(work_columns: PageTable) -> PageTable:
    """Sort work by track, and replace starts and calls by differences, which makes the page smaller.

    Work of a track does not overlap, and mostly runs in the order of its calls, so that the gaps between work
    and the differences between the numbers of calls are small.
    """
    row_order = np.argsort(work_columns["track"], kind="stable")
    work_columns = {name: column[row_order] for name, column in work_columns.items()}
    previous_end = np.roll(work_columns["start"] + work_columns["duration"], 1)
    begins_track = np.diff(work_columns["track"], prepend=-1) != 0
    gap_before = work_columns.pop("start") - np.where(begins_track, 0, previous_end)
    return work_columns | {"gap": gap_before, "call": np.diff(work_columns["call"], prepend=0)}


def places_in(order: Column, searched_numbers: Column) -> Column:
    """Return the place of each number in an order; the place of -1 is -1."""
    places = np.empty(len(order) + 1, np.int64)
    places[order] = np.arange(len(order))
    places[-1] = -1
    return places[searched_numbers]


def as_small_as_possible(column: Column) -> Column:
    """Return a column as 8-bit integers if all of its values fit into 8 bits."""
    is_small = not len(column) or (column.min() >= 0 and column.max() < 256)
    return column.astype(np.uint8) if is_small else column
