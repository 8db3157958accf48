"""The part of a trace that was asked for: one stream or one pool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cudakit.core.memory.replay.segments import segment_history
from cudakit.core.memory.snapshot import Blocks, DeviceTrace, Snapshot, take
from cudakit.errors import UsageError
from cudakit.torch_rules.actions import Action


def filter_trace(
    snapshot: Snapshot, trace: DeviceTrace, *, stream: int | None, pool: tuple[int, int] | None
) -> DeviceTrace:
    """Return the part of a trace that belongs to a stream (its number) and a pool; None keeps all.

    Event indices stay: events of other streams and pools become markers. Raises UsageError for a stream or
    a pool that the device does not have.
    """
    if stream is None and pool is None:
        return trace
    keep_event = np.ones(len(trace.events), np.bool_)
    keep_segment = np.ones(len(trace.segments), np.bool_)
    if stream is not None:
        if not 0 <= stream < len(trace.streams):
            raise UsageError(
                f"device {trace.device} has no stream {stream}",
                hint=f"its streams are numbered 0 to {len(trace.streams) - 1}",
            )
        keep_event &= trace.events.stream == stream
        keep_segment &= trace.segments.stream == stream
    if pool is not None:
        if pool not in snapshot.pools:
            known = "; ".join(f"{a},{b}" for a, b in snapshot.pools)
            raise UsageError(f"no pool {pool[0]},{pool[1]} in the snapshot", hint=f"pools: {known}")
        wanted = snapshot.pools.index(pool)
        said = trace.events.pool
        found = segment_history(trace).pool_at(trace.events.address, np.arange(len(said)))
        keep_event &= np.where(said >= 0, said, found) == wanted
        keep_segment &= trace.segments.pool == wanted
    action = np.where(
        keep_event | (trace.events.action >= Action.SNAPSHOT), trace.events.action, Action.UNKNOWN
    ).astype(np.uint8)
    return replace(
        trace,
        events=replace(trace.events, action=action),
        segments=take(trace.segments, keep_segment),
        blocks=_take_blocks(trace.blocks, keep_segment),
    )


def _take_blocks(blocks: Blocks, keep_segment: np.typing.NDArray[np.bool_]) -> Blocks:
    kept = take(blocks, keep_segment[blocks.segment])
    renumbered = (np.cumsum(keep_segment) - 1).astype(np.int32)
    return replace(kept, segment=renumbered[kept.segment])
