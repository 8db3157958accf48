"""Compare the replays: their reliability, and the settings that would have helped most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cudakit.memory.replay.allocations import Allocations
from cudakit.memory.whatif.program import Recording
from cudakit.memory.whatif.recorded_outcome import has_both_kinds
from cudakit.memory.whatif.result import (
    DEFAULTS,
    LIMITED_BASELINE,
    Difference,
    MemoryTotals,
    Outcome,
)
from cudakit.torch_rules.actions import Action
from cudakit.units import format_bytes, format_count


def differences(recorded_outcome: Outcome, replayed_outcome: Outcome) -> Iterator[Difference]:
    """Yield the figures that differ between a recording and its replay."""
    for moment in ("peak", "end"):
        for name in ("reserved", "allocated", "requested", "active"):
            recorded_value, replayed_value = (
                int(getattr(getattr(outcome, moment), f"{name}_bytes"))
                for outcome in (recorded_outcome, replayed_outcome)
            )
            if recorded_value != replayed_value:
                yield Difference(f"{moment} {name}", recorded_value, replayed_value)
    for figure in ("device_allocations", "device_frees", "retries", "ooms"):
        recorded_value, replayed_value = (
            getattr(recorded_outcome, figure),
            getattr(replayed_outcome, figure),
        )
        if recorded_value is not None and recorded_value != replayed_value:
            yield Difference(figure.replace("_", " "), recorded_value, replayed_value)


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
    if settings.get("max_split_size", -1) not in (-1, None) and _has_pending_frees(
        history.allocations
    ):
        yield "the trace does not record which pending frees a request waited for before it released memory"
    if settings.get("cudakit_cache_limit", -1) not in (-1, None):
        yield "the cache was limited in the recorded program, and is not limited in the replay"
    has_releases = recording.has_action(Action.SEGMENT_FREE) or recording.has_action(
        Action.SEGMENT_UNMAP
    )
    if (
        has_releases
        and not (recording.trace.events.pool >= 0).any()
        and len(recording.snapshot.pools) > 1
    ):
        yield "the file does not record the pools of segments that were released"


def _has_pending_frees(allocations: Allocations) -> bool:
    return bool((allocations.end - allocations.free_request > 1).any())


def best_of(baseline: Outcome, trial_outcomes: Sequence[Outcome]) -> int | None:
    """Return the index of the settings with the fewest failures, then the least reserved memory.

    None if no settings are better than the baseline.
    """
    rank_by_index = {index: _rank(outcome) for index, outcome in enumerate(trial_outcomes)}
    best_index = min(rank_by_index, key=lambda index: rank_by_index[index], default=None)
    if best_index is None:
        return None
    return best_index if _helps(trial_outcomes[best_index], baseline) else None


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
    best_outcome = trial_outcomes[best_index]
    other_names = [
        "the defaults" if outcome.name == DEFAULTS else outcome.name
        for outcome in trial_outcomes
        if outcome is not best_outcome and _helps(outcome, baseline)
    ]
    others_clause = f"; {join_names(other_names)} would also have helped" if other_names else ""
    return f"{_best_sentence(baseline, best_outcome)}{others_clause}"


def _best_sentence(baseline: Outcome, best_outcome: Outcome) -> str:
    if baseline.shortage is not None or best_outcome.ooms < baseline.ooms:
        return f"{_settings_subject(best_outcome)} would have {_benefit_sentence(baseline, best_outcome)}"
    saved_bytes = baseline.peak.reserved_bytes - best_outcome.peak.reserved_bytes
    saved_text = f"{format_bytes(saved_bytes)} ({saved_bytes / baseline.peak.reserved_bytes:.0%})"
    return f"{_settings_subject(best_outcome)} would have reserved {saved_text} less at the peak"


def _benefit_sentence(baseline: Outcome, best_outcome: Outcome) -> str:
    if best_outcome.ooms:
        return f"had {_failures_text(best_outcome.ooms)} instead of {format_count(baseline.ooms)}"
    peak_text = format_bytes(best_outcome.peak.reserved_bytes)
    if baseline.shortage is not None:
        return f"let the program run to the end, with {peak_text} reserved at the peak"
    noun = "request" if baseline.ooms == 1 else "requests"
    return f"let the failed {noun} succeed, with {peak_text} reserved at the peak"


def _no_help_sentence(baseline: Outcome, trial_outcomes: Sequence[Outcome]) -> str:
    is_single = len(trial_outcomes) == 1
    subject_text = (
        f"{_settings_subject(trial_outcomes[0])} would not have"
        if is_single
        else "None of these settings would have"
    )
    if baseline.shortage is not None:
        return (
            f"{subject_text} let the program run to the end within the memory limit, and neither would the"
            " recorded settings"
        )
    if baseline.ooms:
        request_noun = "request" if baseline.ooms == 1 else "requests"
        return f"{subject_text} let the failed {request_noun} succeed"
    worse_outcomes = [outcome for outcome in trial_outcomes if _rank(outcome) > _rank(baseline)]
    if len(trial_outcomes) == 1 and worse_outcomes:
        return _worse_sentence(baseline, trial_outcomes[0])
    peak_text = format_bytes(baseline.peak.reserved_bytes)
    limit_text = " with the limit" if baseline.name == LIMITED_BASELINE else ""
    return f"{subject_text} reserved less at the peak than the recorded settings{limit_text} ({peak_text})"


def _worse_sentence(baseline: Outcome, outcome: Outcome) -> str:
    if outcome.shortage is not None:
        return f"{_settings_subject(outcome)} would have run out of memory {shortage_text(outcome)}"
    increase_bytes = outcome.peak.reserved_bytes - baseline.peak.reserved_bytes
    return f"{_settings_subject(outcome)} would have reserved {format_bytes(increase_bytes)} more at the peak"


def _settings_subject(outcome: Outcome) -> str:
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


def _failures_text(count: int) -> str:
    return "1 failed request" if count == 1 else f"{format_count(count)} failed requests"
