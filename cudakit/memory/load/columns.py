"""Read the events, segments and blocks of one device into columns."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np

from cudakit.errors import SnapshotError
from cudakit.memory.load.tree import Handles, Tree
from cudakit.memory.snapshot import (
    Action,
    Blocks,
    BlockState,
    Codes,
    DeviceTrace,
    Events,
    Ids,
    Ints,
    Mask,
    SegmentKind,
    Segments,
    take,
)
from cudakit.stacks import Frame

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
    total_bytes = float(size[moves_memory & ~is_invalid].sum(dtype=np.float64))
    if total_bytes > _MAX_TRACE_BYTES:
        raise SnapshotError(
            f"the sizes in a trace add up to {total_bytes:.0e} bytes: the file is damaged"
        )
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
    found = []
    for rows in devices:
        stream = rows.streams.number_streams(raw_streams[rows.entries])
        warnings = [
            f"entries of the trace {defect} were skipped: {count:,}"
            for defect, count in (
                ("without a valid address or size", np.count_nonzero(is_invalid[rows.entries])),
                (
                    "with an unknown action",
                    np.count_nonzero(action[rows.entries] == Action.UNKNOWN),
                ),
            )
            if count
        ]
        found.append((replace(take(events, rows.entries), stream=stream), tuple(warnings)))
    return found


def is_range(address: Ints, size: Ints) -> Mask:
    """Return a mask: whether each address (signed, wrapped) and its size can be a range of memory."""
    is_valid = (address >= 0) & (address <= _MAX_ADDRESS)
    return is_valid & (size >= 0) & (size <= MAX_BYTES)


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
    states: list[tuple[Segments, Blocks, Warnings]] = []
    for rows in devices:
        first, end = np.searchsorted(device, [rows.device, rows.device + 1]).tolist()
        of_device = slice(*np.searchsorted(blocks.segment, [first, end]).tolist())
        unknown_count = int(np.count_nonzero(has_unknown_state[of_device]))
        states.append(
            (
                replace(
                    take(segments, slice(first, end)),
                    stream=rows.streams.number_streams(raw_streams[first:end]),
                ),
                replace(take(blocks, of_device), segment=blocks.segment[of_device] - first),
                (f"{unknown_count:,} blocks with an unknown state count as free",)
                if unknown_count
                else (),
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
    recorded_address, has_address = tree.integers(tree.column(handles, "address"))
    # Files before torch 2.1 lack the addresses of blocks; their blocks are contiguous.
    bytes_before = np.cumsum(size) - size
    offset = bytes_before - bytes_before[np.searchsorted(segment, segment)]
    address = np.where(
        has_address,
        recorded_address.view(np.uint64),
        segments.address[segment] + offset.astype(np.uint64),
    )
    _check_range(address.view(np.int64), size, subject="block")
    order = np.lexsort((address, segment))
    handles, address, size = handles[order], address[order], size[order]
    # The last entry of each block's history (before torch 2.1); 0 if there is none.
    counts, entries = tree.children(tree.column(handles, "history"))
    history = np.zeros(len(handles), np.uint64)
    history[counts > 0] = entries[(np.cumsum(counts) - counts)[counts > 0]]
    states = tree.column(handles, "state")
    state = tables.codes(states, _BLOCK_STATE_BY_NAME, BlockState.INACTIVE)
    requested, has_requested = tree.integers(tree.column(handles, "requested_size"))
    real_size, has_real_size = tree.integers(_optional_column(tree, history, "real_size"))
    requested = np.where(has_requested, requested, np.where(has_real_size, real_size, size))
    frames = tree.column(handles, "frames")
    frames = np.where(frames == 0, _optional_column(tree, history, "frames"), frames)
    blocks = Blocks(
        segment=segment,
        address=address,
        size=size,
        requested=np.where(state == BlockState.INACTIVE, 0, np.clip(requested, 0, size)),
        state=state,
        stack=tables.stack_ids(frames),
    )
    return blocks, tables.codes(states, _BLOCK_STATE_BY_NAME, _UNKNOWN_STATE) == _UNKNOWN_STATE


def _optional_column(tree: Tree, handles: Handles, key: str) -> Handles:
    column_values = np.zeros(len(handles), np.uint64)
    is_present = handles != 0
    column_values[is_present] = tree.column(handles[is_present], key)
    return column_values


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


# --- Tables of values that repeat in a snapshot: frames, call stacks, texts, pools and streams -----

_T = TypeVar("_T", bound=Hashable)

# Cost of a call stack in rows of the budget, because the report has several tables of call stacks.
_ROWS_PER_STACK = 8

_POOL_STRUCT = struct.Struct("=QQ")


class Tables:
    """Tables of distinct values with their ids, which grow while columns are read.

    Ids count from 0 in the order of insertion. In all tables but ``frames``, id 0 means "none".
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.texts: dict[str, int] = {"": 0}
        self.frames: dict[Frame, int] = {}
        # Keys are bytes, because Python's hash of bytes is keyed: a file can choose numbers so that the
        # hashes of tuples collide.
        self._stacks: dict[bytes, int] = {b"": 0}  # frame ids as int32, innermost first
        self._pools: dict[bytes, int] = {_POOL_STRUCT.pack(0, 0): 0}

    @property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """The frame ids of each call stack, innermost first."""
        return tuple(tuple(memoryview(key).cast("i")) for key in self._stacks)

    @property
    def pools(self) -> tuple[tuple[int, int], ...]:
        """The id of each pool: a pair of numbers."""
        return tuple(_POOL_STRUCT.unpack(key) for key in self._pools)

    def text_ids(self, handles: Handles) -> Ids:
        """Return the ids of texts; missing values and other types count as the empty text."""
        return self._table_ids(handles, self.texts, self.decode_texts)

    def stack_ids(self, handles: Handles) -> Ids:
        """Return the ids of call stacks (lists of frame dictionaries); a missing stack counts as empty."""
        return self._table_ids(handles, self._stacks, self._decode_stacks)

    def pool_ids(self, handles: Handles) -> Ids:
        """Return the ids of pools, which are pairs of 64-bit integers; other values are the default pool."""
        return self._table_ids(handles, self._pools, self._decode_pools)

    def spend_stacks(self, devices: Iterable[DeviceTrace]) -> None:
        """Count the distinct call stacks of each device against the budget of the file."""
        frame_lengths = [len(frame.name) + len(frame.filename) for frame in self.frames]
        stacks = self.stacks
        n_frames = np.array([len(stack) for stack in stacks])
        n_characters = np.array([sum(map(frame_lengths.__getitem__, stack)) for stack in stacks])
        for device in devices:
            is_used = np.zeros(len(stacks), np.bool_)
            for column_rows in (device.events, device.segments, device.blocks):
                is_used[column_rows.stack] = True
            self._tree.budget.spend_rows(_ROWS_PER_STACK * int(is_used.sum()))
            self._tree.budget.spend_stacks(
                int(n_frames[is_used].sum()), int(n_characters[is_used].sum())
            )

    def codes(self, handles: Handles, code_of_word: Mapping[str, int], default: int) -> Codes:
        """Return the code of each word, and the default for any other value."""
        text_ids, representatives = self._tree.intern(handles)
        word_codes = [
            code_of_word.get(word, default) for word in self.decode_texts(representatives)
        ]
        return np.array(word_codes or [default], np.uint8)[text_ids]

    def decode_texts(self, handles: Handles) -> list[str]:
        """Return the texts of handles; other values count as the empty text."""
        self._tree.budget.spend_rows(len(handles))
        return self._tree.texts(handles)

    def _table_ids(
        self, handles: Handles, id_by_item: dict[_T, int], decode: Callable[[Handles], Sequence[_T]]
    ) -> Ids:
        local_ids, representatives = self._tree.intern(handles)
        global_ids = [
            id_by_item.setdefault(item, len(id_by_item)) for item in decode(representatives)
        ]
        return np.array(global_ids, np.int32)[local_ids] if global_ids else local_ids

    def _decode_stacks(self, handles: Handles) -> list[bytes]:
        counts, frames = self._tree.children(self._list_handles(handles))
        frame_ids = self._table_ids(frames, self.frames, self._decode_frames)
        id_bytes, ends = frame_ids.tobytes(), np.cumsum(counts) * frame_ids.itemsize
        starts = ends - counts * frame_ids.itemsize
        return [
            id_bytes[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]

    def _list_handles(self, handles: Handles) -> Handles:
        """Return the handles of lists; 0 in place of every other handle."""
        is_list = [bool(handle) and self._tree.is_list(handle) for handle in handles.tolist()]
        return np.where(np.array(is_list, np.bool_), handles, np.uint64(0))

    def _decode_frames(self, handles: Handles) -> list[Frame]:
        tree = self._tree
        tree.budget.spend_rows(3 * len(handles))
        names = tree.texts(tree.column(handles, "name"))
        files = tree.texts(tree.column(handles, "filename"))
        lines = tree.integers(tree.column(handles, "line"))[0].tolist()
        return list(map(Frame, names, files, lines))

    def _decode_pools(self, handles: Handles) -> list[bytes]:
        self._tree.budget.spend_rows(len(handles))
        counts, pool_items = self._tree.children(self._list_handles(handles))
        numbers, is_integer = self._tree.integers(pool_items)
        has_two_numbers = counts == 2
        word_indices = (np.cumsum(counts) - counts)[has_two_numbers][:, np.newaxis] + np.arange(2)
        is_pool = is_integer[word_indices].all(axis=1, keepdims=True)
        pool_ids = np.zeros((len(handles), 2), np.uint64)
        pool_ids[has_two_numbers] = np.where(
            is_pool, numbers[word_indices].view(np.uint64), np.uint64(0)
        )
        pair_bytes = pool_ids.tobytes()
        return [
            pair_bytes[offset : offset + _POOL_STRUCT.size]
            for offset in range(0, len(pair_bytes), _POOL_STRUCT.size)
        ]


class StreamNumbers:
    """Numbers the streams of one device in order of appearance; 0 is the default stream."""

    def __init__(self) -> None:
        self._number_by_stream: dict[int, int] = {0: 0}

    @property
    def raw_streams(self) -> tuple[int, ...]:
        """The raw handle of each stream, by number."""
        return tuple(self._number_by_stream)

    def number_streams(self, raw_streams: Ints) -> Ids:
        """Return the number of each raw stream handle."""
        distinct_streams, first_indices, inverse = np.unique(
            raw_streams, return_index=True, return_inverse=True
        )
        for stream in distinct_streams[np.argsort(first_indices)].tolist():
            self._number_by_stream.setdefault(stream, len(self._number_by_stream))
        return np.array(
            [self._number_by_stream[stream] for stream in distinct_streams.tolist()], np.int32
        )[inverse]
