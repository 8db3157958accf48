"""Segments: in groups, what is free inside them, and their layout."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cudakit.core.memory.present.layout import memory_layout
from cudakit.core.memory.present.rows import limited, pool_name, stack_value
from cudakit.core.memory.result import DeviceMemory, Fragmentation
from cudakit.core.memory.snapshot import SegmentKind
from cudakit.document import Bytes, Column, Columns, Count, Facts, Node, Ratio, Table, Text, View


def segments(device: DeviceMemory, top: int) -> Table:
    """List the groups of segments."""
    return limited(
        ("group", "groups"),
        (
            Column("pool", "text"),
            Column("stream", "number"),
            Column("kind", "text"),
            Column("segments", "number"),
            Column("reserved", "number"),
            Column("in use", "number"),
            Column("free", "number"),
            Column("largest hole", "number"),
        ),
        device.segments,
        lambda group: (
            Text(pool_name(group.pool)),
            Count(group.stream),
            Text(f"{group.kind}, expandable" if group.expandable else group.kind),
            Count(group.segments),
            Bytes(group.reserved_bytes),
            Bytes(group.used_bytes),
            Bytes(group.free_bytes),
            Bytes(group.largest_hole_bytes),
        ),
        top,
    )


def fragmentation(device: DeviceMemory, top: int) -> Iterator[Node]:
    """Show what is free inside segments, and the blocks that pin it there."""
    found = device.fragmentation
    yield _fragmentation_facts(found)
    if found.pins:
        yield limited(
            ("call stack", "call stacks"),
            (
                Column("pins", "number"),
                Column("alone", "number"),
                Column("segments", "number"),
                Column("with blocks", "number"),
                Column("of", "number"),
                Column("call stack of the pinning blocks", "stack"),
            ),
            found.pins,
            lambda pin: (
                Bytes(pin.pinned_bytes),
                Bytes(pin.alone_bytes),
                Count(pin.segments),
                Count(pin.blocks),
                Bytes(pin.bytes),
                stack_value(pin.stack, pin.site),
            ),
            top,
        )


def _fragmentation_facts(found: Fragmentation) -> Facts:
    return Facts(
        (
            ("free inside segments", Bytes(found.free_bytes)),
            ("of reserved", Ratio(found.free_share)),
            ("largest hole", Bytes(found.largest_hole_bytes)),
            ("holes", Count(found.holes)),
            ("pinned by blocks", Bytes(found.stranded_bytes)),
            ("in empty segments", Bytes(found.releasable_bytes)),
            ("lost to rounding", Bytes(found.rounding_bytes)),
            ("of blocks", Ratio(found.rounding_share)),
        )
    )


def layout_columns(device: DeviceMemory) -> tuple[Columns, Columns]:
    """Give the segments and blocks of the end as columns, for the layout view."""
    found = device.layout
    segments = found.segments
    blocks = Columns(
        "blocks",
        {
            "segment": found.block_segment,
            "offset": found.block_offset,
            "size": found.block_size,
            "requested": found.block_requested,
            "state": np.where(found.block_pending, 2, 1),
        },
    )
    table = Columns(
        "segments",
        {
            "address": segments.address,
            "size": segments.size,
            "stream": segments.stream,
            "pool": segments.pool,
            "kind": segments.kind,
        },
        text={
            "pool": tuple(pool_name(pool) for pool in device.snapshot.pools),
            "kind": tuple(kind.name.lower() for kind in SegmentKind),
        },
    )
    return table, blocks


def layout(device: DeviceMemory) -> View:
    """Draw each segment with its blocks; in words, the segments with most free memory."""
    fallback = _emptiest_segments(device)
    return View("memory-layout", ("segments", "blocks"), memory_layout, fallback)


def _emptiest_segments(device: DeviceMemory) -> Table:
    found = device.layout
    free, used = found.free_by_segment(), found.used_by_segment()
    blocks = np.bincount(found.block_segment, minlength=len(free))
    order = np.argsort(-free, kind="stable")[:5]
    return Table(
        columns=(
            Column("segment", "text"),
            Column("size", "number"),
            Column("in use", "number"),
            Column("free", "number"),
            Column("blocks", "number"),
        ),
        rows=tuple(
            (
                Text(f"0x{int(found.segments.address[i]):x}"),
                Bytes(int(found.segments.size[i])),
                Bytes(int(used[i])),
                Bytes(int(free[i])),
                Count(int(blocks[i])),
            )
            for i in order.tolist()
        ),
        caption="the segments with most free memory",
    )
