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
from cudakit.memory.result import (
    DEFAULTS,
    LIMITED_BASELINE,
    WHAT_IF_SCHEMA,
    DeviceWhatIf,
    Difference,
    Limit,
    MemoryTotals,
    Outcome,
    WhatIfResult,
    file_facts,
)
from cudakit.memory.snapshot import HOST, Action, DeviceTrace, Snapshot
from cudakit.memory.whatif.program import (
    EMPTY_PROGRAM,
    Recording,
    has_both_kinds,
    limit_of,
    outcome_of,
    program_of,
    recording_of,
    settings_of,
)
from cudakit.memory.whatif.replay import NewAllocator, replay
from cudakit.torch_rules.settings import Settings, parse_config
from cudakit.units import format_bytes, format_count

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

    def report_start(name: str) -> None:
        if progress is not None:
            progress(f"replaying with {name}", min(next(replay_numbers) / replay_count, 1.0))

    return WhatIfResult(
        schema=WHAT_IF_SCHEMA,
        files=tuple(map(file_facts, snapshots)),
        devices=tuple(
            _replay_device(
                recording_of(snapshot, trace),
                trials,
                spec.limit_bytes,
                new_allocator,
                report_start,
            )
            for snapshot, trace in traces
        ),
    )


def _traces_to_replay(
    snapshots: Sequence[Snapshot], device: int | None
) -> list[tuple[Snapshot, DeviceTrace]]:
    """Return the traces with events of all GPUs, or of one device. Raises the errors of ``what_if``."""
    if device == HOST:
        raise UsageError(
            "pinned host memory cannot be replayed", hint="choose a GPU, such as device 0"
        )
    gpus = [
        (snapshot, trace)
        for snapshot in snapshots
        for trace in snapshot.devices
        if trace.device != HOST
    ]
    pairs = [pair for pair in gpus if device is None or pair[1].device == device]
    if not pairs:
        numbers = sorted({trace.device for _, trace in gpus})
        device_text = "no device" if device is None else f"no device {device}"
        raise UsageError(
            f"{device_text} in the snapshots"
            if len(snapshots) > 1
            else f"{snapshots[0].source}: {device_text} in the snapshot",
            hint=f"devices of the snapshot: {', '.join(map(str, numbers)) or 'none'}",
        )
    pairs_with_events = [(snapshot, trace) for snapshot, trace in pairs if len(trace.events)]
    if not pairs_with_events:
        snapshot = pairs[0][0]
        raise SnapshotError(
            f"{snapshot.source}: the file has no trace to replay",
            hint=f"record one: cudakit run --memory, or {snapshot.calls.record_trace}",
        )
    return pairs_with_events


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


def _replay_device(
    recording: Recording,
    trials: Sequence[_Trial],
    limit_bytes: int | None,
    new_allocator: NewAllocator,
    report_start: Callable[[str], None],
) -> DeviceWhatIf:
    settings = settings_of(recording)
    program = program_of(recording, garbage_collects=settings.garbage_collection_threshold > 0)

    def run(
        name: str, trial_settings: Settings, limit: Limit | None
    ) -> tuple[Outcome, MemoryTotals]:
        report_start("recorded settings" if name == _RECORDED_REPLAY_NAME else name)
        return replay(
            program,
            trial_settings,
            new_allocator,
            name=name,
            limit_bytes=None if limit is None else limit.bytes,
            addresses=recording.segment_addresses(),
            search_again=recording.searches_again,
        )

    limit = limit_of(recording, program, settings)
    recorded = outcome_of(recording, program, settings)
    replayed, initial_totals = run(_RECORDED_REPLAY_NAME, settings, limit)
    baseline = replayed
    if limit_bytes is not None:
        limit = Limit(limit_bytes, "given")
        baseline, _ = run(LIMITED_BASELINE, settings, limit)
    tried = tuple(run(*trial, limit)[0] for trial in trials)
    best = best_of(baseline, tried)
    return DeviceWhatIf(
        file=recording.snapshot.source,
        device=recording.trace.device,
        events=len(recording.trace.events),
        limit=limit,
        recorded=recorded,
        replayed=replayed,
        differences=tuple(differences(recorded, replayed)),
        reasons=tuple(reasons(recording, initial_totals)),
        baseline=baseline,
        tried=tried,
        best=best,
        headline=headline(baseline, tried, best),
    )


# --- Compare the replays: their reliability, and the settings that would have helped most ----------


def differences(recorded: Outcome, replayed: Outcome) -> Iterator[Difference]:
    """Yield the figures that differ between a recording and its replay."""
    for moment in ("peak", "end"):
        for name in ("reserved", "allocated", "requested", "active"):
            before, after = (
                int(getattr(getattr(outcome, moment), f"{name}_bytes"))
                for outcome in (recorded, replayed)
            )
            if before != after:
                yield Difference(f"{moment} {name}", before, after)
    for figure in ("device_allocations", "device_frees", "retries", "ooms"):
        before, after = getattr(recorded, figure), getattr(replayed, figure)
        if before is not None and before != after:
            yield Difference(figure.replace("_", " "), before, after)


def reasons(recording: Recording, initial_totals: MemoryTotals) -> Iterator[str]:
    """Yield the reasons why a replay can differ from the recording.

    ``initial_totals`` is the memory at the start of the trace.
    """
    settings, history = recording.snapshot.settings, recording.history
    if not history.begins_complete:
        yield (
            "the trace starts with memory in use, which the replay allocates again: it reserves"
            f" {format_bytes(initial_totals.reserved_bytes)} for it, not"
            f" {format_bytes(int(history.curves.reserved[0]))} as recorded"
        )
    if history.inconsistencies.total or recording.trace.warnings:
        yield "the trace and the final state disagree"
    if has_both_kinds(recording):
        yield "expandable_segments was changed during the recording: the trace has both kinds of segments"
    if settings.get("garbage_collection_threshold"):
        yield "garbage_collection_threshold is a fraction of a memory limit that the file does not record"
    allocations = history.allocations
    has_pending_frees = bool((allocations.end - allocations.free_request > 1).any())
    if settings.get("max_split_size", -1) not in (-1, None) and has_pending_frees:
        yield "the trace does not record which pending frees a request waited for before it released memory"
    if settings.get("cudakit_cache_limit", -1) not in (-1, None):
        yield "the cache was limited in the recorded program, and is not limited in the replay"
    has_releases = recording.count_actions(Action.SEGMENT_FREE, Action.SEGMENT_UNMAP) > 0
    has_pools = bool((recording.trace.events.pool >= 0).any())
    if has_releases and not has_pools and len(recording.snapshot.pools) > 1:
        yield "the file does not record the pools of segments that were released"


def best_of(baseline: Outcome, trial_outcomes: Sequence[Outcome]) -> int | None:
    """Return the index of the settings with the fewest failures, then the least reserved memory.

    None if no settings are better than the baseline.
    """
    best = min(
        range(len(trial_outcomes)), key=lambda index: _rank(trial_outcomes[index]), default=None
    )
    return best if best is not None and _helps(trial_outcomes[best], baseline) else None


def _helps(outcome: Outcome, baseline: Outcome) -> bool:
    # If memory ran out, only fewer failures help, not less reserved memory.
    criteria_count = 2 if baseline.ooms or baseline.shortage else 3
    return _rank(outcome)[:criteria_count] < _rank(baseline)[:criteria_count]


def _rank(outcome: Outcome) -> tuple[bool, int, int]:
    # After a shortage the peak covers only a part of the trace.
    if outcome.shortage is not None:
        return True, 0, 0
    return False, outcome.ooms, outcome.peak.reserved_bytes


def headline(baseline: Outcome, trial_outcomes: Sequence[Outcome], best_index: int | None) -> str:
    """Return the result in one sentence without a period."""
    if best_index is None:
        return _no_help_sentence(baseline, trial_outcomes)
    best = trial_outcomes[best_index]
    other_names = [
        "the defaults" if outcome.name == DEFAULTS else outcome.name
        for outcome in trial_outcomes
        if outcome is not best and _helps(outcome, baseline)
    ]
    others_clause = f"; {join_names(other_names)} would also have helped" if other_names else ""
    return f"{_subject(best)} would have {_benefit(baseline, best)}{others_clause}"


def _benefit(baseline: Outcome, best: Outcome) -> str:
    if baseline.shortage is None and best.ooms >= baseline.ooms:
        saved_bytes = baseline.peak.reserved_bytes - best.peak.reserved_bytes
        saved_text = (
            f"{format_bytes(saved_bytes)} ({saved_bytes / baseline.peak.reserved_bytes:.0%})"
        )
        return f"reserved {saved_text} less at the peak"
    if best.ooms:
        failures_text = (
            "1 failed request" if best.ooms == 1 else f"{format_count(best.ooms)} failed requests"
        )
        return f"had {failures_text} instead of {format_count(baseline.ooms)}"
    peak_text = format_bytes(best.peak.reserved_bytes)
    if baseline.shortage is not None:
        return f"let the program run to the end, with {peak_text} reserved at the peak"
    noun = "request" if baseline.ooms == 1 else "requests"
    return f"let the failed {noun} succeed, with {peak_text} reserved at the peak"


def _no_help_sentence(baseline: Outcome, trial_outcomes: Sequence[Outcome]) -> str:
    is_single = len(trial_outcomes) == 1
    outcome = trial_outcomes[0] if is_single else baseline
    subject_text = f"{_subject(outcome)} would not" if is_single else "None of these settings would"
    if baseline.shortage is not None:
        return (
            f"{subject_text} have let the program run to the end within the memory limit, and neither would"
            " the recorded settings"
        )
    if baseline.ooms:
        noun = "request" if baseline.ooms == 1 else "requests"
        return f"{subject_text} have let the failed {noun} succeed"
    if is_single and outcome.shortage is not None:
        return f"{_subject(outcome)} would have run out of memory {shortage_text(outcome)}"
    if is_single and _rank(outcome) > _rank(baseline):
        increase_bytes = outcome.peak.reserved_bytes - baseline.peak.reserved_bytes
        return f"{_subject(outcome)} would have reserved {format_bytes(increase_bytes)} more at the peak"
    peak_text = format_bytes(baseline.peak.reserved_bytes)
    limit_text = " with the limit" if baseline.name == LIMITED_BASELINE else ""
    return (
        f"{subject_text} have reserved less at the peak than the recorded settings{limit_text}"
        f" ({peak_text})"
    )


def _subject(outcome: Outcome) -> str:
    """Return the name of the settings as the first words of a sentence."""
    return "The defaults" if outcome.name == DEFAULTS else outcome.name


def join_names(names: Sequence[str]) -> str:
    """Return names in one text, the last two joined by "and"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def shortage_text(outcome: Outcome) -> str:
    """Describe the event at which a replay ran out of memory."""
    if outcome.shortage is None:
        return "never"
    size_text = format_bytes(outcome.shortage.size_bytes)
    if outcome.shortage.event < 0:
        return f"before the trace starts (request of {size_text})"
    return f"at event {format_count(outcome.shortage.event)} (request of {size_text})"
