"""Tables by call site: memory in use, growth from step to step, and allocations over the trace."""

from __future__ import annotations

from collections.abc import Iterator

from cudakit.memory.present.rows import (
    NO_STACK,
    limited_table,
    moment_name,
    stack_value,
    step_definition,
)
from cudakit.memory.present.summary import growth_sentence, rising_sentence
from cudakit.memory.result import Churn, DeviceMemory, Facet
from cudakit.report.document import (
    Bytes,
    Count,
    Node,
    Note,
    Ratio,
    Seconds,
    Section,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable


def memory_in_use(device: DeviceMemory, top: int) -> Section:
    """List the call sites and the call stacks that hold most memory.

    If each call site has one call stack, the tables would be the same: only the call stacks are listed.
    """
    stack_table, moment = _stack_table(device, top), moment_name(device)
    if len(device.lines) == len(device.holders):
        return Section(f"Memory by call stack {moment}", (stack_table,))
    return Section(f"Memory by call site {moment}", (_site_table(device, top), stack_table))


def _site_table(device: DeviceMemory, top: int) -> Table:
    """List the call sites that hold most memory."""
    return limited_table(
        (
            ("in use", "number", lambda line: Bytes(line.bytes)),
            ("share", "bar", lambda line: Ratio(line.share)),
            ("blocks", "number", lambda line: Count(line.count)),
            ("call site", "text", lambda line: line.frame or Text(NO_STACK)),
        ),
        device.lines,
        top,
        ("call site", "call sites"),
    )


def _stack_table(device: DeviceMemory, top: int) -> Table:
    """List the call stacks that hold most memory."""
    return limited_table(
        (
            ("in use", "number", lambda holder: Bytes(holder.bytes)),
            ("share", "bar", lambda holder: Ratio(holder.share)),
            ("blocks", "number", lambda holder: Count(holder.count)),
            ("call stack", "stack", lambda holder: stack_value(holder.stack, holder.site)),
        ),
        device.holders,
        top,
        caption="In use: the sizes of the blocks, which the allocator rounds up.",
    )


_FACET_PLURALS = {"category": "categories", "user metadata": "user metadata"}


def facet_table(facet: Facet, top: int) -> Table:
    """List the values of a facet, such as annotations, that hold most memory."""
    facet_name = facet.name.replace("_", " ")
    return limited_table(
        (
            ("in use", "number", lambda group: Bytes(group.bytes)),
            ("share", "bar", lambda group: Ratio(group.share)),
            ("blocks", "number", lambda group: Count(group.count)),
            (facet_name, "text", lambda group: Text(group.name or "(none)")),
        ),
        facet.groups,
        top,
        (facet_name, _FACET_PLURALS.get(facet_name, f"{facet_name}s")),
    )


def leaks(device: DeviceMemory, top: int) -> Iterator[Node]:
    """List the call stacks that hold more memory after each step."""
    steps = device.steps
    if not device.events:
        yield Note("info", "Growth was not checked: the snapshot has no trace.")
        return
    if steps.source == "none":
        yield Note(
            "info",
            "Growth was not checked: fewer than 3 steps were found in the events that are shown.",
            remedies=(f"mark each step with {device.snapshot.calls.mark_step}",),
        )
        return
    compared_sentence = (
        f"{steps.count} step boundaries were compared, with {steps.count - 1} steps between them; "
        f"{step_definition(device)}."
    )
    if device.leaks:
        yield Note("warn", f"{growth_sentence(device)} {compared_sentence}")
    elif device.steps.rising:
        rise_text = f"{rising_sentence(device)} (section Peak per step)"
        yield Note(
            "info",
            f"No call stack holds more memory after each step, but {rise_text}. {compared_sentence}",
        )
    elif any(row.change_bytes > 0 for row in steps.site_growth):
        yield Note(
            "ok",
            "No call stack kept growing from step to step. Section Peak per step lists what grew from the"
            f" first to the last step. {compared_sentence}",
        )
    else:
        yield Note("ok", f"No call stack holds more memory after each step. {compared_sentence}")
    if not device.leaks:
        return
    yield limited_table(
        (
            ("per step", "number", lambda leak: Bytes(leak.bytes_per_step)),
            ("at last step boundary", "number", lambda leak: Bytes(leak.bytes)),
            ("blocks", "number", lambda leak: Count(leak.count)),
            ("call stack", "stack", lambda leak: stack_value(leak.stack, leak.site)),
        ),
        device.leaks,
        top,
    )


_LIFETIME_CAPTION = "Mean lifetime: n/a if no block was freed, or if the snapshot has no times."


def churn(device: DeviceMemory, top: int) -> Table:
    """List the call stacks that allocate most over the whole trace."""
    listed_rows = device.churn[:top] if top else device.churn
    has_missing_lifetime = any(row.mean_lifetime_us is None for row in listed_rows)
    return limited_table(
        (
            ("requested", "number", lambda row: Bytes(row.bytes)),
            ("share", "bar", lambda row: Ratio(row.share)),
            ("count", "number", lambda row: Count(row.count)),
            ("mean lifetime", "number", _mean_lifetime),
            ("call stack", "stack", lambda row: stack_value(row.stack, row.site)),
        ),
        device.churn,
        top,
        caption=_LIFETIME_CAPTION if has_missing_lifetime else "",
    )


def _mean_lifetime(row: Churn) -> Value:
    if row.mean_lifetime_us is None:
        return Unavailable("nothing was freed, or the file has no times")
    return Seconds(row.mean_lifetime_us / 1e6)
