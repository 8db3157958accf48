"""What the allocator holds: from the lists of segments and blocks to columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.load.entries import MOST_BYTES, is_range
from cudakit.core.memory.load.tables import StreamNumbers, Tables
from cudakit.core.memory.load.tree import Handles, Tree
from cudakit.core.memory.snapshot import Blocks, BlockState, SegmentKind, Segments
from cudakit.errors import SnapshotError

_Sizes: TypeAlias = npt.NDArray[np.int64]

# The sum of all segments or blocks: far above any machine, and below it float64 is exact.
_MOST_TOTAL = 1 << 53

_KINDS = {"small": SegmentKind.SMALL, "large": SegmentKind.LARGE}
_STATES = {
    "active_allocated": BlockState.ALLOCATED,
    "active_pending_free": BlockState.PENDING_FREE,
    "active_awaiting_free": BlockState.PENDING_FREE,  # the word of torch's documentation
    "inactive": BlockState.INACTIVE,
}
_UNKNOWN = 255


@dataclass(frozen=True, slots=True)
class Pieces:
    """The segments of one device in address order, their blocks, and a sentence for each kind of defect."""

    segments: Segments
    blocks: Blocks
    warnings: tuple[str, ...] = ()


def segment_devices(tree: Tree, segments: Handles) -> npt.NDArray[np.int64]:
    """Say to which device each segment belongs; what a file does not say is device 0."""
    return tree.integers(tree.column(segments, "device"))[0]


def read_pieces(tree: Tree, tables: Tables, streams: StreamNumbers, handles: Handles) -> Pieces:
    """Read the segments of one device and their blocks.

    Raises SnapshotError for a segment without address or size, and for sizes that cannot be.
    """
    address, has_address = tree.integers(tree.column(handles, "address"))
    if not has_address.all():
        raise SnapshotError("a segment has no address: the file is damaged or no memory snapshot")
    order = np.argsort(address.view(np.uint64), kind="stable")
    handles, address = handles[order], address[order]
    size = _sizes(tree, handles, "total_size", what="segment")
    _refuse_impossible_place(address, size, what="segment")
    segments = Segments(
        address=address.view(np.uint64),
        size=size,
        stream=streams.number(tree.integers(tree.column(handles, "stream"))[0]),
        kind=tables.codes(tree.column(handles, "segment_type"), _KINDS, SegmentKind.UNKNOWN),
        pool=tables.pool_ids(tree.column(handles, "segment_pool_id")),
        expandable=tree.integers(tree.column(handles, "is_expandable"))[0] != 0,
        stack=tables.stack_ids(tree.column(handles, "frames")),
    )
    return Pieces(segments, *_read_blocks(tree, tables, segments, tree.column(handles, "blocks")))


def _read_blocks(
    tree: Tree, tables: Tables, segments: Segments, lists: Handles
) -> tuple[Blocks, tuple[str, ...]]:
    counts, handles = tree.children(lists)
    segment = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    size = _sizes(tree, handles, "size", what="block")
    address = _block_addresses(tree, handles, segments, segment, size)
    _refuse_impossible_place(address.view(np.int64), size, what="block")
    order = np.lexsort((address, segment))
    handles, address, size = handles[order], address[order], size[order]
    history = _last_use(tree, tree.column(handles, "history"))
    states = tree.column(handles, "state")
    state = tables.codes(states, _STATES, BlockState.INACTIVE)
    frames = tree.column(handles, "frames")
    blocks = Blocks(
        segment=segment,
        address=address,
        size=size,
        requested=_requested(tree, handles, history, size, state),
        state=state,
        stack=tables.stack_ids(
            np.where(frames == 0, _optional_column(tree, history, "frames"), frames)
        ),
    )
    return blocks, _warnings(tables.codes(states, _STATES, _UNKNOWN))


def _requested(
    tree: Tree, handles: Handles, history: Handles, size: _Sizes, state: npt.NDArray[np.uint8]
) -> _Sizes:
    requested, known = tree.integers(tree.column(handles, "requested_size"))
    used, has_used = tree.integers(_optional_column(tree, history, "real_size"))
    found = np.where(known, requested, np.where(has_used, used, size))
    return np.where(state == BlockState.INACTIVE, 0, np.clip(found, 0, size))


def _warnings(state: npt.NDArray[np.uint8]) -> tuple[str, ...]:
    if n := int(np.count_nonzero(state == _UNKNOWN)):
        return (f"{n:,} blocks are in a state that is not known and count as free",)
    return ()


def _last_use(tree: Tree, histories: Handles) -> Handles:
    """Find the newest use of each block in files from before torch 2.1; 0 where there is none."""
    counts, uses = tree.children(histories)
    starts = np.cumsum(counts) - counts
    newest = np.zeros(len(histories), np.uint64)
    newest[counts > 0] = uses[starts[counts > 0]]
    return newest


def _optional_column(tree: Tree, handles: Handles, key: str) -> Handles:
    found = np.zeros(len(handles), np.uint64)
    there = handles != 0
    found[there] = tree.column(handles[there], key)
    return found


def _block_addresses(
    tree: Tree,
    handles: Handles,
    segments: Segments,
    segment: npt.NDArray[np.int32],
    size: _Sizes,
) -> npt.NDArray[np.uint64]:
    """Read addresses; where a file has none (before torch 2.1), blocks lie one behind the other."""
    address, known = tree.integers(tree.column(handles, "address"))
    before = np.cumsum(size) - size
    first_of_segment = np.searchsorted(segment, segment)
    offset = (before - before[first_of_segment]).astype(np.uint64)
    return np.where(known, address.view(np.uint64), segments.address[segment] + offset)


def _sizes(tree: Tree, handles: Handles, key: str, *, what: str) -> _Sizes:
    size, known = tree.integers(tree.column(handles, key))
    if not known.all():
        raise SnapshotError(f"a {what} has no {key}: the file is damaged or no memory snapshot")
    wrong = (size < 0) | (size > MOST_BYTES)
    if wrong.any():
        raise SnapshotError(f"a {what} has a {key} of {size[wrong][0]} bytes: the file is damaged")
    if (total := float(size.sum(dtype=np.float64))) > _MOST_TOTAL:
        raise SnapshotError(f"the {what}s add up to {total:.0e} bytes: the file is damaged")
    return size


def _refuse_impossible_place(address: npt.NDArray[np.int64], size: _Sizes, *, what: str) -> None:
    wrong = ~is_range(address, size)
    if wrong.any():
        place = int(address.view(np.uint64)[wrong][0])
        raise SnapshotError(
            f"a {what} at {place:#x} lies beyond every address space: the file is damaged"
        )
