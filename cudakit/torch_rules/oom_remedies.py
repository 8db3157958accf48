"""Remedies for a failed request of the caching allocator, most certain first."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from cudakit.torch_rules.oom_facts import DEFAULT_POOL, OomReport, StreamPool
from cudakit.torch_rules.sizes import MIB, SEGMENT_STEP
from cudakit.units import format_bytes


def hint_of(report: OomReport) -> str:
    """Return the remedies in one line."""
    return "; ".join(remedies(report))


def remedies(report: OomReport) -> tuple[str, ...]:
    """Return the remedies, most certain first; never empty."""
    if report.segment_bytes > report.device_total_bytes:
        return ("request less: the device has less memory",)
    specific_remedies = [
        *_address_remedies(report),
        *_timing_remedies(report),
        *_limit_remedies(report),
        *_free_block_remedies(report),
    ]
    return tuple([*specific_remedies, *_other_memory_remedies(report)] or _general_remedies(report))


def describe_stream_pool(stream_pool: StreamPool) -> str:
    """Describe a stream pool: size class, private pool and stream."""
    kind = "small" if stream_pool.is_small else "large"
    pool = (
        ""
        if stream_pool.pool == DEFAULT_POOL
        else f" of private pool {stream_pool.pool[0]},{stream_pool.pool[1]}"
    )
    return f"in the {kind} blocks{pool} on stream {stream_pool.stream:#x}"


def _timing_remedies(r: OomReport) -> Iterator[str]:
    cached_bytes = sum(stream_pool.releasable_bytes for stream_pool in r.stream_pools)
    if r.is_capturing and (cached_bytes or r.pending_bytes):
        yield (
            f"during a capture {format_bytes(cached_bytes + r.pending_bytes)} of cached or pending memory"
            " cannot be released: run the code once before the capture, then call empty_cache()"
        )
    if r.is_rejected and cached_bytes:
        yield (
            f"without throw_on_cudamalloc_oom:True {format_bytes(cached_bytes)} of cached memory would have"
            " been released first"
        )
    for stream, waiting in r.bytes_by_awaited_stream:
        if waiting >= r.block_bytes:
            yield (
                f"{format_bytes(waiting)} was freed but waits for stream {stream:#x}: synchronize that stream"
                " before the request, or free its memory earlier"
            )


def _address_remedies(r: OomReport) -> Iterator[str]:
    if r.range_bytes is None or r.block_bytes <= r.range_bytes:
        return
    setting = "expandable_segments_reserve"
    class_name = f" of class {r.reserve_class}" if r.reserve_class else ""
    if r.reserve_class:
        setting += f"_by_class, or {setting}"
    yield (
        f"an expandable segment{class_name} reserves {format_bytes(r.range_bytes)} of addresses, and a"
        f" request cannot be larger: raise {setting}"
    )


def _limit_remedies(r: OomReport) -> Iterator[str]:
    needed_bytes = r.reserved_bytes + r.segment_bytes
    if r.is_limited and r.limit_bytes is not None:
        share = math.ceil(100 * needed_bytes / r.device_total_bytes) / 100
        yield (
            f"raise the memory fraction to {min(share, 1.0):.2f}: the device has free memory, but the limit"
            f" is {format_bytes(r.limit_bytes)}"
        )
    min_segment_bytes = -(-r.block_bytes // SEGMENT_STEP) * SEGMENT_STEP
    usable_bytes = r.device_free_bytes
    if r.limit_bytes is not None:
        usable_bytes = min(usable_bytes, r.limit_bytes - r.reserved_bytes)
    if not r.is_small and min_segment_bytes <= usable_bytes < r.segment_bytes:
        segment_mb = max(min_segment_bytes // MIB, 12)
        yield (
            f"the request fits, but a segment of {format_bytes(r.segment_bytes)} does not:"
            f" set large_segment_size_mb:{segment_mb}"
        )


def _free_block_remedies(r: OomReport) -> Iterator[str]:
    fit, own_pool = r.fit(), r.own_pool
    largest_text = format_bytes(own_pool.largest_free_bytes)
    if fit.after_pending_frees and r.max_split_size_bytes is None:
        yield f"a free block of {largest_text} came too late: create the allocator with search_again=True"
    elif fit.after_pending_frees:
        yield (
            f"a free block of {largest_text} was not used: raise max_split_size_mb, above which blocks do not"
            " serve smaller requests"
        )
    elif fit.without_holes:
        action = "free the blocks between them"
        if not r.expandable_segments:
            action = f"set expandable_segments:True, or {action}"
        free_text = format_bytes(own_pool.free_bytes)
        yield f"{free_text} is free, but the largest free block is {largest_text}: {action}"
    if fit.in_another_pool and (other_pool := r.best_other_pool):
        yield (
            f"a block of {format_bytes(other_pool.largest_free_bytes)} is cached "
            f"{describe_stream_pool(other_pool)}:"
            " allocate there, or use one stream"
        )


def _other_memory_remedies(r: OomReport) -> Iterator[str]:
    if r.private_free_bytes >= r.block_bytes and r.pool == DEFAULT_POOL:
        yield (
            f"{format_bytes(r.private_free_bytes)} is cached in private pools: close graphs that are not"
            " needed any more, or let graphs share a pool"
        )
    processes = {
        pid: used_bytes for pid, used_bytes in r.used_by_process().items() if pid != os.getpid()
    }
    if processes and max(processes.values()) >= r.segment_bytes:
        pid = max(processes, key=lambda pid: processes[pid])
        yield f"end process {pid}, which uses {format_bytes(processes[pid])}"
    elif not processes and r.elsewhere_bytes >= r.segment_bytes:
        yield (
            f"{format_bytes(r.elsewhere_bytes)} is in use outside of this allocator: `cudakit devices`"
            " shows the processes"
        )


def _general_remedies(r: OomReport) -> Iterator[str]:
    has_stacks = any(pin.frames for pin in r.pins)
    calls = (
        "save_on_out_of_memory()" if has_stacks else "record_history() and save_on_out_of_memory()"
    )
    yield f"free memory, or request less: {calls} and then `cudakit memviz` show what uses it"
