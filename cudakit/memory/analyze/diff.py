"""Compare two snapshots by call stack: memory that grew, shrank, appeared and vanished."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from cudakit.errors import UsageError
from cudakit.memory.analyze import MemorySpec, device_number, select_devices
from cudakit.memory.analyze.call_sites import StackTable
from cudakit.memory.analyze.holders import holders_by_stack
from cudakit.memory.analyze.moments import state_at, time_of
from cudakit.memory.filter import filter_trace
from cudakit.memory.replay import Replay, replay
from cudakit.memory.replay.layout import live_at
from cudakit.memory.result import (
    DIFF_SCHEMA,
    DeviceDiff,
    DiffResult,
    DiffRow,
    Holder,
    Moment,
    MomentDiff,
    file_facts,
)
from cudakit.memory.snapshot import DeviceTrace, Snapshot
from cudakit.stacks import Frame

_INSTALL_PREFIX = re.compile(r"^.*/(?:site-packages|dist-packages|python3[.\d]*)/")

# Frames are matched by file and function, because edits elsewhere in the file change line numbers.
_FrameKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Holdings:
    """Live memory by call stack at one moment."""

    moment: Moment
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class _DeviceMoments:
    """The live memory of one device at its peak and at the end of its trace."""

    device: int | None
    holdings_at_peak: _Holdings
    holdings_at_end: _Holdings


def diff(earlier_snapshot: Snapshot, later_snapshot: Snapshot, spec: MemorySpec) -> DiffResult:
    """Compare two snapshots at their peaks and at their ends.

    Devices are paired by index; if each file has one device (two ranks), these two are paired. Raises
    UsageError if no devices can be paired.
    """
    moments_by_side = [
        _device_moments(snapshot, spec) for snapshot in (earlier_snapshot, later_snapshot)
    ]
    devices = tuple(
        DeviceDiff(
            device=device_after.device,
            before_device=device_before.device,
            peak=_moment_diff(device_before.holdings_at_peak, device_after.holdings_at_peak),
            end=_moment_diff(device_before.holdings_at_end, device_after.holdings_at_end),
        )
        for device_before, device_after in _pair_devices(*moments_by_side)
    )
    if not devices:
        raise UsageError(
            "the two snapshots have no common device",
            hint="compare snapshots of the same process at two times, or of the same rank in two runs",
        )
    return DiffResult(
        DIFF_SCHEMA, file_facts(earlier_snapshot), file_facts(later_snapshot), devices
    )


def _device_moments(snapshot: Snapshot, spec: MemorySpec) -> list[_DeviceMoments]:
    devices = []
    for _, full_trace in select_devices([snapshot], spec):
        trace = filter_trace(snapshot, full_trace, stream=spec.stream, pool=spec.pool)
        trace_replay = replay(snapshot, trace)
        stacks = StackTable(snapshot)
        holdings_at_peak = _holdings_at(
            stacks, trace, trace_replay, "peak", trace_replay.peak_moment() - 1
        )
        holdings_at_end = _holdings_at(
            stacks, trace, trace_replay, "end", trace_replay.n_events - 1
        )
        devices.append(_DeviceMoments(device_number(trace), holdings_at_peak, holdings_at_end))
    return devices


def _holdings_at(
    stacks: StackTable, trace: DeviceTrace, trace_replay: Replay, name: str, event_index: int
) -> _Holdings:
    live_allocations = live_at(trace_replay.allocations, event_index + 1)
    state = state_at(trace_replay, trace_replay.layout_at(event_index + 1), event_index + 1)
    return _Holdings(
        Moment(name, event_index, time_of(stacks.snapshot, trace, event_index), state),
        holders_by_stack(stacks, trace_replay.allocations, live_allocations),
    )


def _pair_devices(
    moments_before: list[_DeviceMoments], moments_after: list[_DeviceMoments]
) -> Iterator[tuple[_DeviceMoments, _DeviceMoments]]:
    if len(moments_before) == len(moments_after) == 1:
        yield moments_before[0], moments_after[0]
        return
    before_by_device = {device.device: device for device in moments_before}
    for device in moments_after:
        if device.device in before_by_device:
            yield before_by_device[device.device], device


def _moment_diff(holdings_before: _Holdings, holdings_after: _Holdings) -> MomentDiff:
    diff_rows = sorted(
        _diff_rows(holdings_before.holders, holdings_after.holders),
        key=lambda row: -abs(row.change_bytes),
    )
    before_bytes, after_bytes = (
        holdings.moment.state.requested_bytes for holdings in (holdings_before, holdings_after)
    )
    return MomentDiff(
        before=holdings_before.moment,
        after=holdings_after.moment,
        growth=after_bytes / before_bytes - 1 if before_bytes else None,
        grown=tuple(row for row in diff_rows if row.change_bytes > 0 and row.before_count),
        shrunk=tuple(row for row in diff_rows if row.change_bytes < 0 and row.after_count),
        appeared=tuple(row for row in diff_rows if not row.before_count),
        vanished=tuple(row for row in diff_rows if not row.after_count),
    )


def _frame_key(frame: Frame) -> _FrameKey:
    name, n_prefixes = _INSTALL_PREFIX.subn("", frame.filename)
    # Two checkouts of a program have different roots: the last two parts of the path identify a file.
    return (name if n_prefixes else "/".join(name.split("/")[-2:])), frame.name


def _diff_rows(
    earlier_holders: tuple[Holder, ...], later_holders: tuple[Holder, ...]
) -> Iterator[DiffRow]:
    holders_by_stack: defaultdict[tuple[_FrameKey, ...], tuple[list[Holder], list[Holder]]] = (
        defaultdict(lambda: ([], []))
    )
    for index, holders_of_side in enumerate((earlier_holders, later_holders)):
        for holder in holders_of_side:
            holders_by_stack[tuple(map(_frame_key, holder.stack))][index].append(holder)
    for holders_before, holders_after in holders_by_stack.values():
        largest_holder = (holders_after or holders_before)[0]
        before_bytes, after_bytes = (
            sum(holder.bytes for holder in holders) for holders in (holders_before, holders_after)
        )
        yield DiffRow(
            change_bytes=after_bytes - before_bytes,
            before_bytes=before_bytes,
            after_bytes=after_bytes,
            before_count=sum(holder.count for holder in holders_before),
            after_count=sum(holder.count for holder in holders_after),
            stack=largest_holder.stack,
            site=largest_holder.site,
        )
