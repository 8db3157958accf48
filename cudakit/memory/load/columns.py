"""Read the events, segments and blocks of one device into columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from cudakit.errors import SnapshotError
from cudakit.memory.load.tables import StreamNumbers, Tables
from cudakit.memory.load.tree import Handles, Tree
from cudakit.memory.snapshot import (
    Addresses,
    Blocks,
    BlockState,
    Codes,
    Events,
    Ids,
    Ints,
    Mask,
    SegmentKind,
    Segments,
    take,
)
from cudakit.torch_rules.actions import Action

# GPUs address at most 49 bits (CUDA C++ Programming Guide, unified memory).
MAX_BYTES = 1 << 49
# Five-level paging addresses 57 bits (Intel SDM volume 3, 4.5), more than any GPU.
_MAX_ADDRESS = 1 << 57
# Limit of the total size of a trace: no valid trace exceeds it, and it is far below the limit of int64.
_MAX_TRACE_BYTES = 1 << 60

Warnings: TypeAlias = tuple[str, ...]

_ACTION_BY_NAME = {
    "alloc": Action.ALLOC,
    "free_requested": Action.FREE_REQUESTED,
    "free_completed": Action.FREE_COMPLETED,
    "free": Action.FREE,
    "segment_alloc": Action.SEGMENT_ALLOC,
    "segment_free": Action.SEGMENT_FREE,
    "segment_map": Action.SEGMENT_MAP,
    "segment_unmap": Action.SEGMENT_UNMAP,
    "snapshot": Action.SNAPSHOT,
    "oom": Action.OOM,
    "annotate": Action.ANNOTATE,
}


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The rows of one device: a range of the trace entries, the device of its segments, and its streams."""

    device: int
    entries: slice
    streams: StreamNumbers


def read_events(
    tree: Tree, tables: Tables, entries: Handles, devices: Iterable[DeviceRows]
) -> list[tuple[Events, Warnings]]:
    """Return the events of each device, and a warning per kind of defect.

    The entries of all devices are read together, so that a shared call stack is read once. An entry with an
    invalid address or size, or with an unknown action, becomes Action.UNKNOWN, so that the indices of events
    do not change. Raises SnapshotError if an entry is not a dictionary, and if the total size is impossible.
    """
    tree.budget.spend_rows(len(entries))
    action = tables.codes(tree.column(entries, "action"), _ACTION_BY_NAME, Action.UNKNOWN)
    address, has_address = tree.integers(tree.column(entries, "addr"))
    device_free, has_device_free = tree.integers(tree.column(entries, "device_free"))
    size, has_size = tree.integers(tree.column(entries, "size"))
    is_oom = action == Action.OOM
    moves_memory = (action != Action.UNKNOWN) & (action < Action.SNAPSHOT)
    has_range = has_address & is_range(address, size)
    is_invalid = (moves_memory & ~(has_range & has_size)) | (is_oom & ~(has_size & (size >= 0)))
    _check_total(size[moves_memory & ~is_invalid])
    pool_handles = tree.column(entries, "pool_id")
    raw_streams = tree.integers(tree.column(entries, "stream"))[0]
    events = Events(
        action=np.where(is_invalid, np.uint8(Action.UNKNOWN), action),
        address=np.where(is_oom & has_device_free, device_free, address).view(np.uint64),
        size=size,
        stream=np.zeros(len(entries), np.int32),
        time_us=tree.integers(tree.column(entries, "time_us"))[0],
        stack=tables.stack_ids(tree.column(entries, "frames")),
        pool=np.where(pool_handles == 0, np.int32(-1), tables.pool_ids(pool_handles)),
        compile_context=tables.text_ids(tree.column(entries, "compile_context")),
        user_metadata=tables.text_ids(tree.column(entries, "user_metadata")),
        category=tables.text_ids(tree.column(entries, "category")),
    )
    return [
        (
            replace(
                take(events, device_rows.entries),
                stream=device_rows.streams.number_streams(raw_streams[device_rows.entries]),
            ),
            _event_warnings(is_invalid[device_rows.entries], action[device_rows.entries]),
        )
        for device_rows in devices
    ]


def is_range(address: Ints, size: Ints) -> Mask:
    """Return a mask: whether each address (signed, wrapped) and its size can be a range of memory."""
    is_valid = (address >= 0) & (address <= _MAX_ADDRESS)
    return is_valid & (size >= 0) & (size <= MAX_BYTES)


def _check_total(sizes: Ints) -> None:
    if (total_bytes := float(sizes.sum(dtype=np.float64))) > _MAX_TRACE_BYTES:
        raise SnapshotError(
            f"the sizes in a trace add up to {total_bytes:.0e} bytes: the file is damaged"
        )


def _event_warnings(is_invalid: Mask, action: Codes) -> Warnings:
    warnings = []
    if invalid_count := int(np.count_nonzero(is_invalid)):
        warnings.append(
            f"entries of the trace without a valid address or size were skipped: {invalid_count:,}"
        )
    if invalid_count := int(np.count_nonzero(action == Action.UNKNOWN)):
        warnings.append(
            f"entries of the trace with an unknown action were skipped: {invalid_count:,}"
        )
    return tuple(warnings)


# Limit of the total size of all blocks: more than the memory of any machine, and still exact in float64.
_MAX_STATE_BYTES = 1 << 53

_SEGMENT_KIND_BY_NAME = {"small": SegmentKind.SMALL, "large": SegmentKind.LARGE}
_BLOCK_STATE_BY_NAME = {
    "active_allocated": BlockState.ALLOCATED,
    "active_pending_free": BlockState.PENDING_FREE,
    "active_awaiting_free": BlockState.PENDING_FREE,  # the name in torch's documentation
    "inactive": BlockState.INACTIVE,
}
_UNKNOWN_STATE = 255


def segment_devices(tree: Tree, segments: Handles) -> Ints:
    """Return the device of each segment; 0 if the file does not record it."""
    return tree.integers(tree.column(segments, "device"))[0]


def read_final_states(
    tree: Tree, tables: Tables, handles: Handles, devices: Iterable[DeviceRows]
) -> list[tuple[Segments, Blocks, Warnings]]:
    """Return the segments of each device by address, their blocks, and a warning per kind of defect.

    The segments of all devices are read together, so that a shared list of blocks is read once. Raises
    SnapshotError for a segment or block without a size, or with an impossible size.
    """
    tree.budget.spend_rows(len(handles))
    address, has_address = tree.integers(tree.column(handles, "address"))
    if not has_address.all():
        raise SnapshotError(
            "a segment has no address: the file is damaged, or not a memory snapshot"
        )
    device = segment_devices(tree, handles)
    order = np.lexsort((address.view(np.uint64), device))
    handles, address, device = handles[order], address[order], device[order]
    size = _checked_sizes(tree, handles, "total_size", subject="segment")
    _check_range(address, size, subject="segment")
    raw_streams = tree.integers(tree.column(handles, "stream"))[0]
    segments = Segments(
        address=address.view(np.uint64),
        size=size,
        stream=np.zeros(len(handles), np.int32),
        kind=tables.codes(
            tree.column(handles, "segment_type"), _SEGMENT_KIND_BY_NAME, SegmentKind.UNKNOWN
        ),
        pool=tables.pool_ids(tree.column(handles, "segment_pool_id")),
        expandable=tree.integers(tree.column(handles, "is_expandable"))[0] != 0,
        stack=tables.stack_ids(tree.column(handles, "frames")),
    )
    blocks, has_unknown_state = _read_blocks(tree, tables, segments, tree.column(handles, "blocks"))
    states = []
    for device_rows in devices:
        first_segment, end_segment = np.searchsorted(
            device, [device_rows.device, device_rows.device + 1]
        ).tolist()
        block_slice = slice(*np.searchsorted(blocks.segment, [first_segment, end_segment]).tolist())
        states.append(
            (
                replace(
                    take(segments, slice(first_segment, end_segment)),
                    stream=device_rows.streams.number_streams(
                        raw_streams[first_segment:end_segment]
                    ),
                ),
                replace(
                    take(blocks, block_slice), segment=blocks.segment[block_slice] - first_segment
                ),
                _block_warnings(has_unknown_state[block_slice]),
            )
        )
    return states


def _read_blocks(
    tree: Tree, tables: Tables, segments: Segments, block_lists: Handles
) -> tuple[Blocks, Mask]:
    """Return the blocks of all segments, and which of them have an unknown state."""
    block_counts, handles = tree.children(block_lists)
    tree.budget.spend_rows(len(handles))
    segment = np.repeat(np.arange(len(block_counts), dtype=np.int32), block_counts)
    size = _checked_sizes(tree, handles, "size", subject="block")
    address = _block_addresses(tree, handles, segments, segment, size)
    _check_range(address.view(np.int64), size, subject="block")
    order = np.lexsort((address, segment))
    handles, address, size = handles[order], address[order], size[order]
    last_history_entries = _last_history_entry(tree, tree.column(handles, "history"))
    states = tree.column(handles, "state")
    state = tables.codes(states, _BLOCK_STATE_BY_NAME, BlockState.INACTIVE)
    frames = tree.column(handles, "frames")
    blocks = Blocks(
        segment=segment,
        address=address,
        size=size,
        requested=_requested_sizes(tree, handles, last_history_entries, size, state),
        state=state,
        stack=tables.stack_ids(
            np.where(frames == 0, _optional_column(tree, last_history_entries, "frames"), frames)
        ),
    )
    return blocks, tables.codes(states, _BLOCK_STATE_BY_NAME, _UNKNOWN_STATE) == _UNKNOWN_STATE


def _requested_sizes(
    tree: Tree, handles: Handles, history: Handles, size: Ints, state: Codes
) -> Ints:
    requested, has_requested = tree.integers(tree.column(handles, "requested_size"))
    real_size, has_real_size = tree.integers(_optional_column(tree, history, "real_size"))
    bytes_requested = np.where(has_requested, requested, np.where(has_real_size, real_size, size))
    return np.where(state == BlockState.INACTIVE, 0, np.clip(bytes_requested, 0, size))


def _block_warnings(has_unknown_state: Mask) -> Warnings:
    if unknown_count := int(np.count_nonzero(has_unknown_state)):
        return (f"{unknown_count:,} blocks with an unknown state count as free",)
    return ()


def _last_history_entry(tree: Tree, histories: Handles) -> Handles:
    """Return the last entry of each block's history (before torch 2.1); 0 if there is none."""
    counts, entries = tree.children(histories)
    starts = np.cumsum(counts) - counts
    newest_entry = np.zeros(len(histories), np.uint64)
    newest_entry[counts > 0] = entries[starts[counts > 0]]
    return newest_entry


def _optional_column(tree: Tree, handles: Handles, key: str) -> Handles:
    column_values = np.zeros(len(handles), np.uint64)
    is_present = handles != 0
    column_values[is_present] = tree.column(handles[is_present], key)
    return column_values


def _block_addresses(
    tree: Tree, handles: Handles, segments: Segments, segment: Ids, size: Ints
) -> Addresses:
    """Return block addresses. Files before torch 2.1 lack them; their blocks are contiguous."""
    address, has_address = tree.integers(tree.column(handles, "address"))
    bytes_before = np.cumsum(size) - size
    first_of_segment = np.searchsorted(segment, segment)
    offset = (bytes_before - bytes_before[first_of_segment]).astype(np.uint64)
    return np.where(has_address, address.view(np.uint64), segments.address[segment] + offset)


def _checked_sizes(tree: Tree, handles: Handles, key: str, *, subject: str) -> Ints:
    size, has_size = tree.integers(tree.column(handles, key))
    if not has_size.all():
        raise SnapshotError(
            f"a {subject} has no {key} that is a number: the file is damaged, or not a memory snapshot"
        )
    is_invalid = (size < 0) | (size > MAX_BYTES)
    if is_invalid.any():
        raise SnapshotError(
            f"a {subject} has a {key} of {size[is_invalid][0]} bytes: the file is damaged"
        )
    if (total_bytes := float(size.sum(dtype=np.float64))) > _MAX_STATE_BYTES:
        raise SnapshotError(
            f"the {subject}s add up to {total_bytes:.0e} bytes: the file is damaged"
        )
    return size


def _check_range(address: Ints, size: Ints, *, subject: str) -> None:
    is_invalid = ~is_range(address, size)
    if is_invalid.any():
        first_address = int(address.view(np.uint64)[is_invalid][0])
        raise SnapshotError(
            f"a {subject} at {first_address:#x} is outside any address space: the file is damaged"
        )
