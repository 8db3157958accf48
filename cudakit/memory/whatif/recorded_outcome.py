"""The settings, the memory limit and the figures of a recording."""

from __future__ import annotations

from cudakit.memory.whatif.program import Program, Recording
from cudakit.memory.whatif.result import Limit, MemoryTotals, Outcome
from cudakit.torch_rules.actions import Action
from cudakit.torch_rules.settings import Settings, flag_of_device, recorded_settings, with_changes
from cudakit.torch_rules.sizes import rounded, segment_size


def settings_of(recording: Recording) -> Settings:
    """Return the recorded settings; the trace shows whether segments were expandable."""
    settings = recorded_settings(recording.snapshot.settings)
    was_expandable = _was_expandable(recording)
    if was_expandable is not None:
        settings = with_changes(settings, {"expandable_segments": was_expandable})
    return with_changes(settings, {"memory_fraction": 1.0, "backend": "native"})


def has_both_kinds(recording: Recording) -> bool:
    """Return whether the trace allocates both expandable and plain segments."""
    return recording.has_action(Action.SEGMENT_MAP) and recording.has_action(Action.SEGMENT_ALLOC)


def _was_expandable(recording: Recording) -> bool | None:
    has_maps = recording.has_action(Action.SEGMENT_MAP)
    if has_maps != recording.has_action(Action.SEGMENT_ALLOC):
        return has_maps
    return flag_of_device(
        recording.snapshot.settings.get("expandable_segments"), recording.trace.device
    )


def limit_of(recording: Recording, program: Program, settings: Settings) -> Limit | None:
    """Return the memory limit of a recording; None if memory never ran out.

    If the device was full, the limit is the reserved plus the free memory when a request failed. A file does
    not record a limit of the process; the highest reserved memory was allowed.
    """
    reserved_curve, events = recording.history.curves.reserved, recording.trace.events
    highest_reserved_bytes = int(reserved_curve.max())
    failed_requests = recording.failed_requests()
    releases_for_requests = [release for release in program.releases if release.request is not None]
    if not failed_requests and not releases_for_requests:
        return None
    device_limits = [
        int(reserved_curve[event_index]) + int(events.address[event_index])
        for event_index in failed_requests
        if int(events.address[event_index]) < _needed_bytes(int(events.size[event_index]), settings)
    ]
    if device_limits and min(device_limits) > highest_reserved_bytes:
        return Limit(min(device_limits), "device full")
    return Limit(highest_reserved_bytes, "reserved")


def _needed_bytes(request_bytes: int, settings: Settings) -> int:
    block_bytes = rounded(request_bytes, settings.roundup_power2_divisions)
    return segment_size(block_bytes, settings.large_segment_size_bytes)


def outcome_of(recording: Recording, program: Program, settings: Settings) -> Outcome:
    """Return the figures of the recording."""
    curves, moment = recording.history.curves, program.peak_event + 1
    free_bytes = int(curves.reserved[moment] - curves.active[moment])
    curve_names = ("reserved", "allocated", "requested", "active")
    return Outcome(
        name="recorded",
        settings=settings.as_text(),
        limit_bytes=None,
        peak=MemoryTotals(*(int(getattr(curves, name).max()) for name in curve_names)),
        end=MemoryTotals(*(int(getattr(curves, name)[-1]) for name in curve_names)),
        fragmentation_bytes=free_bytes,
        fragmentation=free_bytes / max(int(curves.reserved[moment]), 1),
        device_allocations=recording.count_actions(Action.SEGMENT_ALLOC, Action.SEGMENT_MAP),
        device_frees=recording.count_actions(Action.SEGMENT_FREE, Action.SEGMENT_UNMAP),
        retries=_retry_count(recording, program, settings),
        ooms=recording.count_actions(Action.OOM),
        shortage=None,
    )


def _retry_count(recording: Recording, program: Program, settings: Settings) -> int | None:
    """Return the number of requests that emptied the cache; None if unknown."""
    if settings.garbage_collection_threshold or settings.max_split_size_bytes:
        return None
    segment_releases = [release for release in program.releases if release.releases_segments]
    if segment_releases and not program.frees_have_stacks:
        return None
    requests = {release.request for release in segment_releases if release.request is not None}
    return len(requests.union(recording.failed_requests()))
