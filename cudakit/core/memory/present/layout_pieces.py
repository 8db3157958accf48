"""Divide the blocks of segments into pieces by use, and scale the pieces to drawing units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.snapshot import Ints, concatenated, take
from cudakit.document import Columns

IN_USE: Final = 0
ROUNDING: Final = 1
PENDING: Final = 2
USES: Final = 3

# Codes of the column ``state``; other codes mean free.
_ALLOCATED, _PENDING_FREE = 1, 2

# In drawing units; absorbs floating-point errors before positions are rounded down.
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Pieces:
    """Parts of segments with one use, in bytes; ``start`` is the offset in the segment."""

    segment: Ints
    start: Ints
    size: Ints
    use: Ints

    def __len__(self) -> int:
        return len(self.segment)


@dataclass(frozen=True, slots=True)
class Spans:
    """Parts of segments with one use, in whole drawing units; a thin part can overlap a wider one."""

    segment: Ints
    low: Ints
    high: Ints
    use: Ints


def pieces_of(blocks: Columns, segment_sizes: Ints) -> Pieces:
    """Divide blocks into requested bytes and rounding. Free blocks have no pieces.

    ``blocks`` has the arrays ``segment``, ``offset``, ``size``, ``requested`` and ``state``; parts
    outside the segment are removed.
    """
    segment, offset, size, requested, state = (
        np.asarray(blocks.arrays[name]).astype(np.int64)
        for name in ("segment", "offset", "size", "requested", "state")
    )
    allocated = state == _ALLOCATED
    requested = np.where(allocated & (requested > 0), np.minimum(requested, size), size)
    parts = (
        (allocated, offset, requested, IN_USE),
        (allocated, offset + requested, size - requested, ROUNDING),
        (state == _PENDING_FREE, offset, size, PENDING),
    )
    pieces = Pieces(
        np.concatenate([segment[mask] for mask, _, _, _ in parts]),
        np.concatenate([start[mask] for mask, start, _, _ in parts]),
        np.concatenate([length[mask] for mask, _, length, _ in parts]),
        np.repeat([use for *_, use in parts], [int(mask.sum()) for mask, *_ in parts]),
    )
    return _clip_to_segments(pieces, segment_sizes)


def bytes_by_segment(pieces: Pieces, use: int, *, segments: int) -> Ints:
    """Sum the bytes of one use in each segment."""
    has_use = pieces.use == use
    # float64 is exact up to 2**53 bytes.
    sums = np.bincount(pieces.segment[has_use], pieces.size[has_use], minlength=segments)
    return sums.astype(np.int64)


def spans_of(pieces: Pieces, scale: npt.NDArray[np.float64]) -> Spans:
    """Scale pieces to drawing units; ``scale`` has the units per byte of each segment.

    Pieces thinner than a unit are merged: a unit gets the use with most bytes, and adjacent units of the same
    use become one span. Every piece is visible.
    """
    ends = pieces.start + pieces.size
    low, high = (position * scale[pieces.segment] + _TOLERANCE for position in (pieces.start, ends))
    is_wide = pieces.size * scale[pieces.segment] >= 1
    wide_spans = Spans(
        pieces.segment[is_wide],
        low[is_wide].astype(np.int64),
        high[is_wide].astype(np.int64),
        pieces.use[is_wide],
    )
    return concatenated(
        wide_spans, _merge_thin_pieces(take(pieces, ~is_wide), low[~is_wide].astype(np.int64))
    )


def _clip_to_segments(pieces: Pieces, segment_sizes: Ints) -> Pieces:
    pieces = take(pieces, (pieces.segment >= 0) & (pieces.segment < len(segment_sizes)))
    limit = segment_sizes[pieces.segment]
    start = np.clip(pieces.start, 0, limit)
    size = np.clip(pieces.start + pieces.size, 0, limit) - start
    return take(Pieces(pieces.segment, start, size, pieces.use), size > 0)


def _merge_thin_pieces(thin: Pieces, unit: Ints) -> Spans:
    """Assign a use to each unit, then join adjacent units of the same use."""
    order = np.lexsort((thin.use, unit, thin.segment))
    thin, unit = take(thin, order), unit[order]
    run_starts = _change_indices(thin.segment, unit, thin.use)
    sums = np.add.reduceat(thin.size, run_starts) if len(run_starts) else thin.size
    segment, unit, use = thin.segment[run_starts], unit[run_starts], thin.use[run_starts]

    # Sort by bytes within each unit, and keep the last, largest use.
    order = np.lexsort((sums, unit, segment))
    segment, unit, use = segment[order], unit[order], use[order]
    largest_uses = np.append(_change_indices(segment, unit)[1:], len(unit))[: len(unit)] - 1
    segment, unit, use = segment[largest_uses], unit[largest_uses], use[largest_uses]

    # For adjacent units, the difference between unit and index is constant.
    run_starts = _change_indices(segment, use, unit - np.arange(len(unit)))
    run_ends = np.append(run_starts[1:], len(unit))[: len(run_starts)] - 1
    return Spans(segment[run_starts], unit[run_starts], unit[run_ends] + 1, use[run_starts])


def _change_indices(*keys: Ints) -> Ints:
    """Return 0 and the indices at which any of the sorted keys changes."""
    if not len(keys[0]):
        return np.zeros(0, np.int64)
    changed = np.any([np.diff(key) != 0 for key in keys], axis=0)
    return np.concatenate(([0], np.flatnonzero(changed) + 1))
