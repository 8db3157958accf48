"""Invariants of pinned memory after every operation."""

from __future__ import annotations

from itertools import pairwise

from allocator.pinned.host import Host

from cudakit.allocator.pinned import CachingHostAllocator


def check(pool: CachingHostAllocator, host: Host) -> None:
    statistics, segments = pool.statistics(), pool.snapshot()["host_segments"]
    active = [s for s in segments if s["active"]]
    assert statistics["active_requests.current"] == len(active)
    assert statistics["active_bytes.current"] == sum(s["size"] for s in active)
    assert statistics["allocated_bytes.current"] == sum(s["size"] for s in segments)
    assert statistics["num_host_alloc"] == statistics["allocations.allocated"]
    assert statistics["num_host_free"] == statistics["allocations.freed"]
    for metric in ("allocations", "allocated_bytes", "active_requests", "active_bytes"):
        values = {p: statistics[f"{metric}.{p}"] for p in ("current", "peak", "allocated", "freed")}
        assert min(values.values()) >= 0
        assert values["peak"] >= values["current"] == values["allocated"] - values["freed"]
    for segment, next_segment in pairwise(segments):
        assert segment["address"] + segment["size"] <= next_segment["address"]
    for segment in segments:
        begin, end = segment["address"], segment["address"] + segment["size"]
        assert any(ptr <= begin and end <= ptr + size for ptr, size in host.held.items())
        assert segment["requested_size"] <= segment["size"]
