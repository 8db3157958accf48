"""Two snapshots compared: what grew, shrank, appeared and vanished, by normalised call stack."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cudakit.core.memory.analyze import MemorySpec, analyze
from cudakit.core.memory.result import (
    DIFF_SCHEMA,
    DeviceDiff,
    DeviceMemory,
    DiffResult,
    DiffRow,
    Holder,
    MemoryResult,
    MomentDiff,
)
from cudakit.core.memory.snapshot import Snapshot
from cudakit.document import Frame
from cudakit.errors import UsageError

_INSTALLED = re.compile(r"^.*/(?:site-packages|dist-packages|python3[.\d]*)/")

# A frame without its line, so that an edit elsewhere in the file does not make another stack of it.
_Place = tuple[str, str]


def diff(before: Snapshot, after: Snapshot, spec: MemorySpec) -> DiffResult:
    """Compare two snapshots, at the peak of each and at the end of each.

    Devices are paired by number, or simply with each other where each file has one only (two ranks).
    Raises UsageError when no device can be paired.
    """
    ends = [analyze([snapshot], replace(spec, at="end")) for snapshot in (before, after)]
    peaks = [analyze([snapshot], replace(spec, at="peak")) for snapshot in (before, after)]
    devices = tuple(
        DeviceDiff(
            device=end_after.device,
            before_device=end_before.device,
            peak=_moment(peak_before, peak_after),
            end=_moment(end_before, end_after),
        )
        for (end_before, end_after), (peak_before, peak_after) in zip(
            _pairs(*ends), _pairs(*peaks), strict=True
        )
    )
    if not devices:
        raise UsageError("the two snapshots have no device in common")
    return DiffResult(DIFF_SCHEMA, ends[0].files[0], ends[1].files[0], devices)


def _pairs(
    before: MemoryResult, after: MemoryResult
) -> Iterator[tuple[DeviceMemory, DeviceMemory]]:
    if len(before.devices) == len(after.devices) == 1:
        yield before.devices[0], after.devices[0]
        return
    known = {device.device: device for device in before.devices}
    for device in after.devices:
        if device.device in known:
            yield known[device.device], device


def _moment(before: DeviceMemory, after: DeviceMemory) -> MomentDiff:
    rows = sorted(
        _rows(_by_place(before.holders), _by_place(after.holders)),
        key=lambda row: -abs(row.change_bytes),
    )
    held = before.at.state.requested_bytes
    return MomentDiff(
        before=before.at,
        after=after.at,
        growth=after.at.state.requested_bytes / held - 1 if held else None,
        grown=tuple(row for row in rows if row.change_bytes > 0 and row.before_count),
        shrunk=tuple(row for row in rows if row.change_bytes < 0 and row.after_count),
        appeared=tuple(row for row in rows if not row.before_count),
        vanished=tuple(row for row in rows if not row.after_count),
    )


@dataclass(slots=True)
class _Held:
    """What the holders of one normalised stack add up to; the largest stands for all."""

    holder: Holder
    bytes: int = 0
    count: int = 0


def _by_place(holders: tuple[Holder, ...]) -> dict[tuple[_Place, ...], _Held]:
    found: dict[tuple[_Place, ...], _Held] = {}
    for holder in holders:
        held = found.setdefault(tuple(map(_place, holder.stack)), _Held(holder))
        held.bytes += holder.bytes
        held.count += holder.count
    return found


def _place(frame: Frame) -> _Place:
    name, installed = _INSTALLED.subn("", frame.filename)
    # The program's own files may lie elsewhere in another checkout: the last two parts name them.
    return (name if installed else "/".join(name.split("/")[-2:])), frame.name


def _rows(
    before: dict[tuple[_Place, ...], _Held], after: dict[tuple[_Place, ...], _Held]
) -> Iterator[DiffRow]:
    sides: defaultdict[tuple[_Place, ...], list[_Held | None]] = defaultdict(lambda: [None, None])
    for index, held in enumerate((before, after)):
        for key, amount in held.items():
            sides[key][index] = amount
    for key, (old, new) in sides.items():
        shown = (after if new else before)[key].holder
        before_bytes, after_bytes = (old.bytes if old else 0), (new.bytes if new else 0)
        yield DiffRow(
            change_bytes=after_bytes - before_bytes,
            before_bytes=before_bytes,
            after_bytes=after_bytes,
            before_count=old.count if old else 0,
            after_count=new.count if new else 0,
            stack=shown.stack,
            site=shown.site,
        )
