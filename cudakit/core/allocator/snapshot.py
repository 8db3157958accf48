"""Snapshots in PyTorch's format, which torch.cuda.memory._snapshot returns, of plain builtin values only.

Source: torch/csrc/cuda/Module.cpp (torch_cuda_memorySnapshot) and torch/cuda/memory.py; the key
internal_metadata is that of pull request 193432 of PyTorch.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cudakit.core.allocator.blocks import Block, Segment
from cudakit.core.allocator.engine import Engine
from cudakit.core.allocator.history import (
    OOM,
    SNAPSHOT,
    Annotation,
    History,
    Stacks,
    TraceEvent,
)
from cudakit.errors import UsageError
from cudakit.torch_rules.settings import Recorded


def take(
    engine: Engine, history: History, device: int, settings: Mapping[str, Recorded]
) -> dict[str, Any]:
    """Return all segments and the trace, to which an entry of the snapshot is appended afterwards.

    ``settings`` are those that PyTorch does not have.
    """
    stacks = Stacks()
    entries = [entry_of(history, stacks, event) for event in history.events]
    held = sorted(engine.segments.values(), key=lambda segment: segment.ptr)
    segments = [_segment(segment, stacks, device) for segment in held]
    if engine.trace is not None:
        engine.trace.record(SNAPSHOT, 0, engine.stats.total("active_bytes"), 0, None)
    others: list[list[Any]] = [[] for _ in range(device)]
    return {
        "segments": segments,
        "device_traces": [*others, entries],
        "allocator_settings": engine.settings.as_recorded() | dict(settings),
        "external_annotations": [
            _annotation(history, each, device) for each in history.annotations
        ],
        "trace_alloc_overflowed": [*(False for _ in others), history.overflowed],
    }


def entry_of(history: History, stacks: Stacks, event: TraceEvent) -> dict[str, Any]:
    """Return an event of a trace."""
    action, address, size, stream, moment_ns, stack, pool, metadata = event
    text, tag = metadata if isinstance(metadata, tuple) else (metadata, "")
    entry = {
        "action": action,
        "device_free" if action == OOM else "addr": address,
        "size": size,
        "stream": stream,
        "time_us": history.unix_us(moment_ns),
        "compile_context": "N/A",
        "user_metadata": text,
        "pool_id": pool,
    }
    if tag:
        entry["internal_metadata"] = tag
    if stack:
        entry["frames"] = stacks.frames(stack)
    return entry


def _annotation(history: History, annotation: Annotation, device: int) -> dict[str, Any]:
    name, stage, moment_ns = annotation
    return {
        "name": name,
        "stage": stage,
        "device": device,
        "time_us": history.unix_us(moment_ns),
    }


def _segment(segment: Segment, stacks: Stacks, device: int) -> dict[str, Any]:
    blocks = segment.blocks()
    active = [block for block in blocks if not block.free]
    return {
        "device": device,
        "address": segment.ptr,
        "total_size": segment.size,
        "allocated_size": sum(block.size for block in active if block.allocated),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested for block in active),
        "stream": segment.stream,
        "segment_type": "small" if segment.pool.small else "large",
        "segment_pool_id": segment.pool.id,
        "is_expandable": segment.is_expandable,
        "registration_counter": segment.number,
        "frames": stacks.frames(segment.stack),
        "blocks": [_block(block, stacks) for block in blocks],
    }


def _block(block: Block, stacks: Stacks) -> dict[str, Any]:
    return {
        "address": block.ptr,
        "size": block.size,
        "requested_size": block.requested,
        "state": _state(block),
        "frames": stacks.frames(block.stack),
    }


def _state(block: Block) -> str:
    if block.free:
        return "inactive"
    return "active_allocated" if block.allocated else "active_pending_free"


def checked(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path. Raises UsageError if no file can be written there."""
    place = Path(path).absolute()  # the program may change its directory
    if place.is_dir():
        raise UsageError(f"cannot write {place}: it is a directory", hint="give the name of a file")
    if not place.parent.is_dir():
        raise UsageError(
            f"cannot write {place}: there is no directory {place.parent}", hint="make it first"
        )
    return place


def save(snapshot: dict[str, Any], path: Path) -> None:
    """Write a snapshot, or leave the existing file. Raises UsageError if it cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with part.open("wb") as file:
                pickle.dump(snapshot, file, protocol=4)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="give another place, or make room there"
        ) from error
