"""Memory by call stack, call site and annotation at a moment, and allocations over the whole trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.analyze.call_sites import StackTable
from cudakit.core.memory.analyze.steps import active_annotation
from cudakit.core.memory.replay.allocations import Allocations
from cudakit.core.memory.result import Churn, Facet, Group, Holder, Line
from cudakit.core.memory.snapshot import DeviceTrace, Ints, Snapshot

# The compile context that PyTorch records outside compiled code.
_NO_COMPILER = "N/A"


def holders_by_stack(
    stacks: StackTable, allocations: Allocations, live: Ints
) -> tuple[Holder, ...]:
    """Return live memory by call stack, largest first."""
    stack = allocations.stack[live]
    requested = np.bincount(stack, weights=allocations.requested[live])
    return tuple(
        Holder(
            bytes=total.bytes,
            requested_bytes=int(requested[total.key]),
            count=total.count,
            share=total.share,
            stack=stacks.frames(total.key),
            site=stacks.site(total.key),
        )
        for total in totals(stack, allocations.size[live])
    )


def holders_by_line(stacks: StackTable, allocations: Allocations, live: Ints) -> tuple[Line, ...]:
    """Return live memory by call site, largest first."""
    site = stacks.site_frames[allocations.stack[live]]
    frames = stacks.snapshot.frames
    return tuple(
        Line(t.bytes, t.count, t.share, frames[t.key] if t.key >= 0 else None)
        for t in totals(site, allocations.size[live])
    )


def facets(
    snapshot: Snapshot, trace: DeviceTrace, allocations: Allocations, live: Ints
) -> tuple[Facet, ...]:
    """Return live memory by annotation, compile context, metadata and category; omits empty facets."""
    return tuple(
        Facet(name, groups)
        for name, groups in _facets(snapshot, trace, allocations, live)
        if any(group.name for group in groups)
    )


def _facets(
    snapshot: Snapshot, trace: DeviceTrace, allocations: Allocations, live: Ints
) -> Iterator[tuple[str, tuple[Group, ...]]]:
    size = allocations.size[live]
    source = allocations.source[live]
    has_event = source >= 0
    active, names = active_annotation(snapshot, trace)
    for name, ids, texts in (
        ("annotation", active, names),
        ("compile_context", trace.events.compile_context, snapshot.texts),
        ("user_metadata", trace.events.user_metadata, snapshot.texts),
        ("category", trace.events.category, snapshot.texts),
    ):
        key = np.zeros(len(live), np.int32)
        key[has_event] = ids[source[has_event]]
        if _NO_COMPILER in texts:
            key[key == texts.index(_NO_COMPILER)] = 0
        yield (
            name,
            tuple(Group(texts[t.key], t.bytes, t.count, t.share) for t in totals(key, size)),
        )


@dataclass(frozen=True, slots=True)
class Total:
    """The memory of one key."""

    key: int
    bytes: int
    count: int
    share: float


def totals(keys: npt.NDArray[np.integer], amounts: Ints) -> Iterator[Total]:
    """Yield the total of ``amounts`` (bytes) per key, largest first. Keys are -1 or more."""
    if not len(keys):
        return
    shifted = keys.astype(np.int64) + 1
    count = np.bincount(shifted)
    # Sums of bytes stay below 2**53, where float64 is exact.
    summed = np.bincount(shifted, weights=amounts).astype(np.int64)
    total = max(int(summed.sum()), 1)
    present = np.flatnonzero(count)
    for key in present[np.argsort(-summed[present], kind="stable")].tolist():
        yield Total(key - 1, int(summed[key]), int(count[key]), int(summed[key]) / total)


def churn_by_stack(
    snapshot: Snapshot, trace: DeviceTrace, stacks: StackTable, allocations: Allocations
) -> tuple[Churn, ...]:
    """Return all allocations of the trace by call stack, most bytes first."""
    allocated = np.flatnonzero(allocations.begin >= 0)
    stack = allocations.stack[allocated]
    begin, end = allocations.begin[allocated], allocations.end[allocated]
    ended = end < len(trace.events)
    time = trace.events.time_us
    lifetime = np.zeros(len(allocated), np.int64)
    lifetime[ended] = time[end[ended]] - time[begin[ended]]
    n_stacks = len(snapshot.stacks)
    lifetimes = np.bincount(stack, weights=lifetime, minlength=n_stacks)
    n_ended = np.bincount(stack, weights=ended, minlength=n_stacks)
    measured = (n_ended > 0) & snapshot.has_times
    return tuple(
        Churn(
            bytes=total.bytes,
            count=total.count,
            share=total.share,
            mean_size_bytes=total.bytes // total.count,
            mean_lifetime_us=(
                float(lifetimes[total.key] / n_ended[total.key]) if measured[total.key] else None
            ),
            stack=stacks.frames(total.key),
            site=stacks.site(total.key),
        )
        for total in totals(stack, allocations.requested[allocated])
    )
