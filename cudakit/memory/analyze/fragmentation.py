"""Free memory in segments, and the blocks that keep these segments in use."""

from __future__ import annotations

import numpy as np

from cudakit.memory.analyze.call_sites import StackTable
from cudakit.memory.replay.allocations import Allocations
from cudakit.memory.replay.layout import Layout
from cudakit.memory.result import Fragmentation, Pin, SegmentGroup
from cudakit.memory.snapshot import Ints, SegmentKind, Snapshot


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
