"""Two snapshots compared: what grew, shrank, appeared and vanished, by normalised call stack."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from cudakit.core.memory.analyze import MemorySpec, device_number, devices_of, file_facts
from cudakit.core.memory.analyze.call_sites import Stacks
from cudakit.core.memory.analyze.holders import holders_by_stack
from cudakit.core.memory.analyze.moments import state_at, time_of
from cudakit.core.memory.filter import filter_trace
from cudakit.core.memory.replay import Replay, replay
from cudakit.core.memory.replay.layout import live_at
from cudakit.core.memory.result import (
    DIFF_SCHEMA,
    DeviceDiff,
    DiffResult,
    DiffRow,
    Holder,
    Moment,
    MomentDiff,
)
from cudakit.core.memory.snapshot import DeviceTrace, Snapshot
from cudakit.document import Frame
from cudakit.errors import UsageError

_INSTALLED = re.compile(r"^.*/(?:site-packages|dist-packages|python3[.\d]*)/")

# A frame without its line, so that an edit elsewhere in the file does not change the stack.
_Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Holdings:
    """What call stacks held at one moment."""

    moment: Moment
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class _Side:
    """One device of one of the two snapshots."""

    device: int | None
    peak: _Holdings
    end: _Holdings


def diff(before: Snapshot, after: Snapshot, spec: MemorySpec) -> DiffResult:
    """Compare two snapshots, at the peak of each and at the end of each.

    Devices are paired by number, or simply with each other if each file has only one (two ranks).
    Raises UsageError when no device can be paired.
    """
    sides = [_sides(snapshot, spec) for snapshot in (before, after)]
    devices = tuple(
        DeviceDiff(
            device=new.device,
            before_device=old.device,
            peak=_moment_diff(old.peak, new.peak),
            end=_moment_diff(old.end, new.end),
        )
        for old, new in _pairs(*sides)
    )
    if not devices:
        raise UsageError("the two snapshots have no device in common")
    return DiffResult(DIFF_SCHEMA, file_facts(before), file_facts(after), devices)


def _sides(snapshot: Snapshot, spec: MemorySpec) -> list[_Side]:
    found = []
    for _, whole in devices_of([snapshot], spec):
        trace = filter_trace(snapshot, whole, stream=spec.stream, pool=spec.pool)
        replayed = replay(snapshot, trace)
        stacks = Stacks(snapshot)
        peak = _holdings(stacks, trace, replayed, "peak", replayed.peak_moment() - 1)
        end = _holdings(stacks, trace, replayed, "end", replayed.n_events - 1)
        found.append(_Side(device_number(trace), peak, end))
    return found


def _holdings(
    stacks: Stacks, trace: DeviceTrace, replayed: Replay, name: str, event: int
) -> _Holdings:
    live = live_at(replayed.allocations, event + 1)
    state = state_at(replayed, replayed.layout_at(event + 1), event + 1)
    return _Holdings(
        Moment(name, event, time_of(stacks.snapshot, trace, event), state),
        holders_by_stack(stacks, replayed.allocations, live),
    )


def _pairs(before: list[_Side], after: list[_Side]) -> Iterator[tuple[_Side, _Side]]:
    if len(before) == len(after) == 1:
        yield before[0], after[0]
        return
    known = {side.device: side for side in before}
    for side in after:
        if side.device in known:
            yield known[side.device], side


def _moment_diff(before: _Holdings, after: _Holdings) -> MomentDiff:
    rows = sorted(_rows(before.holders, after.holders), key=lambda row: -abs(row.change_bytes))
    held, holds = (side.moment.state.requested_bytes for side in (before, after))
    return MomentDiff(
        before=before.moment,
        after=after.moment,
        growth=holds / held - 1 if held else None,
        grown=tuple(row for row in rows if row.change_bytes > 0 and row.before_count),
        shrunk=tuple(row for row in rows if row.change_bytes < 0 and row.after_count),
        appeared=tuple(row for row in rows if not row.before_count),
        vanished=tuple(row for row in rows if not row.after_count),
    )


def _place(frame: Frame) -> _Place:
    name, installed = _INSTALLED.subn("", frame.filename)
    # The program's own files may lie elsewhere in another checkout: the last two parts name them.
    return (name if installed else "/".join(name.split("/")[-2:])), frame.name


def _rows(before: tuple[Holder, ...], after: tuple[Holder, ...]) -> Iterator[DiffRow]:
    sides: defaultdict[tuple[_Place, ...], tuple[list[Holder], list[Holder]]] = defaultdict(
        lambda: ([], [])
    )
    for index, holders in enumerate((before, after)):
        for holder in holders:
            sides[tuple(map(_place, holder.stack))][index].append(holder)
    for old, new in sides.values():
        shown = (new or old)[0]  # the largest
        before_bytes, after_bytes = (sum(holder.bytes for holder in side) for side in (old, new))
        yield DiffRow(
            change_bytes=after_bytes - before_bytes,
            before_bytes=before_bytes,
            after_bytes=after_bytes,
            before_count=sum(holder.count for holder in old),
            after_count=sum(holder.count for holder in new),
            stack=shown.stack,
            site=shown.site,
        )
