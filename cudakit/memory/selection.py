"""Check the moment, device, stream and pool that a caller of ``memviz`` selects.

The command line passes text, and Python also passes numbers; both accept the same values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import index

import numpy as np

from cudakit.errors import SnapshotError, UsageError
from cudakit.memory.lifetimes import segment_history
from cudakit.memory.snapshot import (
    HOST,
    POOL_IDS,
    POOL_NAMES,
    Action,
    DeviceTrace,
    Mask,
    PoolId,
    Snapshot,
    pool_name,
    take,
)

_MOMENTS = ("peak", "end", "oom")
_MOMENT_HINT = "use peak, end, oom or the index of an event"
# The two numbers of a pool, alone or after the name of its kind in the report.
_POOL_PATTERN = re.compile(r"(?:(?:graph|MemPool) )?(\d+),(\d+)")


def parse_moment(moment: str | int) -> str | int:
    """Return "peak", "end", "oom" or the index of an event. Raises UsageError for another value."""
    if isinstance(moment, str) and moment in _MOMENTS:
        return moment
    return _whole_number(moment, "moment", _MOMENT_HINT)


def parse_device(device: str | int) -> int:
    """Return the index of a device, or HOST for "host". Raises UsageError for another value."""
    if device == "host":
        return HOST
    number = device.removeprefix("cuda:") if isinstance(device, str) else device
    is_number = not isinstance(number, str) or number.isdecimal()
    # An error names the value as it was written.
    return _whole_number(number if is_number else device, "device", "use 0, cuda:0 or host")


def parse_stream(stream: str | int) -> int:
    """Return the number of a stream. Raises UsageError for another value."""
    return _whole_number(stream, "stream", "use the number of a stream in the report")


def parse_pool(pool: str | Sequence[int]) -> PoolId:
    """Return the two numbers of a pool.

    ``pool`` has the two numbers, or is a name in the report: ``default``, ``graph 1,0``, ``MemPool 0,1`` or
    that of a library. Raises UsageError for another value.
    """
    match pool:
        case "default":
            return 0, 0
        case str():
            if pool in POOL_IDS:
                return POOL_IDS[pool]
            if numbers := _POOL_PATTERN.fullmatch(pool):
                return int(numbers[1]), int(numbers[2])
        case [int(first_number), int(second_number)]:
            return first_number, second_number
    raise UsageError(
        f"{pool!r} is not a pool",
        hint="use a name in the report, such as default or cupy, or two numbers, such as 0,1",
    )


def _whole_number(value: str | int, noun: str, hint: str) -> int:
    """Return a whole number. Raises UsageError, which says that the value is not a ``noun``."""
    with suppress(TypeError):
        if not isinstance(value, str):
            return index(value)
        if value.isdecimal():
            return int(value)
    raise UsageError(f"{value!r} is not a {noun}", hint=hint)


# --- Select one stream or one pool of a trace, or PyTorch's pools ----------------------------------


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


def _select_events(trace: DeviceTrace, keep_event: Mask, keep_segment: Mask) -> DeviceTrace:
    """Return a trace with the selected segments, in which all other events become Action.UNKNOWN."""
    is_kept = keep_event | (trace.events.action >= Action.SNAPSHOT)
    actions = np.where(is_kept, trace.events.action, Action.UNKNOWN).astype(np.uint8)
    blocks = take(trace.blocks, keep_segment[trace.blocks.segment])
    new_segment_ids = (np.cumsum(keep_segment) - 1).astype(np.int32)
    return replace(
        trace,
        events=replace(trace.events, action=actions),
        segments=take(trace.segments, keep_segment),
        blocks=replace(blocks, segment=new_segment_ids[blocks.segment]),
    )


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """The moment to analyze, and the device, stream and pool to select."""

    at: str | int = "peak"  # "peak", "end", "oom", or the index of an event
    device: int | None = None  # device index; HOST is pinned host memory
    stream: int | None = None  # stream number; 0 is the default stream
    pool: tuple[int, int] | None = None


def select_devices(
    snapshots: Sequence[Snapshot], spec: MemorySpec
) -> list[tuple[Snapshot, DeviceTrace]]:
    """Return the devices that a MemorySpec selects. Raises UsageError if there are none."""
    pairs = [(snapshot, trace) for snapshot in snapshots for trace in snapshot.devices]
    selected = [pair for pair in pairs if spec.device is None or pair[1].device == spec.device]
    if not selected:
        devices = sorted({trace.device for _, trace in pairs})
        names = ("host" if device == HOST else str(device) for device in devices)
        missing_text = "no " + (
            "pinned host memory" if spec.device == HOST else f"device {spec.device}"
        )
        raise UsageError(
            f"{missing_text} in the snapshots"
            if len(snapshots) > 1
            else f"{snapshots[0].source}: {missing_text} in the snapshot",
            hint=f"devices: {', '.join(names)}",
        )
    return selected


def require_trace(pairs: Sequence[tuple[Snapshot, DeviceTrace]]) -> None:
    """Raise SnapshotError if none of the traces has an event."""
    if not any(len(trace.events) for _, trace in pairs):
        snapshot = pairs[0][0]
        raise SnapshotError(
            f"{snapshot.source}: the file has no trace; only its end is known",
            hint=f"show the end, or record a trace: cudakit run --memory, or {snapshot.calls.record_trace}",
        )


def device_number(trace: DeviceTrace) -> int | None:
    """Return the device index for results; None: pinned host memory."""
    return None if trace.device == HOST else trace.device
