"""A snapshot in PyTorch's format: what torch.cuda.memory._snapshot returns, of plain builtin values only.

Source: torch/csrc/cuda/Module.cpp (torch_cuda_memorySnapshot) and torch/cuda/memory.py; the key
internal_metadata is that of pull request 193432 of PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudakit.core.allocator.block import Block, Segment
from cudakit.core.allocator.cache import Cache
from cudakit.core.allocator.stacks import Stacks
from cudakit.core.allocator.tracing import OOM, SNAPSHOT, Mark, Recorder, TraceEvent
from cudakit.torch_rules.settings import Recorded


def take(
    cache: Cache, recorder: Recorder, device: int, settings: Mapping[str, Recorded]
) -> dict[str, Any]:
    """Return what the cache holds and what led there; afterwards the trace has an entry of that.

    ``settings`` are those beside PyTorch's.
    """
    stacks = Stacks()
    entries = [entry_of(recorder, stacks, event) for event in recorder.events]
    held = sorted(cache.segments.values(), key=lambda segment: segment.ptr)
    segments = [_segment(segment, stacks, device) for segment in held]
    if cache.recorder is not None:
        recorder.record(SNAPSHOT, 0, cache.statistics.total("active_bytes"), 0, None)
    others: list[list[Any]] = [[] for _ in range(device)]
    return {
        "segments": segments,
        "device_traces": [*others, entries],
        "allocator_settings": cache.settings.as_recorded() | dict(settings),
        "external_annotations": [_mark(recorder, mark, device) for mark in recorder.marks],
        "trace_alloc_overflowed": [*(False for _ in others), recorder.overflowed],
    }


def entry_of(recorder: Recorder, stacks: Stacks, event: TraceEvent) -> dict[str, Any]:
    """Write an event of a trace."""
    action, address, size, stream, moment_ns, stack, pool, metadata = event
    text, tag = metadata if isinstance(metadata, tuple) else (metadata, "")
    entry = {
        "action": action,
        "device_free" if action == OOM else "addr": address,
        "size": size,
        "stream": stream,
        "time_us": recorder.unix_us(moment_ns),
        "compile_context": "N/A",
        "user_metadata": text,
        "pool_id": pool,
    }
    if tag:
        entry["internal_metadata"] = tag
    if stack:
        entry["frames"] = stacks.frames(stack)
    return entry


def _mark(recorder: Recorder, mark: Mark, device: int) -> dict[str, Any]:
    name, stage, moment_ns = mark
    return {
        "name": name,
        "stage": stage,
        "device": device,
        "time_us": recorder.unix_us(moment_ns),
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
        "is_expandable": segment.expandable,
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
