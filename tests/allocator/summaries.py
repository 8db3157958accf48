"""Changes of statistics, and summaries of snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cudakit.allocator.allocator import DeviceCachingAllocator


def current(allocator: DeviceCachingAllocator, metric: str, kind: str = "all") -> int:
    return allocator.statistics()[f"{metric}.{kind}.current"]


@contextmanager
def changes(allocator: DeviceCachingAllocator) -> Iterator[dict[str, int]]:
    """Yield a dict that receives the changes of current values at the end, by name without ``current``.

    Statistics of private pools that are created meanwhile are left out.
    """
    earlier = allocator.statistics()
    values: dict[str, int] = {}
    yield values
    for name, value in allocator.statistics().items():
        if name.endswith(".current") and value != earlier.get(name, value):
            values[name.removesuffix(".current")] = value - earlier[name]


def blocks(allocator: DeviceCachingAllocator) -> list[list[tuple[int, str]]]:
    """Return the size and the state of each block, by segment."""
    return [
        [(block["size"], block["state"]) for block in segment["blocks"]]
        for segment in allocator.snapshot()["segments"]
    ]


def segments(allocator: DeviceCachingAllocator) -> list[tuple[str, int]]:
    """Return the kind and the size of each segment."""
    values: list[dict[str, Any]] = allocator.snapshot()["segments"]
    return [(segment["segment_type"], segment["total_size"]) for segment in values]


def actions(allocator: DeviceCachingAllocator) -> list[str]:
    return [entry["action"] for entry in allocator.snapshot()["device_traces"][0]]
