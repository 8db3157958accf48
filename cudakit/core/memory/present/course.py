"""What happens along the trace: leaks and churn."""

from __future__ import annotations

from collections.abc import Iterator

from cudakit.core.memory.present.rows import limited, stack_value
from cudakit.core.memory.result import DeviceMemory
from cudakit.document import (
    Bytes,
    Column,
    Count,
    Node,
    Note,
    Ratio,
    Seconds,
    Table,
)
from cudakit.units import Unavailable


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
