"""Replay a recorded trace with other settings of the allocator.

The caller provides the allocator. Each replay runs on a device that is only a memory limit: first with the
recorded settings, then once with each of the given settings. The first replay should reproduce the recorded
figures; otherwise the figures of the other replays are less reliable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cudakit.errors import SnapshotError, Unsupported, UsageError
from cudakit.memory.result import file_facts
from cudakit.memory.snapshot import HOST, DeviceTrace, Snapshot
from cudakit.memory.whatif.program import EMPTY_PROGRAM, Recording, program_of, recording_of
from cudakit.memory.whatif.recorded_outcome import limit_of, outcome_of, settings_of
from cudakit.memory.whatif.replay import NewAllocator, replay
from cudakit.memory.whatif.result import (
    DEFAULTS,
    LIMITED_BASELINE,
    SCHEMA,
    DeviceWhatIf,
    Limit,
    MemoryTotals,
    Outcome,
    WhatIfResult,
)
from cudakit.memory.whatif.verdict import best_of, differences, headline, reasons
from cudakit.torch_rules.settings import Settings, parse_config

_RECORDED_REPLAY_NAME = "replayed, as recorded"  # the name of the replay with the recorded settings


@dataclass(frozen=True, slots=True)
class WhatIfSpec:
    """The settings (in the format of PYTORCH_CUDA_ALLOC_CONF), memory limit and device of replays."""

    settings: tuple[str, ...]
    limit_bytes: int | None = (
        None  # None: the limit of the recording if memory ran out, else no limit
    )
    device: int | None = None


# The settings of a replay, after their name in the report.
_Trial: TypeAlias = tuple[str, Settings]


def what_if(
    spec: WhatIfSpec,
    snapshots: Sequence[Snapshot],
    new_allocator: NewAllocator,
    progress: Callable[[str, float], None] | None = None,
) -> WhatIfResult:
    """Return the result for all selected devices.

    Raises InputError for invalid settings, with the position; Unsupported for settings that the allocator
    lacks; UsageError for a memory fraction without ``limit_bytes``, for pinned host memory, and for a device
    that is in no snapshot; SnapshotError if no device has a trace.
    """
    trials = tuple(_trials(spec, new_allocator))
    traces = _traces_to_replay(snapshots, spec.device)
    replay_count, replay_numbers = len(traces) * (len(trials) + 1), itertools.count()

    def report_replay_start(name: str) -> None:
        if progress is not None:
            progress(f"replaying with {name}", min(next(replay_numbers) / replay_count, 1.0))

    return WhatIfResult(
        schema=SCHEMA,
        files=tuple(map(file_facts, snapshots)),
        devices=tuple(
            _DeviceReplays(
                recording_of(*snapshot_and_trace), new_allocator, report_replay_start
            ).result(trials, spec.limit_bytes)
            for snapshot_and_trace in traces
        ),
    )


def _traces_to_replay(
    snapshots: Sequence[Snapshot], device: int | None
) -> list[tuple[Snapshot, DeviceTrace]]:
    """Return the traces with events of all GPUs, or of one device. Raises the errors of ``what_if``."""
    snapshot_trace_pairs = [
        (snapshot, trace) for snapshot in snapshots for trace in snapshot.devices
    ]
    if device == HOST:
        raise UsageError(
            "pinned host memory cannot be replayed", hint="choose a GPU, such as device 0"
        )
    pairs_of_device = [
        snapshot_trace_pair
        for snapshot_trace_pair in snapshot_trace_pairs
        if snapshot_trace_pair[1].device == device
        or (device is None and snapshot_trace_pair[1].device >= 0)
    ]
    if not pairs_of_device:
        device_numbers = sorted(
            {trace.device for _, trace in snapshot_trace_pairs if trace.device != HOST}
        )
        device_text = "no device" if device is None else f"no device {device}"
        raise UsageError(
            f"{device_text} in the snapshots"
            if len(snapshots) > 1
            else f"{snapshots[0].source}: {device_text} in the snapshot",
            hint=f"devices of the snapshot: {', '.join(map(str, device_numbers)) or 'none'}",
        )
    pairs_with_trace = [
        snapshot_trace_pair
        for snapshot_trace_pair in pairs_of_device
        if len(snapshot_trace_pair[1].events)
    ]
    if not pairs_with_trace:
        raise SnapshotError(
            f"{pairs_of_device[0][0].source}: the file has no trace to replay",
            hint=f"record one: cudakit run --memory, or {pairs_of_device[0][0].calls.record_trace}",
        )
    return pairs_with_trace


def _trials(spec: WhatIfSpec, new_allocator: NewAllocator) -> Iterator[_Trial]:
    for settings_text in spec.settings:
        settings = parse_config(settings_text, variable=f"settings {settings_text!r}")
        if settings.memory_fraction < 1 and spec.limit_bytes is None:
            raise UsageError(
                f"settings {settings_text}: a snapshot does not record the size of the device's memory",
                hint="add this size: --what-if-limit 80GiB on the command line, limit_bytes in Python",
            )
        if settings.backend != "native":
            raise Unsupported(
                f"settings {settings_text}: a replay with backend:{settings.backend} is not possible, because"
                " the driver's pool then replaces the caching allocator",
                hint="remove this setting",
            )
        # An empty replay raises Unsupported for settings that the allocator lacks, before the long work.
        replay(EMPTY_PROGRAM, settings, new_allocator, limit_bytes=spec.limit_bytes)
        yield settings_text.strip() or DEFAULTS, settings


class _DeviceReplays:
    """All replays of one device."""

    def __init__(
        self, recording: Recording, new_allocator: NewAllocator, report_begin: Callable[[str], None]
    ) -> None:
        self._recording, self._new_allocator, self._report_begin = (
            recording,
            new_allocator,
            report_begin,
        )
        self._settings = settings_of(recording)
        garbage_collects = self._settings.garbage_collection_threshold > 0
        self._program = program_of(recording, garbage_collects=garbage_collects)

    def result(self, trials: Sequence[_Trial], limit_bytes: int | None) -> DeviceWhatIf:
        recording, settings = self._recording, self._settings
        recorded_limit = limit_of(recording, self._program, settings)
        recorded_outcome = outcome_of(recording, self._program, settings)
        outcome, initial_totals = self._replay(_RECORDED_REPLAY_NAME, settings, recorded_limit)
        limit, baseline = recorded_limit, outcome
        if limit_bytes is not None:
            limit = Limit(limit_bytes, "given")
            baseline, _ = self._replay(LIMITED_BASELINE, settings, limit)
        trial_outcomes = tuple(self._replay(*trial, limit)[0] for trial in trials)
        best_index = best_of(baseline, trial_outcomes)
        return DeviceWhatIf(
            file=recording.snapshot.source,
            device=recording.trace.device,
            events=len(recording.trace.events),
            limit=limit,
            recorded=recorded_outcome,
            replayed=outcome,
            differences=tuple(differences(recorded_outcome, outcome)),
            reasons=tuple(reasons(recording, initial_totals)),
            baseline=baseline,
            tried=trial_outcomes,
            best=best_index,
            headline=headline(baseline, trial_outcomes, best_index),
        )

    def _replay(
        self, name: str, settings: Settings, limit: Limit | None
    ) -> tuple[Outcome, MemoryTotals]:
        self._report_begin("recorded settings" if name == _RECORDED_REPLAY_NAME else name)
        return replay(
            self._program,
            settings,
            self._new_allocator,
            name=name,
            limit_bytes=None if limit is None else limit.bytes,
            addresses=self._recording.segment_addresses(),
            search_again=self._recording.snapshot.settings.get("cudakit_search_again") is True,
        )
