"""Memory by call stack, call site and annotation at a moment, and allocations over the whole trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cudakit.memory.call_sites import StackTable
from cudakit.memory.history import Layout
from cudakit.memory.history.allocations import Allocations
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
from cudakit.memory.snapshot import DeviceTrace, Ints, SegmentKind, Snapshot
from cudakit.memory.steps import active_annotation

# The compile context that PyTorch records outside compiled code.
_NO_COMPILE_CONTEXT = "N/A"


def holders_by_stack(
    stacks: StackTable, allocations: Allocations, live_allocations: Ints
) -> tuple[Holder, ...]:
    """Return live memory by call stack, largest first."""
    stack_ids = allocations.stack[live_allocations]
    requested_bytes = np.bincount(stack_ids, weights=allocations.requested[live_allocations])
    return tuple(
        Holder(
            bytes=total.bytes,
            requested_bytes=int(requested_bytes[total.key]),
            count=total.count,
            share=total.share,
            stack=stacks.frames(total.key),
            site=stacks.site_index(total.key),
        )
        for total in totals(stack_ids, allocations.size[live_allocations])
    )


def holders_by_line(
    stacks: StackTable, allocations: Allocations, live_allocations: Ints
) -> tuple[Line, ...]:
    """Return live memory by call site, largest first."""
    site_ids = stacks.site_frames[allocations.stack[live_allocations]]
    frames = stacks.snapshot.frames
    return tuple(
        Line(total.bytes, total.count, total.share, frames[total.key] if total.key >= 0 else None)
        for total in totals(site_ids, allocations.size[live_allocations])
    )


def facets(
    snapshot: Snapshot, trace: DeviceTrace, allocations: Allocations, live_allocations: Ints
) -> tuple[Facet, ...]:
    """Return live memory by annotation, compile context, metadata and category; omits empty facets."""
    return tuple(
        Facet(name, groups)
        for name, groups in _facets(snapshot, trace, allocations, live_allocations)
        if any(group.name for group in groups)
    )


def _facets(
    snapshot: Snapshot, trace: DeviceTrace, allocations: Allocations, live_allocations: Ints
) -> Iterator[tuple[str, tuple[Group, ...]]]:
    block_sizes = allocations.size[live_allocations]
    source_events = allocations.source[live_allocations]
    has_event = source_events >= 0
    annotation_of_event, annotation_names = active_annotation(snapshot, trace)
    for facet_name, text_id_by_event, texts in (
        ("annotation", annotation_of_event, annotation_names),
        ("compile_context", trace.events.compile_context, snapshot.texts),
        ("user_metadata", trace.events.user_metadata, snapshot.texts),
        ("category", trace.events.category, snapshot.texts),
    ):
        text_ids = np.zeros(len(live_allocations), np.int32)
        text_ids[has_event] = text_id_by_event[source_events[has_event]]
        if _NO_COMPILE_CONTEXT in texts:
            text_ids[text_ids == texts.index(_NO_COMPILE_CONTEXT)] = 0
        yield (
            facet_name,
            tuple(
                Group(texts[total.key], total.bytes, total.count, total.share)
                for total in totals(text_ids, block_sizes)
            ),
        )


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
    count_by_key = np.bincount(shifted_keys)
    # Sums of bytes stay below 2**53, where float64 is exact.
    bytes_by_key = np.bincount(shifted_keys, weights=amounts).astype(np.int64)
    total_bytes = max(int(bytes_by_key.sum()), 1)
    present_keys = np.flatnonzero(count_by_key)
    for key in present_keys[np.argsort(-bytes_by_key[present_keys], kind="stable")].tolist():
        yield Total(
            key - 1,
            int(bytes_by_key[key]),
            int(count_by_key[key]),
            int(bytes_by_key[key]) / total_bytes,
        )


def churn_by_stack(
    snapshot: Snapshot, trace: DeviceTrace, stacks: StackTable, allocations: Allocations
) -> tuple[Churn, ...]:
    """Return all allocations of the trace by call stack, most bytes first."""
    allocated_indices = np.flatnonzero(allocations.begin >= 0)
    stack_ids = allocations.stack[allocated_indices]
    begin_events, end_events = (
        allocations.begin[allocated_indices],
        allocations.end[allocated_indices],
    )
    has_ended = end_events < len(trace.events)
    event_times = trace.events.time_us
    lifetimes_us = np.zeros(len(allocated_indices), np.int64)
    lifetimes_us[has_ended] = (
        event_times[end_events[has_ended]] - event_times[begin_events[has_ended]]
    )
    n_stacks = len(snapshot.stacks)
    lifetime_sums = np.bincount(stack_ids, weights=lifetimes_us, minlength=n_stacks)
    ended_counts = np.bincount(stack_ids, weights=has_ended, minlength=n_stacks)
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
            stack=stacks.frames(total.key),
            site=stacks.site_index(total.key),
        )
        for total in totals(stack_ids, allocations.requested[allocated_indices])
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
    n_segments = max(len(layout.segments), 1)
    # One item per pair of a stack and a segment with blocks of this stack.
    _, first_of_pair = np.unique(
        block_stacks * n_segments + layout.block_segment, return_index=True
    )
    pair_segments, pair_stacks = layout.block_segment[first_of_pair], block_stacks[first_of_pair]
    is_alone = np.bincount(pair_segments, minlength=n_segments)[pair_segments] == 1
    n_stacks = len(stacks.snapshot.stacks)
    pinned_bytes = np.bincount(
        pair_stacks, weights=free_by_segment[pair_segments], minlength=n_stacks
    )
    pinned_alone_bytes = np.bincount(
        pair_stacks, weights=free_by_segment[pair_segments] * is_alone, minlength=n_stacks
    )
    segment_counts = np.bincount(pair_stacks, minlength=n_stacks)
    block_counts = np.bincount(block_stacks, minlength=n_stacks)
    block_bytes = np.bincount(block_stacks, weights=layout.block_size, minlength=n_stacks)
    stacks_by_rank = np.lexsort((-pinned_bytes, -pinned_alone_bytes))
    return tuple(
        Pin(
            blocks=int(block_counts[index]),
            bytes=int(block_bytes[index]),
            segments=int(segment_counts[index]),
            pinned_bytes=int(pinned_bytes[index]),
            alone_bytes=int(pinned_alone_bytes[index]),
            stack=stacks.frames(index),
            site=stacks.site_index(index),
        )
        for index in stacks_by_rank[pinned_bytes[stacks_by_rank] > 0].tolist()
    )


def segment_groups(snapshot: Snapshot, layout: Layout) -> tuple[SegmentGroup, ...]:
    """Sum segments by pool, stream, kind and expandability, largest first."""
    segments = layout.segments
    free_by_segment = layout.free_by_segment()
    largest_free_bytes = np.zeros(len(segments), np.int64)
    np.maximum.at(largest_free_bytes, layout.free_block_segment, layout.free_block_size)
    group_keys = np.stack(
        (segments.pool, segments.stream, segments.kind, segments.expandable), axis=1
    ).astype(np.int64)
    distinct_keys, group_of_segment = np.unique(group_keys, axis=0, return_inverse=True)
    group_of_segment = group_of_segment.reshape(-1)
    groups = []
    for index, (pool, stream, kind, is_expandable) in enumerate(distinct_keys.tolist()):
        is_in_group = group_of_segment == index
        reserved_bytes, free_bytes = (
            int(segments.size[is_in_group].sum()),
            int(free_by_segment[is_in_group].sum()),
        )
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
    return tuple(sorted(groups, key=lambda g: -g.reserved_bytes))
