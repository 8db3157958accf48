"""What a recorded program would have needed under other settings of the allocator.

The steps of a trace are played through cudakit's own allocator, on a device that has nothing but a limit,
once under the settings of the record and once under each of those that are asked about. The first shows
whether the others can be believed: it is to equal the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.core.memory.replay import Replay, replay
from cudakit.core.memory.replay.reserved import whole_segments
from cudakit.core.memory.result import FileFacts
from cudakit.core.memory.snapshot import HOST, DeviceTrace, Snapshot
from cudakit.core.memory.whatif.play import Played, play
from cudakit.core.memory.whatif.program import NOTHING, program_of
from cudakit.core.memory.whatif.recorded import limit_of, outcome_of, settings_of
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
    """Settings to play under, and what they are called."""

    name: str
    settings: Settings


def what_if(
    snapshots: Sequence[Snapshot],
    spec: WhatIfSpec,
    progress: Callable[[str, float], None] | None = None,
) -> WhatIfResult:
    """Answer a WhatIfSpec for one or more snapshots.

    Raises InputError for settings that cannot be, at the character; Unsupported for those that the allocator
    has not; UsageError for a device that no file has, and for a share of memory of which the size is not
    given; SnapshotError where there is no trace.
    """
    trials = tuple(_trials(spec))
    chosen = _traces(snapshots, spec.device)
    rounds = _Rounds(len(chosen) * (len(trials) + 1), progress)
    return WhatIfResult(
        schema=SCHEMA,
        files=tuple(FileFacts(s.source, s.format, s.size_bytes, s.settings) for s in snapshots),
        devices=tuple(
            _Laboratory(snapshot, trace, rounds).answer(trials, spec.limit_bytes)
            for snapshot, trace in chosen
        ),
    )


def _trials(spec: WhatIfSpec) -> Iterator[_Trial]:
    for text in spec.settings:
        settings = parse_config(text, variable=_OPTION)
        if settings.memory_fraction < 1 and spec.limit_bytes is None:
            raise UsageError(
                f"{_OPTION} {text}: no snapshot says how much memory the device has",
                hint="give it: --what-if-limit 80GiB",
            )
        # Settings that the allocator has not are refused before anything is read.
        play(NOTHING, settings, limit_bytes=spec.limit_bytes)
        yield _Trial(text.strip() or "defaults", settings)


def _traces(
    snapshots: Sequence[Snapshot], device: int | None
) -> list[tuple[Snapshot, DeviceTrace]]:
    known = [(snapshot, trace) for snapshot in snapshots for trace in snapshot.devices]
    if device == HOST:
        raise UsageError(
            f"{_OPTION} replays memory of devices, not pinned host memory",
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


class _Rounds:
    """How far the replays have come."""

    def __init__(self, count: int, progress: Callable[[str, float], None] | None) -> None:
        self._count = count
        self._progress = progress
        self._done = 0

    def begin(self, name: str) -> None:
        if self._progress is not None:
            self._progress(f"replaying: {name}", min(self._done / self._count, 1.0))
        self._done += 1


class _Laboratory:
    """The trace of one device, and its replays."""

    def __init__(self, snapshot: Snapshot, trace: DeviceTrace, rounds: _Rounds) -> None:
        self._snapshot, self._trace, self._rounds = snapshot, trace, rounds
        self._settings = settings_of(snapshot, trace)
        self._replayed: Replay = replay(snapshot, trace)
        collects = self._settings.garbage_collection_threshold > 0
        self._program = program_of(trace, self._replayed, collects=collects)

    def answer(self, trials: Sequence[_Trial], given_bytes: int | None) -> DeviceWhatIf:
        trace, settings = self._trace, self._settings
        met = limit_of(trace, self._replayed, self._program, settings)
        recorded = outcome_of(trace, self._replayed, self._program, settings)
        again = _Trial("replayed, as recorded", settings)
        played, replayed = self._play(again, met)
        limit, baseline = met, replayed
        if given_bytes is not None:
            limit = Limit(given_bytes, "given")
            _, baseline = self._play(_Trial("recorded settings", settings), limit)
        tried = tuple(self._play(trial, limit)[1] for trial in trials)
        best = best_of(baseline, tried)
        return DeviceWhatIf(
            file=self._snapshot.source,
            device=trace.device,
            events=len(trace.events),
            limit=limit,
            recorded=recorded,
            replayed=replayed,
            differences=tuple(differences(recorded, replayed)),
            reasons=tuple(reasons(self._snapshot, trace, self._replayed, played)),
            baseline=baseline,
            tried=tried,
            best=best,
            headline=headline(baseline, tried, best),
        )

    def _play(self, trial: _Trial, limit: Limit | None) -> tuple[Played, Outcome]:
        self._rounds.begin(trial.name)
        limit_bytes = None if limit is None else limit.bytes
        again = self._snapshot.settings.get("cudakit_search_again") is True
        played = play(
            self._program,
            trial.settings,
            limit_bytes=limit_bytes,
            places=_places(self._trace),
            search_again=again,
        )
        return played, _outcome(trial, limit_bytes, played)


def _places(trace: DeviceTrace) -> Iterator[tuple[int, int]]:
    """Go through the addresses and sizes of recorded segments, in the order in which they were taken."""
    segments = whole_segments(trace)
    order = np.argsort(segments.begin, kind="stable")
    return zip(segments.address[order].tolist(), segments.size[order].tolist(), strict=True)


def _outcome(trial: _Trial, limit_bytes: int | None, played: Played) -> Outcome:
    then = played.at_peak
    free = then.reserved_bytes - then.active_bytes
    if limit_bytes is not None and trial.settings.memory_fraction < 1:
        limit_bytes = int(limit_bytes * trial.settings.memory_fraction)
    return Outcome(
        name=trial.name,
        settings=trial.settings.as_text(),
        limit_bytes=limit_bytes,
        peak=played.peak,
        end=played.end,
        fragmentation_bytes=free,
        fragmentation=free / max(then.reserved_bytes, 1),
        device_allocations=played.device_allocations,
        device_frees=played.device_frees,
        retries=played.retries,
        ooms=played.ooms,
        shortage=played.shortage,
    )
