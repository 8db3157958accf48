"""Who holds the memory at a moment: by call stack, by line of source, by other properties."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.analyze.annotations import active_annotation
from cudakit.core.memory.analyze.sites import Stacks
from cudakit.core.memory.analyze.totals import totals
from cudakit.core.memory.replay.allocations import Allocations
from cudakit.core.memory.result import Facet, Group, Holder, Line
from cudakit.core.memory.snapshot import DeviceTrace, Snapshot

_Ints = npt.NDArray[np.int64]

# What torch writes as the compile context of an allocation that no compiler made.
_NO_COMPILER = "N/A"


def holders_by_stack(stacks: Stacks, allocations: Allocations, live: _Ints) -> tuple[Holder, ...]:
    """Sum live allocations by call stack, largest first."""
    stack = allocations.stack[live]
    requested = np.bincount(stack, weights=allocations.requested[live]) if len(live) else None
    found = []
    for total in totals(stack, allocations.size[live]):
        frames = stacks.frames(total.key)
        asked = 0 if requested is None else int(requested[total.key])
        found.append(
            Holder(total.bytes, asked, total.count, total.share, frames, stacks.site(total.key))
        )
    return tuple(found)


def holders_by_line(stacks: Stacks, allocations: Allocations, live: _Ints) -> tuple[Line, ...]:
    """Sum live allocations by the line of the program that they come from, largest first."""
    site = stacks.site_frames[allocations.stack[live]]
    frames = stacks.snapshot.frames
    return tuple(
        Line(t.bytes, t.count, t.share, frames[t.key] if t.key >= 0 else None)
        for t in totals(site, allocations.size[live])
    )


def facets(
    snapshot: Snapshot, trace: DeviceTrace, allocations: Allocations, live: _Ints
) -> tuple[Facet, ...]:
    """Divide live allocations by what else is recorded of them; facets that say nothing are left out."""
    return tuple(
        Facet(name, groups)
        for name, groups in _facets(snapshot, trace, allocations, live)
        if any(group.name for group in groups)
    )


def _facets(
    snapshot: Snapshot, trace: DeviceTrace, allocations: Allocations, live: _Ints
) -> Iterator[tuple[str, tuple[Group, ...]]]:
    size = allocations.size[live]
    source = allocations.source[live]
    recorded = source >= 0
    active, names = active_annotation(snapshot, trace)
    for name, ids, words in (
        ("annotation", active, names),
        ("compile_context", trace.events.compile_context, snapshot.texts),
        ("user_metadata", trace.events.user_metadata, snapshot.texts),
        ("category", trace.events.category, snapshot.texts),
    ):
        key = np.zeros(len(live), np.int32)
        key[recorded] = ids[source[recorded]]
        if _NO_COMPILER in words:
            key[key == words.index(_NO_COMPILER)] = 0
        yield (
            name,
            tuple(Group(words[t.key], t.bytes, t.count, t.share) for t in totals(key, size)),
        )
