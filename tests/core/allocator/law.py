"""What holds of an allocator after every operation (torch's own _check_memory_stat_consistency, and more)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cudakit.core.allocator.allocator import CachingAllocator

KINDS = {"small": "small_pool", "large": "large_pool"}


def check(allocator: CachingAllocator) -> None:
    statistics, segments = allocator.statistics(), allocator.snapshot()["segments"]
    for kind, of in (("small_pool", "small"), ("large_pool", "large"), ("all", "")):
        own = [s for s in segments if not of or s["segment_type"] == of]
        for metric, value in summed(own).items():
            assert statistics[f"{metric}.{kind}.current"] == value, (metric, kind)
        assert by_private_pool(statistics, kind) == by_pool(own), kind
    check_statistics(statistics)
    check_layout(segments)


def summed(segments: list[dict[str, Any]]) -> dict[str, int]:
    """Add up what the statistics say."""
    blocks = [block for segment in segments for block in segment["blocks"]]
    active = [block for block in blocks if block["state"] != "inactive"]
    plain = [s["blocks"] for s in segments if not s["is_expandable"]]
    split = [own for own in plain if len(own) > 1]
    inactive = [b["size"] for own in split for b in own if b["state"] == "inactive"]
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
    """Add up what each private pool has, by its id."""
    found = Counter[str]()
    for segment in segments:
        if segment["segment_pool_id"] != (0, 0):
            found["{}_{}".format(*segment["segment_pool_id"])] += segment["total_size"]
    return dict(found)


def by_private_pool(statistics: dict[str, int], kind: str) -> dict[str, int]:
    """Return the same as the statistics say it."""
    parts = ((*name.split("."), value) for name, value in statistics.items() if value)
    return {
        str(part[1]): int(part[-1])
        for part in parts
        if part[0] == "reserved_bytes_by_private_pools" and part[2:4] == (kind, "current")
    }


def check_statistics(statistics: dict[str, int]) -> None:
    metrics = {name.rsplit(".", 1)[0] for name in statistics if "." in name}
    for metric in metrics:
        part = {p: statistics[f"{metric}.{p}"] for p in ("current", "peak", "allocated", "freed")}
        assert min(part.values()) >= 0, metric
        assert part["peak"] >= part["current"], metric


def check_layout(segments: list[dict[str, Any]]) -> None:
    end = 0
    for segment in segments:
        assert segment["address"] >= end
        place, before = segment["address"], ""
        for block in segment["blocks"]:
            assert block["address"] == place
            assert block["size"] > 0
            assert block["size"] % 512 == 0
            assert not (block["state"] == before == "inactive"), "free neighbours are merged"
            place, before = place + block["size"], block["state"]
        end = segment["address"] + segment["total_size"]
        assert place == end
