"""What a recorded program would have needed under other settings of the allocator.

The steps of a trace are replayed by an allocator that the caller hands over, on a device that has only a
limit: once under the recorded settings and once under each of the settings asked about. The first replay
shows whether the others can be believed: it should equal the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cudakit.core.memory.analyze import file_facts
from cudakit.core.memory.snapshot import HOST, DeviceTrace, Snapshot
from cudakit.core.memory.whatif.program import NOTHING, program_of
from cudakit.core.memory.whatif.recorded import limit_of, outcome_of, settings_of
from cudakit.core.memory.whatif.recording import Recording, recording_of
from cudakit.core.memory.whatif.replay import NewAllocator, Replayed, replay
from cudakit.core.memory.whatif.result import (
    SCHEMA,
    DeviceWhatIf,
    Limit,
    Outcome,
    WhatIfResult,
)
from cudakit.core.memory.whatif.verdict import best_of, differences, headline, reasons
from cudakit.errors import SnapshotError, UsageError
from cudakit.torch_rules.settings import Settings, parse_config

_OPTION = "--what-if"


@dataclass(frozen=True, slots=True)
class WhatIfSpec:
    """What to try: settings as of PYTORCH_CUDA_ALLOC_CONF, on all devices or one, within a limit."""

    settings: tuple[str, ...]
    limit_bytes: int | None = None  # None: what the record met, if it did
    device: int | None = None


@dataclass(frozen=True, slots=True)
class _Trial:
    """Settings to replay under, and what they are called."""

    name: str
    settings: Settings


def what_if(
    spec: WhatIfSpec,
    snapshots: Sequence[Snapshot],
    new_allocator: NewAllocator,
    progress: Callable[[str, float], None] | None = None,
) -> WhatIfResult:
    """Answer a WhatIfSpec for the devices of snapshots.

    Raises InputError for invalid settings, with the character; Unsupported for settings that the allocator
    does not have; UsageError for a share of memory without the size of the memory, for pinned host memory,
    and for a device that no snapshot has; SnapshotError if no trace is left.
    """
    trials = tuple(_trials(spec, new_allocator))
    chosen = _traces_to_replay(snapshots, spec.device)
    steps = _Progress(len(chosen) * (len(trials) + 1), progress)
    return WhatIfResult(
        schema=SCHEMA,
        files=tuple(map(file_facts, snapshots)),
        devices=tuple(
            _Experiment(recording_of(*pair), new_allocator, steps).answer(trials, spec.limit_bytes)
            for pair in chosen
        ),
    )


def _traces_to_replay(
    snapshots: Sequence[Snapshot], device: int | None
) -> list[tuple[Snapshot, DeviceTrace]]:
    """Return the traces with events of all GPUs, or of one device.

    Raises UsageError for pinned host memory and for a device that no snapshot has, SnapshotError if no trace
    is left.
    """
    known = [(snapshot, trace) for snapshot in snapshots for trace in snapshot.devices]
    if device == HOST:
        raise UsageError(
            "--what-if replays memory of devices, not pinned host memory",
            hint="leave out --device host",
        )
    of_device = [
        pair
        for pair in known
        if pair[1].device == device or (device is None and pair[1].device >= 0)
    ]
    if not of_device:
        numbers = sorted({trace.device for _, trace in known if trace.device != HOST})
        raise UsageError(
            f"no device {device} in the snapshot"
            if device is not None
            else "no device in the snapshot",
            hint=f"devices: {', '.join(map(str, numbers)) or 'none'}",
        )
    with_trace = [pair for pair in of_device if len(pair[1].events)]
    if not with_trace:
        raise SnapshotError(
            f"{of_device[0][0].source}: there is no trace in it, and so nothing to replay",
            hint="record one: `cudakit run --memory`, or torch.cuda.memory._record_memory_history()"
            " before the program begins",
        )
    return with_trace


def _trials(spec: WhatIfSpec, new_allocator: NewAllocator) -> Iterator[_Trial]:
    for text in spec.settings:
        settings = parse_config(text, variable=_OPTION)
        if settings.memory_fraction < 1 and spec.limit_bytes is None:
            raise UsageError(
                f"{_OPTION} {text}: no snapshot says how much memory the device has",
                hint="give it: --what-if-limit 80GiB",
            )
        # An empty replay refuses settings that the allocator does not have before anything is read.
        replay(NOTHING, settings, new_allocator, limit_bytes=spec.limit_bytes)
        yield _Trial(text.strip() or "defaults", settings)


class _Progress:
    """Reports how many of the replays have begun."""

    def __init__(self, count: int, progress: Callable[[str, float], None] | None) -> None:
        self._count = count
        self._progress = progress
        self._done = 0

    def begin(self, name: str) -> None:
        if self._progress is not None:
            self._progress(f"replaying: {name}", min(self._done / self._count, 1.0))
        self._done += 1


class _Experiment:
    """The recording of one device, and its replays."""

    def __init__(
        self, recording: Recording, new_allocator: NewAllocator, progress: _Progress
    ) -> None:
        self._recording, self._new_allocator = recording, new_allocator
        self._progress = progress
        self._settings = settings_of(recording)
        collects = self._settings.garbage_collection_threshold > 0
        self._program = program_of(recording, collects=collects)

    def answer(self, trials: Sequence[_Trial], given_bytes: int | None) -> DeviceWhatIf:
        recording, settings = self._recording, self._settings
        met = limit_of(recording, self._program, settings)
        recorded = outcome_of(recording, self._program, settings)
        replayed, outcome = self._replay(_Trial("replayed, as recorded", settings), met)
        limit, baseline = met, outcome
        if given_bytes is not None:
            limit = Limit(given_bytes, "given")
            _, baseline = self._replay(_Trial("recorded settings", settings), limit)
        tried = tuple(self._replay(trial, limit)[1] for trial in trials)
        best = best_of(baseline, tried)
        return DeviceWhatIf(
            file=recording.snapshot.source,
            device=recording.trace.device,
            events=len(recording.trace.events),
            limit=limit,
            recorded=recorded,
            replayed=outcome,
            differences=tuple(differences(recorded, outcome)),
            reasons=tuple(reasons(recording, replayed)),
            baseline=baseline,
            tried=tried,
            best=best,
            headline=headline(baseline, tried, best),
        )

    def _replay(self, trial: _Trial, limit: Limit | None) -> tuple[Replayed, Outcome]:
        self._progress.begin(trial.name)
        limit_bytes = None if limit is None else limit.bytes
        replayed = replay(
            self._program,
            trial.settings,
            self._new_allocator,
            limit_bytes=limit_bytes,
            addresses=self._recording.segment_addresses(),
            search_again=self._recording.snapshot.settings.get("cudakit_search_again") is True,
        )
        return replayed, _outcome(trial, limit_bytes, replayed)


def _outcome(trial: _Trial, limit_bytes: int | None, replayed: Replayed) -> Outcome:
    at_peak = replayed.at_peak
    free = at_peak.reserved_bytes - at_peak.active_bytes
    if limit_bytes is not None and trial.settings.memory_fraction < 1:
        limit_bytes = int(limit_bytes * trial.settings.memory_fraction)
    return Outcome(
        name=trial.name,
        settings=trial.settings.as_text(),
        limit_bytes=limit_bytes,
        peak=replayed.peak,
        end=replayed.end,
        fragmentation_bytes=free,
        fragmentation=free / max(at_peak.reserved_bytes, 1),
        device_allocations=replayed.device_allocations,
        device_frees=replayed.device_frees,
        retries=replayed.retries,
        ooms=replayed.ooms,
        shortage=replayed.shortage,
    )
