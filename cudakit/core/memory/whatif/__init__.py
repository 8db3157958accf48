"""What a recorded program would have needed under other settings of the allocator.

The steps of a trace are replayed by an allocator that the caller hands over, on a device that has only a
limit: once under the recorded settings and once under each of the settings asked about. The first replay
shows whether the others can be believed: it should equal the record.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cudakit.core.memory.analyze import file_facts
from cudakit.core.memory.snapshot import HOST, DeviceTrace, Snapshot
from cudakit.core.memory.whatif.program import NOTHING, program_of
from cudakit.core.memory.whatif.recorded import limit_of, outcome_of, settings_of
from cudakit.core.memory.whatif.recording import Recording, recording_of
from cudakit.core.memory.whatif.replay import NewAllocator, replay
from cudakit.core.memory.whatif.result import (
    SCHEMA,
    DeviceWhatIf,
    Held,
    Limit,
    Outcome,
    WhatIfResult,
)
from cudakit.core.memory.whatif.verdict import best_of, differences, headline, reasons
from cudakit.errors import SnapshotError, UsageError
from cudakit.torch_rules.settings import Settings, parse_config

_OPTION = "--what-if"
_AS_RECORDED = "replayed, as recorded"  # the name of the replay with the recorded settings


@dataclass(frozen=True, slots=True)
class WhatIfSpec:
    """What to try: settings as of PYTORCH_CUDA_ALLOC_CONF, on all devices or one, within a limit."""

    settings: tuple[str, ...]
    limit_bytes: int | None = None  # None: what the record met, if it did
    device: int | None = None


# What settings are called, and the settings to replay under.
_Trial: TypeAlias = tuple[str, Settings]


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
    count, numbers = len(chosen) * (len(trials) + 1), itertools.count()

    def begin(name: str) -> None:
        if progress is not None:
            progress(f"replaying with {name}", min(next(numbers) / count, 1.0))

    return WhatIfResult(
        schema=SCHEMA,
        files=tuple(map(file_facts, snapshots)),
        devices=tuple(
            _Experiment(recording_of(*pair), new_allocator, begin).answer(trials, spec.limit_bytes)
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
            "--what-if cannot replay pinned host memory",
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
            f"{of_device[0][0].source}: the file has no trace to replay",
            hint=f"record one: cudakit run --memory, or {of_device[0][0].calls.record_trace}",
        )
    return with_trace


def _trials(spec: WhatIfSpec, new_allocator: NewAllocator) -> Iterator[_Trial]:
    for text in spec.settings:
        settings = parse_config(text, variable=_OPTION)
        if settings.memory_fraction < 1 and spec.limit_bytes is None:
            raise UsageError(
                f"{_OPTION} {text}: a snapshot does not record the size of the device's memory",
                hint="add it, for example --what-if-limit 80GiB",
            )
        # An empty replay refuses settings that the allocator does not have before anything is read.
        replay(NOTHING, settings, new_allocator, limit_bytes=spec.limit_bytes)
        yield text.strip() or "defaults", settings


class _Experiment:
    """The recording of one device, and its replays."""

    def __init__(
        self, recording: Recording, new_allocator: NewAllocator, begin: Callable[[str], None]
    ) -> None:
        self._recording, self._new_allocator, self._begin = recording, new_allocator, begin
        self._settings = settings_of(recording)
        collects = self._settings.garbage_collection_threshold > 0
        self._program = program_of(recording, collects=collects)

    def answer(self, trials: Sequence[_Trial], given_bytes: int | None) -> DeviceWhatIf:
        recording, settings = self._recording, self._settings
        met = limit_of(recording, self._program, settings)
        recorded = outcome_of(recording, self._program, settings)
        outcome, start = self._replay(_AS_RECORDED, settings, met)
        limit, baseline = met, outcome
        if given_bytes is not None:
            limit = Limit(given_bytes, "given")
            baseline, _ = self._replay("recorded settings", settings, limit)
        tried = tuple(self._replay(*trial, limit)[0] for trial in trials)
        best = best_of(baseline, tried)
        return DeviceWhatIf(
            file=recording.snapshot.source,
            device=recording.trace.device,
            events=len(recording.trace.events),
            limit=limit,
            recorded=recorded,
            replayed=outcome,
            differences=tuple(differences(recorded, outcome)),
            reasons=tuple(reasons(recording, start)),
            baseline=baseline,
            tried=tried,
            best=best,
            headline=headline(baseline, tried, best),
        )

    def _replay(self, name: str, settings: Settings, limit: Limit | None) -> tuple[Outcome, Held]:
        self._begin("recorded settings" if name == _AS_RECORDED else name)
        return replay(
            self._program,
            settings,
            self._new_allocator,
            name=name,
            limit_bytes=None if limit is None else limit.bytes,
            addresses=self._recording.segment_addresses(),
            search_again=self._recording.snapshot.settings.get("cudakit_search_again") is True,
        )
