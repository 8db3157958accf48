"""Changes of statistics, and short forms of snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cudakit.core.allocator.allocator import CachingAllocator


def current(allocator: CachingAllocator, metric: str, kind: str = "all") -> int:
    return allocator.statistics()[f"{metric}.{kind}.current"]


@contextmanager
def changes(allocator: CachingAllocator) -> Iterator[dict[str, int]]:
    """Collect the changes of current values, by name without ``current``.

    Of private pools that are made meanwhile nothing was known before.
    """
    before = allocator.statistics()
    found: dict[str, int] = {}
    yield found
    for name, value in allocator.statistics().items():
        if name.endswith(".current") and value != before.get(name, value):
            found[name.removesuffix(".current")] = value - before[name]


def blocks(allocator: CachingAllocator) -> list[list[tuple[int, str]]]:
    """List the size and the state of each block, by segment."""
    return [
        [(block["size"], block["state"]) for block in segment["blocks"]]
        for segment in allocator.snapshot()["segments"]
    ]


def segments(allocator: CachingAllocator) -> list[tuple[str, int]]:
    """List the kind and the size of each segment."""
    found: list[dict[str, Any]] = allocator.snapshot()["segments"]
    return [(segment["segment_type"], segment["total_size"]) for segment in found]


def actions(allocator: CachingAllocator) -> list[str]:
    return [entry["action"] for entry in allocator.snapshot()["device_traces"][0]]
