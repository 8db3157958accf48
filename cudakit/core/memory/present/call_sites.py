"""Tables by call site: who holds memory, who leaks it, and who allocates most."""

from __future__ import annotations

from collections.abc import Iterator

from cudakit.core.memory.present.rows import NO_STACK, limited, stack_value
from cudakit.core.memory.result import DeviceMemory, Facet
from cudakit.document import (
    Bytes,
    Column,
    Count,
    Node,
    Note,
    Ratio,
    Seconds,
    Table,
    Text,
)
from cudakit.units import Unavailable


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


def leaks(device: DeviceMemory, top: int) -> Iterator[Node]:
    """List the stacks that hold more after each step."""
    steps = device.steps
    if steps.source == "none":
        yield Note(
            "info",
            "no steps were found to compare",
            remedies=("mark them with torch.profiler.record_function('step 1') and so on",),
        )
        return
    by = f"{steps.count} moments compared, by {steps.source}"
    if not device.leaks:
        yield Note("ok", f"nothing grows from step to step ({by})")
        return
    n = len(device.leaks)
    who = "1 call stack holds" if n == 1 else f"{n} call stacks hold"
    yield Note("warn", f"{who} more after each step ({by})")
    yield limited(
        ("call stack", "call stacks"),
        (
            Column("per step", "number"),
            Column("held now", "number"),
            Column("blocks", "number"),
            Column("call stack", "stack"),
        ),
        device.leaks,
        lambda leak: (
            Bytes(leak.bytes_per_step),
            Bytes(leak.bytes),
            Count(leak.count),
            stack_value(leak.stack, leak.site),
        ),
        top,
    )


def churn(device: DeviceMemory, top: int) -> Table:
    """List the stacks that allocate most over the trace."""
    return limited(
        ("call stack", "call stacks"),
        (
            Column("allocated", "number"),
            Column("share", "bar"),
            Column("times", "number"),
            Column("mean life", "number"),
            Column("call stack", "stack"),
        ),
        device.churn,
        lambda row: (
            Bytes(row.bytes),
            Ratio(row.share),
            Count(row.count),
            Unavailable("none of them ended, or the file has no times")
            if row.mean_lifetime_us is None
            else Seconds(row.mean_lifetime_us / 1e6),
            stack_value(row.stack, row.site),
        ),
        top,
    )
