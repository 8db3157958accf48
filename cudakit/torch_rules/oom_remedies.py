"""What would have helped a request of the caching allocator that failed, the surest remedy first."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from cudakit.torch_rules.oom_facts import DEFAULT_POOL, OomReport, Silo
from cudakit.torch_rules.sizes import MIB, SEGMENT_STEP
from cudakit.units import format_bytes


def hint_of(report: OomReport) -> str:
    """Return the remedies in one line."""
    return "; ".join(remedies(report))


def remedies(report: OomReport) -> tuple[str, ...]:
    """Return what would have helped, the surest first; never empty."""
    if report.segment_bytes > report.device_total_bytes:
        return ("ask for less: that is more than the device has",)
    found = [
        *_of_addresses(report),
        *_of_moment(report),
        *_of_limits(report),
        *_of_free_blocks(report),
    ]
    return tuple([*found, *_of_other_holders(report)] or _of_nothing(report))


def place(silo: Silo) -> str:
    """Return the words for the requests that memory serves."""
    kind = "small" if silo.small else "large"
    pool = "" if silo.pool == DEFAULT_POOL else f" of private pool {silo.pool[0]},{silo.pool[1]}"
    return f"in the {kind} blocks{pool} on stream {silo.stream:#x}"


def _of_moment(r: OomReport) -> Iterator[str]:
    cached = sum(silo.releasable_bytes for silo in r.silos)
    if r.capturing and (cached or r.pending_bytes):
        yield (
            f"a capture is under way, so the {format_bytes(cached + r.pending_bytes)} that are cached or"
            " pending could not be given back: run once before the capture, then empty_cache()"
        )
    if r.rejected and cached:
        yield (
            f"throw_on_cudamalloc_oom:True refused this at once: without it the {format_bytes(cached)}"
            " that are cached would have been given back first"
        )
    for stream, waiting in r.awaited:
        if waiting >= r.block_bytes:
            yield (
                f"{format_bytes(waiting)} was freed but waits for stream {stream:#x}: let it come so far"
                " before the request, or free what it uses on that stream earlier"
            )


def _of_addresses(r: OomReport) -> Iterator[str]:
    if r.most_addresses is None or r.block_bytes <= r.most_addresses:
        return
    setting = "expandable_segments_reserve"
    whose = f" of class {r.reserve_class}" if r.reserve_class else ""
    if r.reserve_class:
        setting += f"_by_class, or {setting}"
    yield (
        f"an expandable segment{whose} sets {format_bytes(r.most_addresses)} of addresses aside, and a"
        f" request cannot be larger: raise {setting}"
    )


def _of_limits(r: OomReport) -> Iterator[str]:
    needed = r.reserved_bytes + r.segment_bytes
    if r.limited and r.limit_bytes is not None:
        share = math.ceil(100 * needed / r.device_total_bytes) / 100
        yield (
            f"raise the memory fraction to {min(share, 1.0):.2f}: the device has room, the limit of"
            f" {format_bytes(r.limit_bytes)} has not"
        )
    least = -(-r.block_bytes // SEGMENT_STEP) * SEGMENT_STEP
    room = r.device_free_bytes
    if r.limit_bytes is not None:
        room = min(room, r.limit_bytes - r.reserved_bytes)
    if not r.small and least <= room < r.segment_bytes:
        right = max(least // MIB, 12)
        yield (
            f"there is room for the request, but not for a segment of {format_bytes(r.segment_bytes)}:"
            f" set large_segment_size_mb:{right}"
        )


def _of_free_blocks(r: OomReport) -> Iterator[str]:
    fit, own = r.fit(), r.own
    largest = format_bytes(own.largest_free_bytes)
    if fit.after_pending_frees and r.max_split_size_bytes is None:
        yield f"a free block of {largest} came too late: make the allocator with search_again=True"
    elif fit.after_pending_frees:
        yield (
            f"a free block of {largest} was not used: raise max_split_size_mb, which keeps large blocks"
            " from smaller requests"
        )
    elif fit.without_holes:
        pieces = "free the blocks between them"
        if not r.expandable_segments:
            pieces = f"set expandable_segments:True, or {pieces}"
        yield f"{format_bytes(own.free_bytes)} is free, but in pieces of at most {largest}: {pieces}"
    if fit.in_another_pool and (other := r.best_other):
        yield (
            f"{format_bytes(other.largest_free_bytes)} in one piece is cached {place(other)}:"
            " allocate there, or share a stream"
        )


def _of_other_holders(r: OomReport) -> Iterator[str]:
    if r.private_free_bytes >= r.block_bytes and r.pool == DEFAULT_POOL:
        yield (
            f"{format_bytes(r.private_free_bytes)} is cached in private pools: give up graphs that run no"
            " more, or let graphs share a pool"
        )
    processes = {pid: n for pid, n in r.used_by_process().items() if pid != os.getpid()}
    if processes and max(processes.values()) >= r.segment_bytes:
        pid = max(processes, key=lambda pid: processes[pid])
        yield f"end process {pid}, which holds {format_bytes(processes[pid])}"
    elif not processes and r.elsewhere_bytes >= r.segment_bytes:
        yield (
            f"{format_bytes(r.elsewhere_bytes)} is held outside of this allocator:"
            " `nvidia-smi` shows the processes"
        )


def _of_nothing(r: OomReport) -> Iterator[str]:
    recorded = any(pin.frames for pin in r.pins)
    by = "save_on_out_of_memory()" if recorded else "record_history() and save_on_out_of_memory()"
    yield f"free memory, or ask for less: {by} and then `cudakit memviz` show who has it"
