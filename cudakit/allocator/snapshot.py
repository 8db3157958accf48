"""Snapshots in PyTorch's format, and snapshot files.

A snapshot has the format of torch.cuda.memory._snapshot, and consists of builtin types only. Source:
torch/csrc/cuda/Module.cpp (torch_cuda_memorySnapshot) and torch/cuda/memory.py. The key internal_metadata
comes from pull request 193432 of PyTorch.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from cudakit.allocator.blocks import Block, Segment
from cudakit.allocator.engine import Engine
from cudakit.allocator.history import OOM, SNAPSHOT, History, Stacks, TraceEvent
from cudakit.errors import UsageError
from cudakit.torch_rules.settings import RecordedValue


class HasSnapshot(Protocol):
    """An allocator of pinned memory that adds keys to snapshots."""

    def snapshot(self) -> dict[str, Any]: ...


def snapshot_of(
    engine: Engine, history: History, device: int, settings: Mapping[str, RecordedValue]
) -> dict[str, Any]:
    """Return all segments and the trace, and then append an event SNAPSHOT to the history.

    ``settings`` are the settings that PyTorch does not have.
    """
    stacks = Stacks()
    entries = [_trace_entry(history, stacks, trace_event) for trace_event in history.events]
    sorted_segments = sorted(engine.segments.values(), key=lambda segment: segment.ptr)
    segments = [_segment_entry(segment, stacks, device) for segment in sorted_segments]
    if engine.history is not None:
        engine.history.record(SNAPSHOT, 0, engine.stats.current_total("active_bytes"), 0, None)
    empty_traces: list[list[Any]] = [[] for _ in range(device)]
    return {
        "segments": segments,
        "device_traces": [*empty_traces, entries],
        "allocator_settings": engine.settings.as_recorded() | dict(settings),
        "external_annotations": [
            {
                "name": name,
                "stage": stage,
                "device": device,
                "time_us": history.unix_us(moment_ns),
            }
            for name, stage, moment_ns in history.annotations
        ],
        "trace_alloc_overflowed": [*(False for _ in empty_traces), history.overflowed],
    }


def _trace_entry(history: History, stacks: Stacks, trace_event: TraceEvent) -> dict[str, Any]:
    """Convert an event of the history to an entry of a snapshot's trace."""
    action, address, size_bytes, stream, moment_ns, stack, pool, metadata = trace_event
    metadata_text, tag = metadata if isinstance(metadata, tuple) else (metadata, "")
    trace_entry = {
        "action": action,
        "device_free" if action == OOM else "addr": address,
        "size": size_bytes,
        "stream": stream,
        "time_us": history.unix_us(moment_ns),
        "compile_context": "N/A",
        "user_metadata": metadata_text,
        "pool_id": pool,
    }
    if tag:
        trace_entry["internal_metadata"] = tag
    if stack:
        trace_entry["frames"] = stacks.frames(stack)
    return trace_entry


def host_snapshot(blocks: Iterable[Block], history: History) -> dict[str, Any]:
    """Return ``host_segments``, with one segment per block, and ``host_traces``.

    PyTorch 2.14 never splits a host segment, and records the bytes in use of each segment
    (c10/core/CachingDeviceAllocator.h). Here each block of a split segment is recorded as a segment.
    """
    stacks = Stacks()
    return {
        "host_segments": [
            {
                "address": block.ptr,
                "size": block.size,
                "requested_size": 0 if block.is_free else block.requested,
                "allocated": int(block.is_allocated),
                "active": int(not block.is_free),
                "segment_pool_id": block.free_blocks.pool_id,
                "frames": stacks.frames(block.stack),
            }
            for block in sorted(blocks, key=lambda block: block.ptr)
        ],
        "host_traces": [
            _trace_entry(history, stacks, trace_event) for trace_event in history.events
        ],
    }


def _segment_entry(segment: Segment, stacks: Stacks, device: int) -> dict[str, Any]:
    blocks = segment.blocks()
    active_blocks = [block for block in blocks if not block.is_free]
    return {
        "device": device,
        "address": segment.ptr,
        "total_size": segment.size,
        "allocated_size": sum(block.size for block in active_blocks if block.is_allocated),
        "active_size": sum(block.size for block in active_blocks),
        "requested_size": sum(block.requested for block in active_blocks),
        "stream": segment.stream,
        "segment_type": "small" if segment.pool.is_small else "large",
        "segment_pool_id": segment.pool.id,
        "is_expandable": segment.is_expandable,
        "registration_counter": segment.registration_number,
        "frames": stacks.frames(segment.stack),
        "blocks": [
            {
                "address": block.ptr,
                "size": block.size,
                "requested_size": block.requested,
                "state": "inactive"
                if block.is_free
                else "active_allocated"
                if block.is_allocated
                else "active_pending_free",
                "frames": stacks.frames(block.stack),
            }
            for block in blocks
        ],
    }


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return a path as an absolute path. Raises UsageError if no file can be written there."""
    absolute_path = Path(
        path
    ).absolute()  # Absolute, because the program may change its working directory.
    if absolute_path.is_dir():
        raise UsageError(
            f"cannot write {absolute_path}: it is a directory", hint="give a file name"
        )
    if not absolute_path.parent.is_dir():
        raise UsageError(
            f"cannot write {absolute_path}: there is no directory {absolute_path.parent}",
            hint="make it first",
        )
    return absolute_path


def save_snapshot(snapshot: dict[str, Any], path: Path) -> None:
    """Write a snapshot to a file. Raises UsageError if that fails; an existing file then stays unchanged."""
    # The name is random and the mode is "x", because another user could place a symbolic link at a known
    # name.
    temporary_path = path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")
    try:
        try:
            with temporary_path.open("xb") as file:
                pickle.dump(snapshot, file, protocol=4)
            temporary_path.replace(path)
        finally:
            temporary_path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="choose another path, or free disk space"
        ) from error
