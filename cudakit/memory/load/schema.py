"""Build a Snapshot from the tree of a file.

This module and ``columns`` know PyTorch's keys: torch/csrc/cuda/memory_snapshot.cpp and
c10/cuda/CUDACachingAllocator.h of torch 1.13 to 2.15. A missing key has the meaning that it had in the
version that wrote the file; unknown keys are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TypeAlias

import numpy as np

from cudakit.errors import SnapshotError
from cudakit.memory.load.columns import (
    DeviceRows,
    StreamNumbers,
    Tables,
    Warnings,
    is_range,
    read_events,
    read_final_states,
    segment_devices,
)
from cudakit.memory.load.tree import Handles, NotASnapshotError, Tree
from cudakit.memory.snapshot import (
    HOST,
    Annotation,
    Blocks,
    BlockState,
    DeviceTrace,
    Events,
    Ints,
    Mark,
    Mask,
    SegmentKind,
    Segments,
    Snapshot,
)
from cudakit.torch_rules.settings import flag_of_device

# c10::DeviceIndex is a signed number of 8 bits.
_MAX_DEVICES = 128
# The key of NVTX marks; memory/torch_snapshot.py writes it.
_MARKS_KEY = "cudakit_marks"
_SNAPSHOT_KEYS = ("segments", "device_traces", "host_segments", "host_traces")


def build(tree: Tree, *, source: str, file_format: str, size_bytes: int) -> Snapshot:
    """Return the Snapshot of a tree.

    Raises SnapshotError if the tree is not a snapshot, or has impossible sizes.
    """
    parts = _snapshot_parts(tree)
    tables = Tables(tree)
    settings = valid_settings(_plain_part(tree, parts, "allocator_settings"))
    # Files of PyTorch builds that do not write this flag lack it.
    key = "trace_alloc_overflowed"
    overflow = _plain_part(tree, parts, key) if key in parts else settings.get(key)
    devices = [
        *_device_traces(tree, tables, parts, overflow),
        *_host_traces(tree, tables, parts),
    ]
    tables.spend_stacks(devices)
    annotations, marks = _annotations(tree, tables, parts), _marks(tree, tables, parts)
    return Snapshot(
        source=source,
        format=file_format,
        size_bytes=size_bytes,
        devices=tuple(devices),
        frames=tuple(tables.frames),
        stacks=tables.stacks,
        texts=tuple(tables.texts),
        pools=tables.pools,
        annotations=annotations,
        marks=marks,
        settings=settings,
        has_times=any(bool(device.events.time_us.any()) for device in devices),
    )


def _snapshot_parts(tree: Tree) -> dict[str, int]:
    # torch.cuda.memory_snapshot() and MemPool.snapshot() return a list of segments without a dictionary.
    if tree.is_list(tree.root):
        _, items = tree.children(_handle_array(tree.root))
        with suppress(SnapshotError):
            if len(items) and "total_size" in tree.members(int(items[0])):
                return {"segments": tree.root}
        raise NotASnapshotError("it is a list, but not of memory segments")
    parts = tree.members(tree.root)
    if not any(name in parts for name in _SNAPSHOT_KEYS):
        if not parts:
            raise NotASnapshotError("its dictionary is empty")
        key_names = ", ".join(sorted(parts)[:4])
        raise NotASnapshotError(f"its dictionary has other keys ({key_names[:80]})")
    return parts


def _device_traces(
    tree: Tree, tables: Tables, parts: Mapping[str, int], overflow: object
) -> Iterator[DeviceTrace]:
    counts, entries = tree.children(_list_part(tree, parts, "device_traces"))
    segments = _list_part(tree, parts, "segments")
    # The devices that have events or segments.
    used = {
        *np.flatnonzero(counts).tolist(),
        *np.unique(segment_devices(tree, segments)).tolist(),
    } or {0}
    for ordinal in (min(used), max(used)):
        if not 0 <= ordinal < _MAX_DEVICES:
            raise SnapshotError(
                f"the file has a device {ordinal}, which is impossible: it is damaged"
            )
    ends = [0, *np.cumsum(counts).tolist()]
    devices = [
        DeviceRows(
            device,
            slice(*ends[device : device + 2]) if device < len(counts) else slice(0),
            StreamNumbers(),
        )
        for device in sorted(used)
    ]
    events = read_events(tree, tables, entries, devices)
    final_states = read_final_states(tree, tables, segments, devices)
    for rows, device_events, final_state in zip(devices, events, final_states, strict=True):
        has_overflowed = flag_of_device(overflow, rows.device)
        yield _device_trace(rows, device_events, final_state, has_overflowed)


def _device_trace(
    rows: DeviceRows,
    events_and_warnings: tuple[Events, Warnings],
    final_state: tuple[Segments, Blocks, Warnings],
    overflowed: bool | None = None,
) -> DeviceTrace:
    (events, event_warnings), (segments, blocks, state_warnings) = events_and_warnings, final_state
    warnings = event_warnings + state_warnings
    return DeviceTrace(
        rows.device, events, segments, blocks, rows.streams.raw_streams, overflowed, warnings
    )


def _host_traces(tree: Tree, tables: Tables, parts: Mapping[str, int]) -> Iterator[DeviceTrace]:
    traces = _list_part(tree, parts, "host_traces")
    # A list of entries or, as for devices, of such lists.
    is_nested = len(traces) > 0 and tree.is_list(int(traces[0]))
    entries = tree.children(traces)[1] if is_nested else traces
    segments = _list_part(tree, parts, "host_segments")
    if len(entries) or len(segments):
        rows = DeviceRows(HOST, slice(len(entries)), StreamNumbers())
        (events,) = read_events(tree, tables, entries, [rows])
        state = read_host_state(tree, tables, rows.streams, segments)
        yield _device_trace(rows, events, state)


def _annotations(tree: Tree, tables: Tables, parts: Mapping[str, int]) -> tuple[Annotation, ...]:
    """Return the starts and ends of named ranges; entries without stage or time are ignored."""
    handles = _list_part(tree, parts, "external_annotations")
    tree.budget.spend_rows(len(handles))
    stages = tables.codes(tree.column(handles, "stage"), {"START": 1, "END": 0}, default=2)
    times, has_time = _parse_numbers(tree, tree.column(handles, "time_us"))
    usable = np.flatnonzero(has_time & (stages != 2))
    names = tables.text_ids(tree.column(handles[usable], "name")).tolist()
    devices, _ = _parse_numbers(tree, tree.column(handles[usable], "device"))
    texts = tuple(tables.texts)
    columns = (names, stages[usable].tolist(), devices.tolist(), times[usable].tolist())
    return tuple(
        Annotation(texts[name], stage == 1, device, time_us)
        for name, stage, device, time_us in zip(*columns, strict=True)
    )


def _marks(tree: Tree, tables: Tables, parts: Mapping[str, int]) -> tuple[Mark, ...]:
    """Return the marks that ``run --memory`` recorded; entries without a time are ignored."""
    handles = _list_part(tree, parts, _MARKS_KEY)
    tree.budget.spend_rows(len(handles))
    times, has_time = tree.integers(tree.column(handles, "time_us"))
    names = tables.text_ids(tree.column(handles[has_time], "name")).tolist()
    devices, _ = tree.integers(tree.column(handles[has_time], "device"))
    texts = tuple(tables.texts)
    columns = (names, devices.tolist(), times[has_time].tolist())
    return tuple(
        Mark(texts[name], device, time_us) for name, device, time_us in zip(*columns, strict=True)
    )


def _parse_numbers(tree: Tree, handles: Handles) -> tuple[Ints, Mask]:
    """Return integers, also those that torch's C++ writer stores as text, and which nodes are integers."""
    numbers, is_integer = tree.integers(handles)
    row_indices = np.flatnonzero(~is_integer & (handles != 0)).tolist()
    for row_index, text in zip(row_indices, tree.texts(handles[row_indices]), strict=True):
        if len(text) < 19 and text.isdecimal():
            numbers[row_index], is_integer[row_index] = int(text), True
    return numbers, is_integer


def _plain_part(tree: Tree, parts: Mapping[str, int], key: str) -> object:
    return tree.plain_object(parts[key]) if key in parts else None


def _list_part(tree: Tree, parts: Mapping[str, int], key: str) -> Handles:
    return tree.children(_handle_array(parts.get(key, 0)))[1]


def _handle_array(handle: int) -> Handles:
    return np.array([handle], np.uint64)


Number: TypeAlias = bool | int | float
Scalar: TypeAlias = Number | str | None
Setting: TypeAlias = Scalar | list[Scalar] | dict[str, Number]

# The keys of roundup_power2_divisions are powers of two below 2**64.
_MAX_KEY_DIGITS = 20


def valid_settings(settings: object) -> dict[str, Setting]:
    """Return the valid settings: scalars of at most 64 bits, lists of scalars, or dicts of numbers."""
    if not isinstance(settings, dict):
        return {}
    return {key: value for key, value in settings.items() if _is_setting(value)}


def _is_setting(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_scalar, value))
    if isinstance(value, dict):
        return all(
            _is_number(number) and len(name) <= _MAX_KEY_DIGITS for name, number in value.items()
        )
    return _is_scalar(value)


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str) or _is_number(value)


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 64
    return isinstance(value, float)


# --- Read the segments and the trace of the pinned host allocator (torch 2.14) ---------------------
#
# PyTorch does not document the keys of host segments. So each value is read from all keys that PyTorch's
# other structures use for it, and invalid segments are skipped instead of rejecting the file.

_ADDRESS_KEYS = ("address", "addr")
_SIZE_KEYS = ("size", "total_size")
_IN_USE_KEYS = ("allocated", "allocated_size", "is_allocated")
_ACTIVE_KEYS = ("active", "active_size", "is_active")
_POOL_KEYS = ("segment_pool_id", "pool_id")


def read_host_state(
    tree: Tree, tables: Tables, streams: StreamNumbers, handles: Handles
) -> tuple[Segments, Blocks, Warnings]:
    """Return the host segments; each is one block."""
    tree.budget.spend_rows(len(handles))
    address, has_address = _integers(tree, handles, _ADDRESS_KEYS)
    size, has_size = _integers(tree, handles, _SIZE_KEYS)
    usable = np.flatnonzero(has_address & has_size & is_range(address, size))
    usable = usable[np.argsort(address[usable].view(np.uint64), kind="stable")]
    skipped_count = len(handles) - len(usable)
    handles, address, size = handles[usable], address[usable], size[usable]
    in_use, has_use = _integers(tree, handles, _IN_USE_KEYS)
    active, has_active = _integers(tree, handles, _ACTIVE_KEYS)
    has_state = has_use | has_active
    states = np.select(
        [(in_use != 0) | ~has_state, active != 0],
        [BlockState.ALLOCATED, BlockState.PENDING_FREE],
        BlockState.INACTIVE,
    ).astype(np.uint8)
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
    warnings = []
    if skipped_count:
        warnings.append(
            f"{skipped_count:,} host segments without a valid address or size were skipped"
        )
    if stateless_count := int(np.count_nonzero(~has_state)):
        warnings.append(f"{stateless_count:,} host segments without a state count as in use")
    return segments, blocks, tuple(warnings)


def _integers(tree: Tree, handles: Handles, keys: tuple[str, ...]) -> tuple[Ints, Mask]:
    return tree.integers(_first_present_handles(tree, handles, keys))


def _first_present_handles(tree: Tree, handles: Handles, keys: tuple[str, ...]) -> Handles:
    first_handles = np.zeros(len(handles), np.uint64)
    for key in reversed(keys):
        values = tree.column(handles, key)
        first_handles = np.where(values != 0, values, first_handles)
    return first_handles
