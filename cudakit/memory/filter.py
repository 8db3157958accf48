"""Select one stream or one pool of a trace, or PyTorch's pools."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cudakit.errors import UsageError
from cudakit.memory.record.pools import POOL_NAMES, pool_name
from cudakit.memory.replay.segments import segment_history
from cudakit.memory.snapshot import Blocks, DeviceTrace, Snapshot, take
from cudakit.torch_rules.actions import Action


def filter_trace(
    snapshot: Snapshot, trace: DeviceTrace, *, stream: int | None, pool: tuple[int, int] | None
) -> DeviceTrace:
    """Return the part of a trace in a stream (its number) and a pool; None selects all.

    Events of other streams and pools become Action.UNKNOWN, so that the indices of events do not change.
    Raises UsageError if the device lacks the stream or the pool.
    """
    if stream is None and pool is None:
        return trace
    keep_event = np.ones(len(trace.events), np.bool_)
    keep_segment = np.ones(len(trace.segments), np.bool_)
    if stream is not None:
        if not 0 <= stream < len(trace.streams):
            raise UsageError(
                f"no stream {stream} in {snapshot.source}",
                hint=f"streams of {snapshot.source}: {', '.join(map(str, range(len(trace.streams))))}",
            )
        keep_event &= trace.events.stream == stream
        keep_segment &= trace.segments.stream == stream
    if pool is not None:
        if pool not in snapshot.pools:
            raise UsageError(
                f"no pool {POOL_NAMES.get(pool, f'{pool[0]},{pool[1]}')} in {snapshot.source}",
                hint=f"pools of {snapshot.source}: {'; '.join(map(pool_name, snapshot.pools))}",
            )
        pool_id = snapshot.pools.index(pool)
        recorded_pools = trace.events.pool
        derived_pools = segment_history(trace).pool_at(
            trace.events.address, np.arange(len(recorded_pools))
        )
        keep_event &= np.where(recorded_pools >= 0, recorded_pools, derived_pools) == pool_id
        keep_segment &= trace.segments.pool == pool_id
    return _select_events(trace, keep_event, keep_segment)


def pytorch_trace(snapshot: Snapshot, trace: DeviceTrace) -> DeviceTrace:
    """Return the part of a trace in PyTorch's pools: only these belong in a replay of PyTorch's allocator."""
    other_pools = [pool_id for pool_id, pool in enumerate(snapshot.pools) if pool in POOL_NAMES]
    if not other_pools:
        return trace
    keep_event = ~np.isin(trace.events.pool, other_pools)
    return _select_events(trace, keep_event, ~np.isin(trace.segments.pool, other_pools))


def _select_events(
    trace: DeviceTrace,
    keep_event: np.typing.NDArray[np.bool_],
    keep_segment: np.typing.NDArray[np.bool_],
) -> DeviceTrace:
    """Return a trace with the selected segments, in which all other events become Action.UNKNOWN."""
    actions = np.where(
        keep_event | (trace.events.action >= Action.SNAPSHOT), trace.events.action, Action.UNKNOWN
    ).astype(np.uint8)
    return replace(
        trace,
        events=replace(trace.events, action=actions),
        segments=take(trace.segments, keep_segment),
        blocks=_take_blocks(trace.blocks, keep_segment),
    )


def _take_blocks(blocks: Blocks, keep_segment: np.typing.NDArray[np.bool_]) -> Blocks:
    kept_blocks = take(blocks, keep_segment[blocks.segment])
    new_segment_ids = (np.cumsum(keep_segment) - 1).astype(np.int32)
    return replace(kept_blocks, segment=new_segment_ids[kept_blocks.segment])
