"""Tables by call site: who holds memory, who leaks it, and who allocates most."""

from __future__ import annotations

from collections.abc import Iterator

from cudakit.core.memory.present.rows import NO_STACK, limited, stack_value
from cudakit.core.memory.result import Churn, DeviceMemory, Facet
from cudakit.document import (
    Bytes,
    Count,
    Node,
    Note,
    Ratio,
    Seconds,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable


def lines(device: DeviceMemory, top: int) -> Table:
    """List the source lines that hold most."""
    return limited(
        (
            ("bytes", "number", lambda line: Bytes(line.bytes)),
            ("share", "bar", lambda line: Ratio(line.share)),
            ("blocks", "number", lambda line: Count(line.count)),
            ("line of your program", "text", lambda line: line.frame or Text(NO_STACK)),
        ),
        device.lines,
        top,
        ("line of source", "lines of source"),
    )


def holders(device: DeviceMemory, top: int) -> Table:
    """List the call stacks that hold most."""
    return limited(
        (
            ("bytes", "number", lambda holder: Bytes(holder.bytes)),
            ("share", "bar", lambda holder: Ratio(holder.share)),
            ("blocks", "number", lambda holder: Count(holder.count)),
            ("call stack", "stack", lambda holder: stack_value(holder.stack, holder.site)),
        ),
        device.holders,
        top,
    )


def facet(found: Facet, top: int) -> Table:
    """List the values of a facet that hold most."""
    return limited(
        (
            ("bytes", "number", lambda group: Bytes(group.bytes)),
            ("share", "bar", lambda group: Ratio(group.share)),
            ("blocks", "number", lambda group: Count(group.count)),
            (found.name.replace("_", " "), "text", lambda group: Text(group.name or "(none)")),
        ),
        found.groups,
        top,
        ("value", "values"),
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
        (
            ("per step", "number", lambda leak: Bytes(leak.bytes_per_step)),
            ("held now", "number", lambda leak: Bytes(leak.bytes)),
            ("blocks", "number", lambda leak: Count(leak.count)),
            ("call stack", "stack", lambda leak: stack_value(leak.stack, leak.site)),
        ),
        device.leaks,
        top,
    )


def churn(device: DeviceMemory, top: int) -> Table:
    """List the stacks that allocate most over the trace."""
    return limited(
        (
            ("allocated", "number", lambda row: Bytes(row.bytes)),
            ("share", "bar", lambda row: Ratio(row.share)),
            ("times", "number", lambda row: Count(row.count)),
            ("mean life", "number", _mean_life),
            ("call stack", "stack", lambda row: stack_value(row.stack, row.site)),
        ),
        device.churn,
        top,
    )


def _mean_life(row: Churn) -> Value:
    if row.mean_lifetime_us is None:
        return Unavailable("none of them ended, or the file has no times")
    return Seconds(row.mean_lifetime_us / 1e6)
