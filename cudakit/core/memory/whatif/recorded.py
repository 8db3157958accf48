"""What the record itself says: its settings, its limit, and its own figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cudakit.core.memory.load.settings import flag_of_device
from cudakit.core.memory.replay import Replay
from cudakit.core.memory.snapshot import Action, DeviceTrace, Snapshot
from cudakit.core.memory.whatif.program import Program
from cudakit.core.memory.whatif.result import Held, Limit, Outcome
from cudakit.errors import InputError
from cudakit.torch_rules.setting_rules import DIVISION_SLOTS
from cudakit.torch_rules.settings import Settings, parse_config
from cudakit.torch_rules.sizes import rounded, segment_size

_BYTES = {
    "max_split_size": "max_split_size_bytes",
    "max_non_split_rounding": "max_non_split_rounding_bytes",
    "large_segment_size": "large_segment_size_bytes",
}


def settings_of(snapshot: Snapshot, trace: DeviceTrace) -> Settings:
    """Return the settings of a record; where they are not in force any more, those that its trace shows.

    Without a memory fraction: of what, no record says.
    """
    recorded = snapshot.settings
    settings = _written(recorded.get("PYTORCH_CUDA_ALLOC_CONF"))
    for changes in (_sizes(recorded), _collection(recorded), _divisions(recorded)):
        settings = _changed(settings, changes)
    grows = _grows(trace, flag_of_device(recorded.get("expandable_segments"), trace.device))
    if grows is not None:
        settings = _changed(settings, {"expandable_segments": grows})
    return _changed(settings, {"memory_fraction": 1.0, "backend": "native"})


def has_both_kinds(trace: DeviceTrace) -> bool:
    """Say whether memory was taken both in segments that grow and in plain ones."""
    actions = trace.events.action
    return bool((actions == Action.SEGMENT_MAP).any() and (actions == Action.SEGMENT_ALLOC).any())


def _grows(trace: DeviceTrace, told: bool | None) -> bool | None:
    actions = trace.events.action
    maps = bool((actions == Action.SEGMENT_MAP).any())
    if maps != bool((actions == Action.SEGMENT_ALLOC).any()):
        return maps
    return told


def _written(text: object) -> Settings:
    try:
        return parse_config(text) if isinstance(text, str) else Settings()
    except InputError:  # PyTorch takes more than is right; what it made of it stands beside it
        return Settings()


def _changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    try:
        return replace(settings, **changes)
    except InputError:
        return settings


def _sizes(recorded: Mapping[str, Any]) -> dict[str, int | None]:
    found = {field: recorded.get(name) for name, field in _BYTES.items()}
    return {
        field: value if value >= 0 else None
        for field, value in found.items()
        if isinstance(value, int) and (value >= 0 or field == "max_split_size_bytes")
    }


def _collection(recorded: Mapping[str, Any]) -> dict[str, float]:
    threshold = recorded.get("garbage_collection_threshold")
    return {"garbage_collection_threshold": threshold} if isinstance(threshold, float) else {}


def _divisions(recorded: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    told = recorded.get("roundup_power2_divisions")
    if not isinstance(told, dict):
        return {}
    slots = (told.get(str(1 << slot), 0) for slot in range(DIVISION_SLOTS))
    return {"roundup_power2_divisions": tuple(slots)}


def limit_of(
    trace: DeviceTrace, replayed: Replay, program: Program, settings: Settings
) -> Limit | None:
    """Return the limit that a record met, if it did.

    Where the device was full, that is what was reserved and what was free. Where the process was not
    allowed more, it is known only that what was reserved at the most was allowed.
    """
    reserved, events = replayed.curves.reserved, trace.events
    highest = int(reserved.max())
    failed = np.flatnonzero(events.action == Action.OOM).tolist()
    waited = [release for release in program.releases if release.request is not None]
    if not failed and not waited:
        return None
    room = [
        int(reserved[event]) + int(events.address[event])
        for event in failed
        if int(events.address[event]) < _needed(int(events.size[event]), settings)
    ]
    if room and min(room) > highest:
        return Limit(min(room), "device full")
    return Limit(highest, "reserved")


def _needed(size: int, settings: Settings) -> int:
    block = rounded(size, settings.roundup_power2_divisions)
    return segment_size(block, settings.large_segment_size_bytes)


def outcome_of(
    trace: DeviceTrace, replayed: Replay, program: Program, settings: Settings
) -> Outcome:
    """Return the figures of the record, from its events and its final state."""
    curves, actions = replayed.curves, trace.events.action
    moment = program.peak_event + 1
    free = int(curves.reserved[moment] - curves.active[moment])
    names = ("reserved", "allocated", "requested", "active")
    return Outcome(
        name="recorded",
        settings=settings.as_text(),
        limit_bytes=None,
        peak=Held(*(int(getattr(curves, name).max()) for name in names)),
        end=Held(*(int(getattr(curves, name)[-1]) for name in names)),
        fragmentation_bytes=free,
        fragmentation=free / max(int(curves.reserved[moment]), 1),
        device_allocations=_count(actions, Action.SEGMENT_ALLOC, Action.SEGMENT_MAP),
        device_frees=_count(actions, Action.SEGMENT_FREE, Action.SEGMENT_UNMAP),
        retries=_retries(trace, program, settings),
        ooms=_count(actions, Action.OOM),
        shortage=None,
    )


def _count(actions: np.typing.NDArray[np.uint8], *wanted: Action) -> int:
    return int(np.isin(actions, wanted).sum())


def _retries(trace: DeviceTrace, program: Program, settings: Settings) -> int | None:
    """Count the requests that gave back what they could; None where others give back too, or may have."""
    if settings.garbage_collection_threshold or settings.max_split_size_bytes:
        return None
    giving = [release for release in program.releases if release.gives_back]
    if giving and not program.own_stacks:
        return None
    failed = np.flatnonzero(trace.events.action == Action.OOM).tolist()
    return len({*failed, *(release.request for release in giving if release.request is not None)})
