"""Notes on how much of the program was recorded, and how much of the recording was analyzed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cudakit.core.sanitize.races import Coverage
from cudakit.core.sanitize.result import SanitizeResult
from cudakit.document import Note
from cudakit.units import capitalized, format_bytes, format_count

_MAX_LISTED_GAPS = 8

NOTHING_RECORDED = "no GPU work was recorded, so nothing was checked"


def notes(result: SanitizeResult) -> Iterator[Note]:
    """Yield notes on the recorded work, then on all that was not recorded, analyzed or shown."""
    yield from _recorded_notes(result)
    yield from recorder_notes(result)
    yield from _unknown_launch_notes(result.coverage.launches_unknown)
    yield from _without_call_site(result.coverage)
    yield from _gap_notes(result)
    yield from _suppression_notes(result)
    yield from _baseline_notes(result)
    if result.coverage.suspected:
        yield _possible_race_note(result.coverage.suspected)
    if result.simulated:
        yield Note("info", "Simulated device: no GPU was used")


def recorder_notes(result: SanitizeResult) -> Iterator[Note]:
    """Yield notes on work that the recorder did not record, or recorded less exactly."""
    for reason in result.notes:
        yield Note("warn", capitalized(reason))


def is_empty(result: SanitizeResult) -> bool:
    """Return whether no GPU work was recorded."""
    return not (result.coverage.has_work or result.gaps)


def nothing_recorded(result: SanitizeResult) -> str:
    """Return the verdict on a run without GPU work, with the reason if it is known."""
    reason = f" ({result.no_gpu_work})" if result.no_gpu_work else ""
    return f"{NOTHING_RECORDED}{reason}"


def _recorded_notes(result: SanitizeResult) -> Iterator[Note]:
    if is_empty(result):
        if result.no_gpu_work:
            yield Note("warn", capitalized(result.no_gpu_work))
        return
    coverage, gaps = result.coverage, sum(result.gaps.values())
    work = _nonzero_counts(
        ("kernel launch", coverage.launches),
        ("copy", coverage.copies),
        ("fill", coverage.fills),
        ("graph launch", coverage.graph_launches),
        ("collective", coverage.collectives),
    )
    process_count = len(result.processes)
    processes = f" in {process_count:,} processes" if process_count > 1 else ""
    analyzed = f"{_count_with_noun('event', gaps)} not analyzed" if gaps else "all events analyzed"
    yield Note("info", f"Recorded {_join_words(work) or 'no work'}{processes}; {analyzed}")
    yield from _access_notes(coverage)


def _access_notes(coverage: Coverage) -> Iterator[Note]:
    """Yield how well the accesses of kernel launches are known, and the memory that recording used."""
    launches = coverage.launches_exact + coverage.launches_assumed + coverage.launches_unknown
    if not launches:
        return
    nodes = " (including graph nodes)" if launches > coverage.launches else ""
    counts = ", ".join(
        f"{format_count(count)} {precision}"
        for precision, count in (
            ("exact", coverage.launches_exact),
            ("assumed from pointer arguments", coverage.launches_assumed),
            ("unknown", coverage.launches_unknown),
        )
        if count
    )
    yield Note(
        "info", f"Accesses of {_count_with_noun('kernel launch', launches)}{nodes}: {counts}"
    )
    if coverage.launches_from_template:
        yield Note("info", _template_text(coverage))
    if coverage.launches_whole_tensor:
        stores = format_count(coverage.launches_whole_tensor)
        yield Note("info", f"{stores} of the exact launches store to an unknown part of a tensor")
    if coverage.arenas_bytes:
        memory = format_bytes(coverage.arenas_bytes)
        yield Note("info", f"Recording used up to {memory} of device memory")


def _template_text(coverage: Coverage) -> str:
    """Return how many launches were not recorded, and how many checks of their templates failed."""
    launches = format_count(coverage.launches_from_template)
    checks = _count_with_noun("check", coverage.template_checks)
    differences = _count_with_noun("difference", coverage.template_differences)
    were = "was" if coverage.launches_from_template == 1 else "were"
    return (
        f"{launches} of the exact launches {were} not recorded, because earlier launches accessed the same"
        f" bytes ({checks}, {differences})"
    )


def _unknown_launch_notes(count: int) -> Iterator[Note]:
    if count:
        launches = _count_with_noun("kernel launch", count)
        yield Note("warn", f"The arguments of {launches} were not recorded")


def _without_call_site(coverage: Coverage) -> Iterator[Note]:
    if count := coverage.launches_without_call_site:
        launches = _count_with_noun("kernel launch", coverage.launches)
        verb = "has" if count == 1 else "have"
        yield Note("info", f"{format_count(count)} of {launches} {verb} no Python call stack")


def _gap_notes(result: SanitizeResult) -> Iterator[Note]:
    """Yield one note on all events that were not analyzed, the first kinds by name."""
    gaps = list(result.gaps.items())
    kinds = [f"{event} ({_occurrences(count)})" for event, count in gaps[:_MAX_LISTED_GAPS]]
    if other_gaps := gaps[_MAX_LISTED_GAPS:]:
        occurrences = _occurrences(sum(count for _, count in other_gaps))
        kinds.append(f"{_count_with_noun('other kind', len(other_gaps))} of events ({occurrences})")
    if kinds:
        yield Note("warn", f"Not analyzed: {_join_words(kinds)}")


def _suppression_notes(result: SanitizeResult) -> Iterator[Note]:
    for suppressed in result.suppressed:
        if suppressed.races:
            races = _count_with_noun("race", suppressed.races)
            source = f"{suppressed.pattern} ({suppressed.origin})"
            occurrences = _occurrences(suppressed.count)
            yield Note("info", f"{races} suppressed by {source}, found {occurrences}")


def _baseline_notes(result: SanitizeResult) -> Iterator[Note]:
    if use := result.baseline:
        occurrences = f", found {_occurrences(use.count)}" if use.count else ""
        races = _count_with_noun("race", len(use.races))
        text = f"Not reported: {races} of the baseline {use.path}{occurrences}"
        if use.absent:
            absent_races = _count_with_noun("other race", use.absent)
            text += f"; {absent_races} of the baseline did not occur"
        yield Note("info", text)


def _possible_race_note(count: int) -> Note:
    conflicts = _count_with_noun("possible conflict", count)
    verb = "is" if count == 1 else "are"
    return Note(
        "info",
        f"{conflicts} {verb} not shown: the accesses of the kernels are not known exactly",
        remedies=(
            "show them with --show possible" if count > 1 else "show it with --show possible",
        ),
    )


def _nonzero_counts(*named_counts: tuple[str, int]) -> list[str]:
    return [_count_with_noun(name, count) for name, count in named_counts if count]


def _join_words(phrases: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(phrases[:-1]), *phrases[-1:])))


def _count_with_noun(name: str, count: int) -> str:
    plural = {
        "copy": "copies",
        "kernel launch": "kernel launches",
        "graph launch": "graph launches",
    }
    return f"{format_count(count)} {name if count == 1 else plural.get(name, f'{name}s')}"


def _occurrences(count: int) -> str:
    return "once" if count == 1 else f"{format_count(count)} times"
