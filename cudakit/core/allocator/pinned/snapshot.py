"""The part of a snapshot that is about pinned memory.

PyTorch 2.14 writes a segment of the host as what is in use of it (c10/core/CachingDeviceAllocator.h); it
never divides one. A block of a segment that is divided is written as a segment of its own here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudakit.core.allocator.history import History, Stacks
from cudakit.core.allocator.pinned.blocks import HostBlock
from cudakit.core.allocator.pool_stats import PoolId
from cudakit.core.allocator.snapshot import entry_of


def take(owners: Mapping[HostBlock, PoolId], recorder: History) -> dict[str, Any]:
    """Return what there is by address, each with its pool, and what led there."""
    stacks = Stacks()
    held = sorted(owners.items(), key=lambda owned: owned[0].ptr)
    return {
        "host_segments": [_segment(block, pool, stacks) for block, pool in held],
        "host_traces": [entry_of(recorder, stacks, event) for event in recorder.events],
    }


def _segment(block: HostBlock, pool: PoolId, stacks: Stacks) -> dict[str, Any]:
    return {
        "address": block.ptr,
        "size": block.size,
        "requested_size": 0 if block.free else block.requested,
        "allocated": int(block.allocated),
        "active": int(not block.free),
        "segment_pool_id": pool,
        "frames": stacks.frames(block.stack),
    }
