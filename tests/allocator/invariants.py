"""Invariants of an allocator after every operation (torch's _check_memory_stat_consistency, and more)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cudakit.allocator.allocator import DeviceCachingAllocator

KINDS = {"small": "small_pool", "large": "large_pool"}
BY_POOL = "reserved_bytes_by_private_pools."


def check(allocator: DeviceCachingAllocator) -> None:
    check_state(allocator.statistics(), allocator.snapshot()["segments"])


def check_state(statistics: dict[str, int], segments: list[dict[str, Any]]) -> None:
    """Check statistics against segments."""
    by_pool_kind = by_private_pool(statistics)
    for kind, segment_type in (("small_pool", "small"), ("large_pool", "large"), ("all", "")):
        selected = [s for s in segments if not segment_type or s["segment_type"] == segment_type]
        for metric, value in statistics_of(selected).items():
            assert statistics[f"{metric}.{kind}.current"] == value, (metric, kind)
        assert by_pool_kind[kind] == by_pool(selected), kind
    check_statistics(statistics)
    check_layout(segments)


def statistics_of(segments: list[dict[str, Any]]) -> dict[str, int]:
    """Return the statistics that follow from segments."""
    blocks = [block for segment in segments for block in segment["blocks"]]
    active = [block for block in blocks if block["state"] != "inactive"]
    plain = [s["blocks"] for s in segments if not s["is_expandable"]]
    split = [selected for selected in plain if len(selected) > 1]
    inactive = [b["size"] for selected in split for b in selected if b["state"] == "inactive"]
    return {
        "segment": sum(not s["is_expandable"] for s in segments),
        "reserved_bytes": sum(s["total_size"] for s in segments),
        "allocated_bytes": sum(s["allocated_size"] for s in segments),
        "active_bytes": sum(s["active_size"] for s in segments),
        "requested_bytes": sum(s["requested_size"] for s in segments),
        "allocation": sum(block["state"] == "active_allocated" for block in active),
        "active": len(active),
        "inactive_split": len(inactive),
        "inactive_split_bytes": sum(inactive),
    }


def by_pool(segments: list[dict[str, Any]]) -> dict[str, int]:
    """Return the reserved bytes of each private pool by id."""
    reserved_bytes = Counter[str]()
    for segment in segments:
        if segment["segment_pool_id"] != (0, 0):
            reserved_bytes["{}_{}".format(*segment["segment_pool_id"])] += segment["total_size"]
    return dict(reserved_bytes)


def by_private_pool(statistics: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return the reserved bytes of private pools in the statistics, by kind and id."""
    reserved_bytes: dict[str, dict[str, int]] = {kind: {} for kind in (*KINDS.values(), "all")}
    for name, value in statistics.items():
        if value and name.startswith(BY_POOL) and name.endswith(".current"):
            _, pool, kind, _ = name.split(".")
            reserved_bytes[kind][pool] = value
    return reserved_bytes


def check_statistics(statistics: dict[str, int]) -> None:
    for name, current in statistics.items():
        if name.endswith(".current"):
            metric = name.removesuffix("current")
            peak = statistics[f"{metric}peak"]
            assert peak >= current >= 0, metric
            assert min(statistics[f"{metric}allocated"], statistics[f"{metric}freed"]) >= 0, metric


def check_layout(segments: list[dict[str, Any]]) -> None:
    end = 0
    for segment in segments:
        assert segment["address"] >= end
        next_address, previous_state = segment["address"], ""
        for block in segment["blocks"]:
            assert block["address"] == next_address
            assert block["size"] > 0
            assert block["size"] % 512 == 0
            assert not (block["state"] == previous_state == "inactive"), (
                "adjacent free blocks are merged"
            )
            next_address, previous_state = next_address + block["size"], block["state"]
        end = segment["address"] + segment["total_size"]
        assert next_address == end
