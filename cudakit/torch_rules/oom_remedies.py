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
    size_class = "small" if stream_pool.is_small else "large"
    pool_text = (
        ""
        if stream_pool.pool == DEFAULT_POOL
        else f" of private pool {stream_pool.pool[0]},{stream_pool.pool[1]}"
    )
    return f"in the {size_class} blocks{pool_text} on stream {stream_pool.stream:#x}"


def _timing_remedies(report: OomReport) -> Iterator[str]:
    cached_bytes = sum(stream_pool.releasable_bytes for stream_pool in report.stream_pools)
    if report.is_capturing and (cached_bytes or report.pending_bytes):
        yield (
            f"during a capture {format_bytes(cached_bytes + report.pending_bytes)} of cached or pending"
            " memory cannot be released: run the code once before the capture, then call empty_cache()"
        )
    if report.is_rejected and cached_bytes:
        yield (
            f"without throw_on_cudamalloc_oom:True {format_bytes(cached_bytes)} of cached memory would have"
            " been released first"
        )
    for stream, waiting_bytes in report.bytes_by_awaited_stream:
        if waiting_bytes >= report.block_bytes:
            yield (
                f"{format_bytes(waiting_bytes)} was freed but waits for stream {stream:#x}: synchronize that"
                " stream before the request, or free its memory earlier"
            )


def _address_remedies(report: OomReport) -> Iterator[str]:
    if report.range_bytes is None or report.block_bytes <= report.range_bytes:
        return
    setting_name = "expandable_segments_reserve"
    class_text = f" of class {report.reserve_class}" if report.reserve_class else ""
    if report.reserve_class:
        setting_name += f"_by_class, or {setting_name}"
    yield (
        f"an expandable segment{class_text} reserves {format_bytes(report.range_bytes)} of addresses, and a"
        f" request cannot be larger: raise {setting_name}"
    )


def _limit_remedies(report: OomReport) -> Iterator[str]:
    needed_bytes = report.reserved_bytes + report.segment_bytes
    if report.is_limited and report.limit_bytes is not None:
        memory_share = math.ceil(100 * needed_bytes / report.device_total_bytes) / 100
        yield (
            f"raise the memory fraction to {min(memory_share, 1.0):.2f}: the device has free memory, but"
            f" the limit is {format_bytes(report.limit_bytes)}"
        )
    min_segment_bytes = -(-report.block_bytes // SEGMENT_STEP) * SEGMENT_STEP
    usable_bytes = report.device_free_bytes
    if report.limit_bytes is not None:
        usable_bytes = min(usable_bytes, report.limit_bytes - report.reserved_bytes)
    if not report.is_small and min_segment_bytes <= usable_bytes < report.segment_bytes:
        segment_mb = max(min_segment_bytes // MIB, 12)
        yield (
            f"the request fits, but a segment of {format_bytes(report.segment_bytes)} does not:"
            f" set large_segment_size_mb:{segment_mb}"
        )


def _free_block_remedies(report: OomReport) -> Iterator[str]:
    fit, own_pool = report.fit(), report.own_pool
    largest_text = format_bytes(own_pool.largest_free_bytes)
    if fit.after_pending_frees and report.max_split_size_bytes is None:
        yield f"a free block of {largest_text} came too late: create the allocator with search_again=True"
    elif fit.after_pending_frees:
        yield (
            f"a free block of {largest_text} was not used: raise max_split_size_mb, above which blocks do not"
            " serve smaller requests"
        )
    elif fit.without_holes:
        action = "free the blocks between them"
        if not report.expandable_segments:
            action = f"set expandable_segments:True, or {action}"
        free_text = format_bytes(own_pool.free_bytes)
        yield f"{free_text} is free, but the largest free block is {largest_text}: {action}"
    if fit.in_another_pool and (other_pool := report.best_other_pool):
        yield (
            f"a block of {format_bytes(other_pool.largest_free_bytes)} is cached "
            f"{describe_stream_pool(other_pool)}:"
            " allocate there, or use one stream"
        )


def _other_memory_remedies(report: OomReport) -> Iterator[str]:
    if report.private_free_bytes >= report.block_bytes and report.pool == DEFAULT_POOL:
        yield (
            f"{format_bytes(report.private_free_bytes)} is cached in private pools: close graphs that are not"
            " needed any more, or let graphs share a pool"
        )
    bytes_by_pid = {
        pid: used_bytes
        for pid, used_bytes in report.used_by_process().items()
        if pid != os.getpid()
    }
    if bytes_by_pid and max(bytes_by_pid.values()) >= report.segment_bytes:
        pid = max(bytes_by_pid, key=lambda pid: bytes_by_pid[pid])
        yield f"end process {pid}, which uses {format_bytes(bytes_by_pid[pid])}"
    elif not bytes_by_pid and report.elsewhere_bytes >= report.segment_bytes:
        yield (
            f"{format_bytes(report.elsewhere_bytes)} is in use outside of this allocator: `cudakit devices`"
            " shows the processes"
        )


def _general_remedies(report: OomReport) -> Iterator[str]:
    has_stacks = any(pin.frames for pin in report.pins)
    calls_text = (
        "save_on_out_of_memory()" if has_stacks else "record_history() and save_on_out_of_memory()"
    )
    yield f"free memory, or request less: {calls_text} and then `cudakit memviz` show what uses it"
