"""Notes on how much of the program was recorded, and how much of the recording was analyzed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cudakit.report.document import Note
from cudakit.sanitize.races import Coverage
from cudakit.sanitize.result import BaselineUse, SanitizeResult
from cudakit.units import capitalized, format_bytes, format_count

_MAX_LISTED_GAPS = 8

_WHOLE_TENSOR_TEXT = (
    "exact except stores through tensor maps, which count as writes of the whole tensor"
)
NOTHING_RECORDED = "no GPU work was recorded, so nothing was checked"


def notes(result: SanitizeResult) -> Iterator[Note]:
    """Yield notes on the recorded work, then on all that was not recorded, analyzed or shown."""
    yield from _recorded_notes(result)
    yield from recorder_notes(result)
    yield from _unknown_launch_notes(result.coverage.launches_unknown)
    yield from _call_site_notes(result.coverage)
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
    coverage, gap_count = result.coverage, sum(result.gaps.values())
    work_counts = _nonzero_counts(
        ("kernel launch", coverage.launches),
        ("copy", coverage.copies),
        ("memset", coverage.fills),
        ("graph launch", coverage.graph_launches),
        ("collective", coverage.collectives),
    )
    if coverage.collectives and coverage.graph_launches:
        work_counts[-1] += " (a collective in a graph counts once)"
    process_count = len(result.processes)
    processes_text = f" in {process_count:,} processes" if process_count > 1 else ""
    analyzed_text = (
        f"{_count_with_noun('operation', gap_count)} not analyzed"
        if gap_count
        else _analyzed_text(len(result.unverified))
    )
    yield Note(
        "info", f"Recorded {_join_words(work_counts) or 'no work'}{processes_text}; {analyzed_text}"
    )
    yield from _access_notes(coverage)


def _analyzed_text(unchecked_pairs: int) -> str:
    if not unchecked_pairs:
        return "all operations analyzed"
    pairs_text = "one" if unchecked_pairs == 1 else f"{unchecked_pairs:,}"
    return f"all pairs of operations checked, except the {pairs_text} above"


def _access_notes(coverage: Coverage) -> Iterator[Note]:
    """Yield notes on the precision of kernel accesses, and on the memory that recording used."""
    launch_count = coverage.launches_exact + coverage.launches_assumed + coverage.launches_unknown
    if not launch_count:
        return
    graph_node_text = " (including graph nodes)" if launch_count > coverage.launches else ""
    access_counts_text = ", ".join(
        f"{format_count(launch_count)} {precision_text}"
        for precision_text, launch_count in (
            (_exact_text(coverage), coverage.launches_exact - coverage.launches_whole_tensor),
            (_WHOLE_TENSOR_TEXT, coverage.launches_whole_tensor),
            ("assumed from pointer arguments", coverage.launches_assumed),
            ("unknown", coverage.launches_unknown),
        )
        if launch_count
    )
    yield Note(
        "info",
        f"Accesses of {_count_with_noun('kernel launch', launch_count)}{graph_node_text}:"
        f" {access_counts_text}",
    )
    if coverage.launches_from_template:
        yield Note("info", _template_text(coverage))
    if coverage.arenas_bytes:
        memory_text = format_bytes(coverage.arenas_bytes)
        yield Note("info", f"Recording used up to {memory_text} of device memory")


def _exact_text(coverage: Coverage) -> str:
    return (
        "exact (recorded, or taken from an earlier launch)"
        if coverage.launches_from_template
        else "exact"
    )


def _template_text(coverage: Coverage) -> str:
    """Return how many launches have accesses of earlier launches, and how many checks of them failed."""
    graph_text = " (a graph launch counts once)" if coverage.graph_launches else ""
    launches_text = _count_with_noun("launch", coverage.launches_from_template)
    differences_text = _count_with_noun("difference", coverage.template_differences)
    return (
        f"Of these, the accesses of {launches_text}{graph_text} are taken from an earlier launch of the same "
        f"kernel, and those of {format_count(coverage.template_checks)} were recorded and compared with an "
        f"earlier launch: {differences_text}"
    )


def _unknown_launch_notes(launch_count: int) -> Iterator[Note]:
    if launch_count:
        launches_text = _count_with_noun("kernel launch", launch_count)
        yield Note("warn", f"The arguments of {launches_text} were not recorded")


def _call_site_notes(coverage: Coverage) -> Iterator[Note]:
    if launch_count := coverage.launches_without_call_site:
        launches_text = _count_with_noun("kernel launch", coverage.launches)
        verb = "has" if launch_count == 1 else "have"
        yield Note(
            "info", f"{format_count(launch_count)} of {launches_text} {verb} no Python call stack"
        )


def _gap_notes(result: SanitizeResult) -> Iterator[Note]:
    """Yield one note on all operations that were not analyzed, the first kinds by name."""
    gaps = list(result.gaps.items())
    gap_texts = [
        f"{gap_text} ({_count_with_noun('operation', gap_count)})"
        for gap_text, gap_count in gaps[:_MAX_LISTED_GAPS]
    ]
    if other_gaps := gaps[_MAX_LISTED_GAPS:]:
        operations_text = _count_with_noun("operation", sum(count for _, count in other_gaps))
        gap_texts.append(f"{_count_with_noun('other kind', len(other_gaps))} ({operations_text})")
    if gap_texts:
        yield Note("warn", f"Not analyzed, so that races may be missing: {_join_words(gap_texts)}")


def _suppression_notes(result: SanitizeResult) -> Iterator[Note]:
    for suppression in result.suppressed:
        if suppression.races:
            races_text = _count_with_noun("race", suppression.races)
            source = f"{suppression.pattern} ({suppression.origin})"
            occurrences_text = _occurrences(suppression.count)
            yield Note("info", f"{races_text} suppressed by {source}, found {occurrences_text}")


def _baseline_notes(result: SanitizeResult) -> Iterator[Note]:
    if baseline_use := result.baseline:
        if not baseline_use.races:
            yield Note("info", _absence_text(baseline_use))
            return
        occurrences_text = (
            f", found {_occurrences(baseline_use.count)}" if baseline_use.count else ""
        )
        races_text = _count_with_noun("race", len(baseline_use.races))
        baseline_text = f"of the baseline {baseline_use.path}"
        note_text = f"Not reported: {races_text} {baseline_text}{occurrences_text}"
        if baseline_use.absent:
            absent_races_text = _count_with_noun("other race", baseline_use.absent)
            note_text += f"; {absent_races_text} of the baseline did not occur"
        yield Note("info", note_text)


def _absence_text(baseline_use: BaselineUse) -> str:
    """Return a sentence on a baseline of which no race occurred."""
    if not baseline_use.absent:
        return f"The baseline {baseline_use.path} has no races"
    if baseline_use.absent == 1:
        return f"The race of the baseline {baseline_use.path} did not occur"
    return f"None of the {baseline_use.absent:,} races of the baseline {baseline_use.path} occurred"


def _possible_race_note(race_count: int) -> Note:
    races_text = _count_with_noun("possible race", race_count)
    verb = "is" if race_count == 1 else "are"
    return Note(
        "info",
        f"{races_text} {verb} not shown: the accesses of the kernels are not known exactly",
        remedies=(
            "show them with --show possible" if race_count > 1 else "show it with --show possible",
        ),
    )


def _nonzero_counts(*named_counts: tuple[str, int]) -> list[str]:
    return [_count_with_noun(name, count) for name, count in named_counts if count]


def _join_words(phrases: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(phrases[:-1]), *phrases[-1:])))


def _count_with_noun(noun: str, noun_count: int) -> str:
    plural_by_noun = {
        "copy": "copies",
        "kernel launch": "kernel launches",
        "graph launch": "graph launches",
        "launch": "launches",
    }
    return f"{format_count(noun_count)} {noun if noun_count == 1 else plural_by_noun.get(noun, f'{noun}s')}"


def _occurrences(occurrence_count: int) -> str:
    return "once" if occurrence_count == 1 else f"{format_count(occurrence_count)} times"
