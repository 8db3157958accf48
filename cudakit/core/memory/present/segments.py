"""Segments, and what is free inside them."""

from __future__ import annotations

from collections.abc import Iterator

from cudakit.core.memory.present.rows import limited, pool_name, stack_value
from cudakit.core.memory.result import DeviceMemory, Fragmentation
from cudakit.document import Bytes, Column, Count, Facts, Node, Ratio, Table, Text


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
