"""Who holds the memory: tables by line, by call stack, by facet."""

from __future__ import annotations

from cudakit.core.memory.present.rows import NO_STACK, limited, stack_value
from cudakit.core.memory.result import DeviceMemory, Facet
from cudakit.document import Bytes, Column, Count, Ratio, Table, Text


def lines(device: DeviceMemory, top: int) -> Table:
    """List the source lines that hold most."""
    return limited(
        ("line of source", "lines of source"),
        (
            Column("bytes", "number"),
            Column("share", "bar"),
            Column("blocks", "number"),
            Column("line of your program", "text"),
        ),
        device.lines,
        lambda line: (
            Bytes(line.bytes),
            Ratio(line.share),
            Count(line.count),
            line.frame or Text(NO_STACK),
        ),
        top,
    )


def holders(device: DeviceMemory, top: int) -> Table:
    """List the call stacks that hold most."""
    return limited(
        ("call stack", "call stacks"),
        (
            Column("bytes", "number"),
            Column("share", "bar"),
            Column("blocks", "number"),
            Column("call stack", "stack"),
        ),
        device.holders,
        lambda holder: (
            Bytes(holder.bytes),
            Ratio(holder.share),
            Count(holder.count),
            stack_value(holder.stack, holder.site),
        ),
        top,
    )


def facet(found: Facet, top: int) -> Table:
    """List the values of a facet that hold most."""
    return limited(
        ("value", "values"),
        (
            Column("bytes", "number"),
            Column("share", "bar"),
            Column("blocks", "number"),
            Column(found.name.replace("_", " "), "text"),
        ),
        found.groups,
        lambda group: (
            Bytes(group.bytes),
            Ratio(group.share),
            Count(group.count),
            Text(group.name or "(none)"),
        ),
        top,
    )
