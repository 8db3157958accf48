"""Builders of snapshots: every part has defaults, and can be written as PyTorch pickles it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cudakit.memory.snapshot import (
    HOST,
    Action,
    Annotation,
    Blocks,
    BlockState,
    DeviceTrace,
    Events,
    SegmentKind,
    Segments,
    Snapshot,
)
from cudakit.stacks import Frame

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
START_US = 1_700_000_000_000_000  # the time of event 0; each event is one microsecond later
STREAMS = (0, 0x5581_0000_1230, 0x5581_0000_4560, 0x5581_0000_7890)  # raw handles
POOLS = ((0, 0), (0, 1), (1, 0), (0, 2))
SETTINGS = {"max_split_size": -1, "expandable_segments": False}

# Stack i, from 1 on, has its own line of train.py, called by main.
MAIN = Frame("main", "train.py", 100)
FRAMES = (MAIN, *(Frame(f"place{i}", "train.py", i) for i in range(1, 16)))
STACKS = ((), *((i, 0) for i in range(1, 16)))


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of Events; without a time, START_US plus one microsecond per event."""

    action: Action
    address: int = 0
    size: int = 0
    stream: int = 0
    time_us: int | None = None
    stack: int = 0
    pool: int = -1
    compile_context: int = 0
    user_metadata: int = 0
    category: int = 0


def alloc(address: int, size: int, **more: Any) -> Entry:
    return Entry(Action.ALLOC, address, size, **more)


def free_requested(address: int, size: int, **more: Any) -> Entry:
    return Entry(Action.FREE_REQUESTED, address, size, **more)


def free_completed(address: int, size: int, **more: Any) -> Entry:
    return Entry(Action.FREE_COMPLETED, address, size, **more)


def freed(address: int, size: int, **more: Any) -> tuple[Entry, Entry]:
    return free_requested(address, size, **more), free_completed(address, size, **more)


def segment_alloc(address: int, size: int, **more: Any) -> Entry:
    return Entry(Action.SEGMENT_ALLOC, address, size, **more)


def segment_free(address: int, size: int, **more: Any) -> Entry:
    return Entry(Action.SEGMENT_FREE, address, size, **more)


def oom(size: int, *, device_free: int, **more: Any) -> Entry:
    return Entry(Action.OOM, device_free, size, **more)


@dataclass(frozen=True, slots=True)
class Block:
    """A block in use or pending free."""

    address: int
    size: int
    requested: int | None = None  # requested bytes; None: the block's size
    state: BlockState = BlockState.ALLOCATED
    stack: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment; memory between its blocks is inactive."""

    address: int
    size: int
    blocks: Sequence[Block] = ()
    stream: int = 0
    kind: SegmentKind = SegmentKind.LARGE
    pool: int = 0
    expandable: bool = False
    stack: int = 0


def events(entries: Iterable[Entry]) -> Events:
    rows = list(entries)
    timed = [
        replace(row, time_us=START_US + i) if row.time_us is None else row
        for i, row in enumerate(rows)
    ]
    return Events(
        action=np.array([int(row.action) for row in timed], np.uint8),
        address=np.array([row.address for row in timed], np.uint64),
        size=np.array([row.size for row in timed], np.int64),
        stream=np.array([row.stream for row in timed], np.int32),
        time_us=np.array([row.time_us for row in timed], np.int64),
        stack=np.array([row.stack for row in timed], np.int32),
        pool=np.array([row.pool for row in timed], np.int32),
        compile_context=np.array([row.compile_context for row in timed], np.int32),
        user_metadata=np.array([row.user_metadata for row in timed], np.int32),
        category=np.array([row.category for row in timed], np.int32),
    )


def segments(pieces: Sequence[Segment]) -> Segments:
    return Segments(
        address=np.array([piece.address for piece in pieces], np.uint64),
        size=np.array([piece.size for piece in pieces], np.int64),
        stream=np.array([piece.stream for piece in pieces], np.int32),
        kind=np.array([int(piece.kind) for piece in pieces], np.uint8),
        pool=np.array([piece.pool for piece in pieces], np.int32),
        expandable=np.array([piece.expandable for piece in pieces], np.bool_),
        stack=np.array([piece.stack for piece in pieces], np.int32),
    )


def blocks(pieces: Sequence[Segment]) -> Blocks:
    rows = [(i, block) for i, piece in enumerate(pieces) for block in _tiled(piece)]
    return Blocks(
        segment=np.array([i for i, _ in rows], np.int32),
        address=np.array([block.address for _, block in rows], np.uint64),
        size=np.array([block.size for _, block in rows], np.int64),
        requested=np.array([_requested(block) for _, block in rows], np.int64),
        state=np.array([int(block.state) for _, block in rows], np.uint8),
        stack=np.array([block.stack for _, block in rows], np.int32),
    )


def _tiled(piece: Segment) -> Iterator[Block]:
    place, end = piece.address, min(piece.address + piece.size, 1 << 64)
    for block in sorted(piece.blocks, key=lambda block: block.address):
        if place < min(block.address, end):
            yield Block(place, min(block.address, end) - place, 0, BlockState.INACTIVE)
        yield block
        place = max(place, block.address + block.size)
    if place < end:
        yield Block(place, end - place, 0, BlockState.INACTIVE)


def _requested(block: Block) -> int:
    return block.size if block.requested is None else block.requested


def trace(entries: Iterable[Entry] = (), final: Iterable[Segment] = (), **more: Any) -> DeviceTrace:
    pieces = sorted(final, key=lambda piece: piece.address)
    made = DeviceTrace(0, events(entries), segments(pieces), blocks(pieces), STREAMS)
    return replace(made, **more)


def snapshot(*devices: DeviceTrace, **more: Any) -> Snapshot:
    made = Snapshot(
        source="snapshot.pkl",
        format="pickle",
        size_bytes=0,
        devices=devices or (trace(),),
        frames=FRAMES,
        stacks=STACKS,
        texts=("",),
        pools=POOLS,
        settings=SETTINGS,
    )
    return replace(made, **more)


def annotated(name: str, start_us: int, end_us: int, *, device: int = 0) -> tuple[Annotation, ...]:
    return Annotation(name, True, device, start_us), Annotation(name, False, device, end_us)


_ACTION_WORDS = {action: action.name.lower() for action in Action}
_STATE_WORDS = {
    BlockState.INACTIVE: "inactive",
    BlockState.ALLOCATED: "active_allocated",
    BlockState.PENDING_FREE: "active_pending_free",
}


def torch_dict(made: Snapshot) -> dict[str, Any]:
    """Return a Snapshot, without host memory, as the dictionary that PyTorch pickles."""
    devices = {device.device: device for device in made.devices if device.device != HOST}
    ordinals = range(max(devices, default=-1) + 1)
    return {
        "segments": [s for device in devices.values() for s in _torch_segments(made, device)],
        "device_traces": [
            _torch_entries(made, devices[i]) if i in devices else [] for i in ordinals
        ],
        "allocator_settings": dict(made.settings),
        "external_annotations": [
            {
                "name": annotation.name,
                "stage": "START" if annotation.is_start else "END",
                "device": annotation.device,
                "time_us": annotation.time_us,
            }
            for annotation in made.annotations
        ],
    }


def _torch_entries(made: Snapshot, device: DeviceTrace) -> list[dict[str, Any]]:
    rows = device.events
    return [_torch_entry(made, device, i) for i in range(len(rows))]


def _torch_entry(made: Snapshot, device: DeviceTrace, i: int) -> dict[str, Any]:
    rows = device.events
    action = Action(int(rows.action[i]))
    entry = {
        "action": _ACTION_WORDS[action],
        "device_free" if action == Action.OOM else "addr": int(rows.address[i]),
        "size": int(rows.size[i]),
        "stream": device.streams[rows.stream[i]],
        "time_us": int(rows.time_us[i]),
        "compile_context": made.texts[rows.compile_context[i]],
        "user_metadata": made.texts[rows.user_metadata[i]],
        "frames": _torch_frames(made, int(rows.stack[i])),
    }
    if rows.pool[i] >= 0:
        entry["pool_id"] = made.pools[rows.pool[i]]
    if rows.category[i]:
        entry["category"] = made.texts[rows.category[i]]
    return entry


def _torch_segments(made: Snapshot, device: DeviceTrace) -> Iterator[dict[str, Any]]:
    pieces = device.segments
    for i in range(len(pieces)):
        own = [_torch_block(made, device, j) for j in np.flatnonzero(device.blocks.segment == i)]
        active = [block for block in own if block["state"] != "inactive"]
        allocated = [block for block in active if block["state"] == "active_allocated"]
        yield {
            "device": device.device,
            "address": int(pieces.address[i]),
            "total_size": int(pieces.size[i]),
            "allocated_size": sum(block["size"] for block in allocated),
            "active_size": sum(block["size"] for block in active),
            "requested_size": sum(block["requested_size"] for block in active),
            "stream": device.streams[pieces.stream[i]],
            "segment_type": SegmentKind(int(pieces.kind[i])).name.lower(),
            "segment_pool_id": made.pools[pieces.pool[i]],
            "is_expandable": bool(pieces.expandable[i]),
            "frames": _torch_frames(made, int(pieces.stack[i])),
            "blocks": own,
        }


def _torch_block(made: Snapshot, device: DeviceTrace, i: int) -> dict[str, Any]:
    pieces = device.blocks
    return {
        "address": int(pieces.address[i]),
        "size": int(pieces.size[i]),
        "requested_size": int(pieces.requested[i]),
        "state": _STATE_WORDS[BlockState(int(pieces.state[i]))],
        "frames": _torch_frames(made, int(pieces.stack[i])),
    }


def _torch_frames(made: Snapshot, stack: int) -> list[dict[str, Any]]:
    frames = (made.frames[i] for i in made.stacks[stack])
    return [{"name": f.name, "filename": f.filename, "line": f.line} for f in frames]
