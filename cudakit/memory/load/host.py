"""Read the segments and the trace of the pinned host allocator (torch 2.14).

PyTorch does not document the keys of host segments. So each value is read from all keys that PyTorch's other
structures use for it, and invalid segments are skipped instead of rejecting the file.
"""

from __future__ import annotations

import numpy as np

from cudakit.memory.load.columns import Warnings, is_range
from cudakit.memory.load.tables import StreamNumbers, Tables
from cudakit.memory.load.tree import Handles, Tree
from cudakit.memory.snapshot import (
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
    states, state_warnings = _block_states(tree, handles)
    stack_ids = tables.stack_ids(tree.column(handles, "frames"))
    segments = Segments(
        address=address.view(np.uint64),
        size=size,
        stream=streams.number_streams(tree.integers(tree.column(handles, "stream"))[0]),
        kind=np.full(len(size), SegmentKind.UNKNOWN, np.uint8),
        pool=tables.pool_ids(_first_present_handles(tree, handles, _POOL_KEYS)),
        expandable=np.zeros(len(size), np.bool_),
        stack=stack_ids,
    )
    blocks = Blocks(
        segment=np.arange(len(size), dtype=np.int32),
        address=segments.address,
        size=size,
        requested=np.where(states == BlockState.INACTIVE, 0, size),
        state=states,
        stack=stack_ids,
    )
    return segments, blocks, warnings + state_warnings


def _valid_segments(tree: Tree, handles: Handles) -> tuple[Handles, Ints, Ints, Warnings]:
    """Return the segments with a valid address and size, by address."""
    address, has_address = _integers(tree, handles, _ADDRESS_KEYS)
    size, has_size = _integers(tree, handles, _SIZE_KEYS)
    usable_rows = np.flatnonzero(has_address & has_size & is_range(address, size))
    sorted_rows = usable_rows[np.argsort(address[usable_rows].view(np.uint64), kind="stable")]
    skipped_count = len(handles) - len(sorted_rows)
    warning = f"{skipped_count:,} host segments without a valid address or size were skipped"
    return (
        handles[sorted_rows],
        address[sorted_rows],
        size[sorted_rows],
        (warning,) if skipped_count else (),
    )


def _block_states(tree: Tree, handles: Handles) -> tuple[Codes, Warnings]:
    in_use_flags, has_use = _integers(tree, handles, _IN_USE_KEYS)
    active_flags, has_active = _integers(tree, handles, _ACTIVE_KEYS)
    has_state = has_use | has_active
    states = np.select(
        [(in_use_flags != 0) | ~has_state, active_flags != 0],
        [BlockState.ALLOCATED, BlockState.PENDING_FREE],
        BlockState.INACTIVE,
    )
    stateless_count = int(np.count_nonzero(~has_state))
    warning = f"{stateless_count:,} host segments without a state count as in use"
    return states.astype(np.uint8), (warning,) if stateless_count else ()


def _integers(tree: Tree, handles: Handles, keys: tuple[str, ...]) -> tuple[Ints, Mask]:
    return tree.integers(_first_present_handles(tree, handles, keys))


def _first_present_handles(tree: Tree, handles: Handles, keys: tuple[str, ...]) -> Handles:
    """Return the value of the first key that is present."""
    first_handles = np.zeros(len(handles), np.uint64)
    for key in reversed(keys):
        values = tree.column(handles, key)
        first_handles = np.where(values != 0, values, first_handles)
    return first_handles
