"""Read the segments and the trace of the pinned host allocator (torch 2.14).

PyTorch does not document the keys of host segments. So each value is read from all keys that PyTorch's other
structures use for it, and invalid segments are skipped instead of rejecting the file.
"""

from __future__ import annotations

import numpy as np

from cudakit.core.memory.load.columns import Warnings, is_range
from cudakit.core.memory.load.tables import StreamNumbers, Tables
from cudakit.core.memory.load.tree import Handles, Tree
from cudakit.core.memory.snapshot import (
    Blocks,
    BlockState,
    Codes,
    Ints,
    Mask,
    SegmentKind,
    Segments,
)

_ADDRESS_KEYS = ("address", "addr")
_SIZE_KEYS = ("size", "total_size")
_IN_USE_KEYS = ("allocated", "allocated_size", "is_allocated")
_ACTIVE_KEYS = ("active", "active_size", "is_active")
_POOL_KEYS = ("segment_pool_id", "pool_id")


def host_entries(tree: Tree, traces: Handles) -> Handles:
    """Return the entries of the host trace, which is a list of entries or, as for devices, of such lists."""
    is_nested = len(traces) > 0 and tree.is_list(int(traces[0]))
    return tree.children(traces)[1] if is_nested else traces


def read_host_state(
    tree: Tree, tables: Tables, streams: StreamNumbers, handles: Handles
) -> tuple[Segments, Blocks, Warnings]:
    """Return the host segments; each is one block."""
    tree.budget.spend_rows(len(handles))
    handles, address, size, warnings = _valid_segments(tree, handles)
    state, state_warnings = _states(tree, handles)
    stack = tables.stack_ids(tree.column(handles, "frames"))
    segments = Segments(
        address=address.view(np.uint64),
        size=size,
        stream=streams.number(tree.integers(tree.column(handles, "stream"))[0]),
        kind=np.full(len(size), SegmentKind.UNKNOWN, np.uint8),
        pool=tables.pool_ids(_first_present(tree, handles, _POOL_KEYS)),
        expandable=np.zeros(len(size), np.bool_),
        stack=stack,
    )
    blocks = Blocks(
        segment=np.arange(len(size), dtype=np.int32),
        address=segments.address,
        size=size,
        requested=np.where(state == BlockState.INACTIVE, 0, size),
        state=state,
        stack=stack,
    )
    return segments, blocks, warnings + state_warnings


def _valid_segments(tree: Tree, handles: Handles) -> tuple[Handles, Ints, Ints, Warnings]:
    """Return the segments with a valid address and size, by address."""
    address, has_address = _integers(tree, handles, _ADDRESS_KEYS)
    size, has_size = _integers(tree, handles, _SIZE_KEYS)
    usable_rows = np.flatnonzero(has_address & has_size & is_range(address, size))
    by_address = usable_rows[np.argsort(address[usable_rows].view(np.uint64), kind="stable")]
    skipped_count = len(handles) - len(by_address)
    warning = f"{skipped_count:,} host segments without a valid address or size were skipped"
    return (
        handles[by_address],
        address[by_address],
        size[by_address],
        (warning,) if skipped_count else (),
    )


def _states(tree: Tree, handles: Handles) -> tuple[Codes, Warnings]:
    in_use, has_use = _integers(tree, handles, _IN_USE_KEYS)
    active, has_active = _integers(tree, handles, _ACTIVE_KEYS)
    has_state = has_use | has_active
    state = np.select(
        [(in_use != 0) | ~has_state, active != 0],
        [BlockState.ALLOCATED, BlockState.PENDING_FREE],
        BlockState.INACTIVE,
    )
    n_without_state = int(np.count_nonzero(~has_state))
    warning = f"{n_without_state:,} host segments without a state count as in use"
    return state.astype(np.uint8), (warning,) if n_without_state else ()


def _integers(tree: Tree, handles: Handles, keys: tuple[str, ...]) -> tuple[Ints, Mask]:
    return tree.integers(_first_present(tree, handles, keys))


def _first_present(tree: Tree, handles: Handles, keys: tuple[str, ...]) -> Handles:
    """Return the value of the first key that is present."""
    first_nonzero = np.zeros(len(handles), np.uint64)
    for key in reversed(keys):
        values = tree.column(handles, key)
        first_nonzero = np.where(values != 0, values, first_nonzero)
    return first_nonzero
