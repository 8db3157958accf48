"""Memory by call stack, call site and annotation at a moment, and allocations over the whole trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cudakit.memory.history import Allocations, Layout
from cudakit.memory.result import (
    Churn,
    Facet,
    Fragmentation,
    Group,
    Holder,
    Line,
    Pin,
    SegmentGroup,
)
from cudakit.memory.snapshot import DeviceTrace, Ints, SegmentKind, Snapshot, StackTable, take
from cudakit.memory.steps import active_annotation

# The compile context that PyTorch records outside compiled code.
_NO_COMPILE_CONTEXT = "N/A"


def holders_by_stack(
    stacks: StackTable, allocations: Allocations, live: Ints
) -> tuple[Holder, ...]:
    """Return live memory by call stack, largest first."""
    stack_ids = allocations.stack[live]
    requested_bytes = np.bincount(stack_ids, weights=allocations.requested[live])
    return tuple(
        Holder(
            bytes=total.bytes,
            requested_bytes=int(requested_bytes[total.key]),
            count=total.count,
            share=total.share,
            **stacks.call_site(total.key),
        )
        for total in totals(stack_ids, allocations.size[live])
    )


def holders_by_line(stacks: StackTable, allocations: Allocations, live: Ints) -> tuple[Line, ...]:
    """Return live memory by call site, largest first."""
    site_ids = stacks.site_frames[allocations.stack[live]]
    frames = stacks.snapshot.frames
    return tuple(
        Line(total.bytes, total.count, total.share, frames[total.key] if total.key >= 0 else None)
        for total in totals(site_ids, allocations.size[live])
    )


def facets(
    snapshot: Snapshot, trace: DeviceTrace, allocations: Allocations, live: Ints
) -> tuple[Facet, ...]:
    """Return live memory by annotation, compile context, metadata and category; omits empty facets."""
    source_events = allocations.source[live]
    has_event = source_events >= 0
    annotation_ids, annotation_names = active_annotation(snapshot, trace)
    found = []
    for facet_name, ids, texts in (
        ("annotation", annotation_ids, annotation_names),
        ("compile_context", trace.events.compile_context, snapshot.texts),
        ("user_metadata", trace.events.user_metadata, snapshot.texts),
        ("category", trace.events.category, snapshot.texts),
    ):
        text_ids = np.zeros(len(live), np.int32)
        text_ids[has_event] = ids[source_events[has_event]]
        if _NO_COMPILE_CONTEXT in texts:
            text_ids[text_ids == texts.index(_NO_COMPILE_CONTEXT)] = 0
        groups = tuple(
            Group(texts[total.key], total.bytes, total.count, total.share)
            for total in totals(text_ids, allocations.size[live])
        )
        if any(group.name for group in groups):
            found.append(Facet(facet_name, groups))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Total:
    """The bytes and the number of the blocks that have one key, such as one call stack."""

    key: int
    bytes: int
    count: int
    share: float


def totals(keys: npt.NDArray[np.integer], amounts: Ints) -> Iterator[Total]:
    """Yield the total of ``amounts`` (bytes) per key, largest first. Keys are integers from -1 on."""
    if not len(keys):
        return
    shifted_keys = keys.astype(np.int64) + 1
    counts = np.bincount(shifted_keys)
    # Sums of bytes stay below 2**53, where float64 is exact.
    sums = np.bincount(shifted_keys, weights=amounts).astype(np.int64)
    all_bytes = max(int(sums.sum()), 1)
    present_keys = np.flatnonzero(counts)
    for key in present_keys[np.argsort(-sums[present_keys], kind="stable")].tolist():
        yield Total(key - 1, int(sums[key]), int(counts[key]), int(sums[key]) / all_bytes)


def churn_by_stack(
    snapshot: Snapshot, trace: DeviceTrace, stacks: StackTable, allocations: Allocations
) -> tuple[Churn, ...]:
    """Return all allocations of the trace by call stack, most bytes first."""
    in_trace = take(allocations, allocations.begin >= 0)
    has_ended = in_trace.end < len(trace.events)
    times, n_stacks = trace.events.time_us, len(snapshot.stacks)
    lifetimes_us = np.zeros(len(in_trace), np.int64)
    lifetimes_us[has_ended] = times[in_trace.end[has_ended]] - times[in_trace.begin[has_ended]]
    lifetime_sums = np.bincount(in_trace.stack, weights=lifetimes_us, minlength=n_stacks)
    ended_counts = np.bincount(in_trace.stack, weights=has_ended, minlength=n_stacks)
    has_lifetime = (ended_counts > 0) & snapshot.has_times
    return tuple(
        Churn(
            bytes=total.bytes,
            count=total.count,
            share=total.share,
            mean_size_bytes=total.bytes // total.count,
            mean_lifetime_us=(
                float(lifetime_sums[total.key] / ended_counts[total.key])
                if has_lifetime[total.key]
                else None
            ),
            **stacks.call_site(total.key),
        )
        for total in totals(in_trace.stack, in_trace.requested)
    )


# --- Free memory in segments, and the blocks that keep these segments in use -----------------------


def fragmentation(stacks: StackTable, allocations: Allocations, layout: Layout) -> Fragmentation:
    """Return the free memory in segments, and the call stacks whose blocks keep the segments in use."""
    free_by_segment, used_by_segment = layout.free_by_segment(), layout.used_by_segment()
    reserved_bytes = int(layout.segments.size.sum())
    block_bytes = int(layout.block_size.sum())
    rounding_bytes = block_bytes - int(layout.block_requested.sum())
    return Fragmentation(
        free_bytes=int(free_by_segment.sum()),
        free_share=int(free_by_segment.sum()) / max(reserved_bytes, 1),
        rounding_bytes=rounding_bytes,
        rounding_share=rounding_bytes / max(block_bytes, 1),
        holes=len(layout.free_block_size),
        largest_hole_bytes=int(layout.free_block_size.max(initial=0)),
        stranded_bytes=int(free_by_segment[used_by_segment > 0].sum()),
        releasable_bytes=int(layout.segments.size[used_by_segment == 0].sum()),
        pins=_pins_by_stack(stacks, allocations, layout, free_by_segment),
    )


def _pins_by_stack(
    stacks: StackTable, allocations: Allocations, layout: Layout, free_by_segment: Ints
) -> tuple[Pin, ...]:
    """Return for each call stack the free memory of the segments that contain its blocks."""
    block_stacks = allocations.stack[layout.allocation].astype(np.int64)
    n_segments, n_stacks = max(len(layout.segments), 1), len(stacks.snapshot.stacks)
    # One item per pair of a stack and a segment with blocks of this stack.
    _, pairs = np.unique(block_stacks * n_segments + layout.block_segment, return_index=True)
    pair_segments, pair_stacks = layout.block_segment[pairs], block_stacks[pairs]
    is_alone = np.bincount(pair_segments, minlength=n_segments)[pair_segments] == 1
    free_bytes = free_by_segment[pair_segments]
    pinned_bytes = np.bincount(pair_stacks, weights=free_bytes, minlength=n_stacks)
    alone_bytes = np.bincount(pair_stacks, weights=free_bytes * is_alone, minlength=n_stacks)
    segment_counts = np.bincount(pair_stacks, minlength=n_stacks)
    block_counts = np.bincount(block_stacks, minlength=n_stacks)
    block_bytes = np.bincount(block_stacks, weights=layout.block_size, minlength=n_stacks)
    ranked = np.lexsort((-pinned_bytes, -alone_bytes))
    return tuple(
        Pin(
            blocks=int(block_counts[stack]),
            bytes=int(block_bytes[stack]),
            segments=int(segment_counts[stack]),
            pinned_bytes=int(pinned_bytes[stack]),
            alone_bytes=int(alone_bytes[stack]),
            **stacks.call_site(stack),
        )
        for stack in ranked[pinned_bytes[ranked] > 0].tolist()
    )


def segment_groups(snapshot: Snapshot, layout: Layout) -> tuple[SegmentGroup, ...]:
    """Sum segments by pool, stream, kind and expandability, largest first."""
    segments, free_by_segment = layout.segments, layout.free_by_segment()
    largest_free_bytes = np.zeros(len(segments), np.int64)
    np.maximum.at(largest_free_bytes, layout.free_block_segment, layout.free_block_size)
    columns = (segments.pool, segments.stream, segments.kind, segments.expandable)
    keys, group_of_segment = np.unique(
        np.stack(columns, axis=1).astype(np.int64), axis=0, return_inverse=True
    )
    groups = []
    for index, (pool, stream, kind, is_expandable) in enumerate(keys.tolist()):
        is_in_group = group_of_segment.reshape(-1) == index
        reserved_bytes = int(segments.size[is_in_group].sum())
        free_bytes = int(free_by_segment[is_in_group].sum())
        groups.append(
            SegmentGroup(
                pool=snapshot.pools[pool],
                stream=stream,
                kind=SegmentKind(kind).name.lower(),
                expandable=bool(is_expandable),
                segments=int(is_in_group.sum()),
                reserved_bytes=reserved_bytes,
                used_bytes=reserved_bytes - free_bytes,
                free_bytes=free_bytes,
                largest_hole_bytes=int(largest_free_bytes[is_in_group].max()),
            )
        )
    return tuple(sorted(groups, key=lambda group: -group.reserved_bytes))
