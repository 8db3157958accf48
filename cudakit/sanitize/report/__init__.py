"""Present a SanitizeResult as a Document: verdict, races, coverage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from cudakit.report.document import Document, Facts, Finding, Node, Note, Section, Stack, Text
from cudakit.sanitize.races import (
    BaselineUse,
    CollectiveCall,
    Coverage,
    DifferenceKind,
    DifferentCalls,
    RaceKind,
    SanitizeResult,
)
from cudakit.sanitize.report import races
from cudakit.trace.run_log import reasons_for_missing_events
from cudakit.units import capitalized, format_bytes, format_count


def report(result: SanitizeResult, *, top: int = 20) -> Document:
    """Return the report with the first ``top`` races, or with all races if ``top`` is 0."""
    shown_races = result.races if top == 0 else result.races[:top]
    sections = [
        races.race_section(
            race,
            race_number,
            processes=result.processes,
            is_counted=result.is_counted(race),
        )
        for race_number, race in enumerate(shown_races, start=1)
    ]
    counted_race_count = sum(map(result.is_counted, shown_races))
    nodes: list[Node] = [
        *_incomplete_notes(result),
        *call_sections(result.different_calls),
        *map(races.unverified_note, result.unverified),
        *sections[:counted_race_count],
    ]
    if library_sections := sections[counted_race_count:]:
        note = Note(
            "info",
            "The program cannot fix these races, so they do not change the exit code",
            remedies=("count races inside libraries, too: --internal",),
        )
        nodes.append(Section("Races inside libraries", (note, *library_sections), is_folded=True))
    if omitted_count := len(result.races) - len(shown_races):
        subject = "1 more race is" if omitted_count == 1 else f"{omitted_count:,} more races are"
        nodes.append(Note("info", f"{subject} not shown"))
    coverage_notes = tuple(notes(result))
    return Document(
        title(result), (*nodes, Section("Coverage", coverage_notes)) if nodes else coverage_notes
    )


def brief_sentences(result: SanitizeResult) -> tuple[str | Note, ...]:
    """Return the verdict, the reasons why the recording is incomplete, the races and the notes."""
    found_nothing = is_empty(result) and not result.races
    verdict = nothing_recorded(result) if found_nothing else title(result)
    notes_on_races = map(races.race_note, filter(result.is_counted, result.races))
    return (
        capitalized(verdict),
        *_incomplete_notes(result),
        *map(calls_note, result.different_calls),
        *map(races.unverified_note, result.unverified),
        *notes_on_races,
        *recorder_notes(result),
    )


def _incomplete_notes(result: SanitizeResult) -> Iterator[Note]:
    for reason in result.incomplete:
        yield Note("error", capitalized(reason))


def title(result: SanitizeResult) -> str:
    """Return the verdict: ``2 races between streams, found 1,204 times``."""
    verdict = ", ".join(_verdict(result))
    # The only other reason is that work of a real GPU was required (--require-gpu), but not recorded.
    lacks_gpu = len(reasons_for_missing_events(result.incomplete)) < len(result.incomplete)
    if lacks_gpu and not is_empty(result):
        verdict = f"failed, because no work of a real GPU was recorded: {verdict}"
    return capitalized(verdict)


def _verdict(result: SanitizeResult) -> Iterator[str]:
    counted_races = [race for race in result.races if result.is_counted(race)]
    race_count, occurrence_count = len(counted_races), sum(race.count for race in counted_races)
    has_race_elsewhere = any(
        race.kind is RaceKind.HOST or race.current.stream_number == race.previous.stream_number
        for race in counted_races
    )
    if race_count:
        place_text = "" if has_race_elsewhere else " between streams"
        yield f"{race_count:,} race{'s' if race_count > 1 else ''}{place_text}"
    elif is_empty(result):
        yield NOTHING_RECORDED
    else:
        exceptions = []
        if any(suppression.races for suppression in result.suppressed):
            exceptions.append("suppressed races")
        if result.baseline and result.baseline.races:
            exceptions.append("races of the baseline")
        yield f"no races found{' except ' if exceptions else ''}{' and '.join(exceptions)}"
    if different_call_count := len(result.different_calls):
        plural = "s" if different_call_count > 1 else ""
        yield f"{different_call_count:,} collective{plural} called differently by ranks"
    if unverified_count := len(result.unverified):
        plural = "s" if unverified_count > 1 else ""
        yield f"{unverified_count:,} pair{plural} of operations not checked (needs --accesses exact)"
    if occurrence_count > race_count:
        yield f"found {format_count(occurrence_count)} times"
    if library_race_count := len(result.races) - race_count:
        is_one = library_race_count == 1
        yield (
            "1 race inside a library"
            if is_one
            else f"{library_race_count:,} races inside libraries"
        )
    if reasons_for_missing_events(result.incomplete):
        yield "result incomplete"
    if result.simulated:
        yield "on a simulated device"
    if result.stopped:
        yield "stopped at the first race"


# --- Notes on how much of the program was recorded, and how much of the recording was analyzed -----

_MAX_LISTED_GAPS = 8

_WHOLE_TENSOR_TEXT = (
    "exact except stores through tensor maps, which count as writes of the whole tensor"
)
NOTHING_RECORDED = "no GPU work was recorded, so nothing was checked"


def notes(result: SanitizeResult) -> Iterator[Note]:
    """Yield notes on the recorded work, then on all that was not recorded, analyzed or shown."""
    yield from _recorded_notes(result)
    yield from recorder_notes(result)
    coverage = result.coverage
    if coverage.launches_unknown:
        launches_text = _count_with_noun("kernel launch", coverage.launches_unknown)
        yield Note("warn", f"The arguments of {launches_text} were not recorded")
    if launch_count := coverage.launches_without_call_site:
        launches_text = _count_with_noun("kernel launch", coverage.launches)
        verb = "has" if launch_count == 1 else "have"
        yield Note(
            "info", f"{format_count(launch_count)} of {launches_text} {verb} no Python call stack"
        )
    if result.gaps:
        yield Note("warn", f"Not analyzed, so that races may be missing: {_gap_text(result.gaps)}")
    for suppression in result.suppressed:
        if suppression.races:
            races_text = _count_with_noun("race", suppression.races)
            source = f"{suppression.pattern} ({suppression.origin})"
            occurrences_text = _occurrences(suppression.count)
            yield Note("info", f"{races_text} suppressed by {source}, found {occurrences_text}")
    if result.baseline:
        yield Note("info", _baseline_text(result.baseline))
    if suspected := coverage.suspected:
        is_one = suspected == 1
        yield Note(
            "info",
            f"{_count_with_noun('possible race', suspected)} {'is' if is_one else 'are'} not shown: "
            "the accesses of the kernels are not known exactly",
            remedies=(f"show {'it' if is_one else 'them'} with --show possible",),
        )
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
    work_counts = [
        _count_with_noun(name, count)
        for name, count in (
            ("kernel launch", coverage.launches),
            ("copy", coverage.copies),
            ("memset", coverage.fills),
            ("graph launch", coverage.graph_launches),
            ("collective", coverage.collectives),
        )
        if count
    ]
    if coverage.collectives and coverage.graph_launches:
        work_counts[-1] += " (a collective in a graph counts once)"
    process_count = len(result.processes)
    processes_text = f" in {process_count:,} processes" if process_count > 1 else ""
    pair_count = len(result.unverified)
    if gap_count:
        analyzed_text = f"{_count_with_noun('operation', gap_count)} not analyzed"
    elif pair_count:
        pairs_text = "one" if pair_count == 1 else f"{pair_count:,}"
        analyzed_text = f"all pairs of operations checked, except the {pairs_text} above"
    else:
        analyzed_text = "all operations analyzed"
    yield Note(
        "info", f"Recorded {_join_words(work_counts) or 'no work'}{processes_text}; {analyzed_text}"
    )
    yield from _access_notes(coverage)


def _access_notes(coverage: Coverage) -> Iterator[Note]:
    """Yield notes on the precision of kernel accesses, and on the memory that recording used."""
    launch_count = coverage.launches_exact + coverage.launches_assumed + coverage.launches_unknown
    if not launch_count:
        return
    graph_node_text = " (including graph nodes)" if launch_count > coverage.launches else ""
    reused_count = coverage.launches_from_template
    exact_text = "exact (recorded, or taken from an earlier launch)" if reused_count else "exact"
    access_counts_text = ", ".join(
        f"{format_count(launch_count)} {precision_text}"
        for precision_text, launch_count in (
            (exact_text, coverage.launches_exact - coverage.launches_whole_tensor),
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
    if reused_count:
        graph_text = " (a graph launch counts once)" if coverage.graph_launches else ""
        yield Note(
            "info",
            f"Of these, the accesses of {_count_with_noun('launch', reused_count)}{graph_text} are taken "
            "from an earlier launch of the same kernel, and those of "
            f"{format_count(coverage.template_checks)} were recorded and compared with an earlier launch: "
            f"{_count_with_noun('difference', coverage.template_differences)}",
        )
    if coverage.arenas_bytes:
        memory_text = format_bytes(coverage.arenas_bytes)
        yield Note("info", f"Recording used up to {memory_text} of device memory")


def _gap_text(gap_counts: Mapping[str, int]) -> str:
    """Return all operations that were not analyzed, the first kinds by name."""
    gaps = list(gap_counts.items())
    gap_texts = [
        f"{gap_text} ({_count_with_noun('operation', gap_count)})"
        for gap_text, gap_count in gaps[:_MAX_LISTED_GAPS]
    ]
    if other_gaps := gaps[_MAX_LISTED_GAPS:]:
        operations_text = _count_with_noun("operation", sum(count for _, count in other_gaps))
        gap_texts.append(f"{_count_with_noun('other kind', len(other_gaps))} ({operations_text})")
    return _join_words(gap_texts)


def _baseline_text(use: BaselineUse) -> str:
    if not use.races:
        if not use.absent:
            return f"The baseline {use.path} has no races"
        if use.absent == 1:
            return f"The race of the baseline {use.path} did not occur"
        return f"None of the {use.absent:,} races of the baseline {use.path} occurred"
    races_text = _count_with_noun("race", len(use.races))
    text = f"Not reported: {races_text} of the baseline {use.path}"
    if use.count:
        text += f", found {_occurrences(use.count)}"
    if use.absent:
        text += f"; {_count_with_noun('other race', use.absent)} of the baseline did not occur"
    return text


def _join_words(phrases: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(phrases[:-1]), *phrases[-1:])))


def _count_with_noun(noun: str, noun_count: int) -> str:
    if noun_count != 1:
        noun = "copies" if noun == "copy" else f"{noun}{'es' if noun.endswith('launch') else 's'}"
    return f"{format_count(noun_count)} {noun}"


def _occurrences(occurrence_count: int) -> str:
    return "once" if occurrence_count == 1 else f"{format_count(occurrence_count)} times"


# --- Present the collectives that ranks call differently -------------------------------------------

MEANINGS: Final = {
    DifferenceKind.FUNCTION: "Ranks of a communicator call different collectives, or in different order.",
    DifferenceKind.COUNT: "Ranks of a communicator call a collective with different numbers of elements.",
    DifferenceKind.DATATYPE: "Ranks of a communicator call a collective with different types of elements.",
    DifferenceKind.ROOT: "Ranks of a communicator call a collective with different roots.",
    DifferenceKind.TRANSFER: "A rank receives another number of bytes than the other rank sends.",
}


_HEADINGS: Final = {
    DifferenceKind.FUNCTION: "Ranks call different collectives",
    DifferenceKind.COUNT: "Ranks pass different numbers of elements",
    DifferenceKind.DATATYPE: "Ranks pass different types of elements",
    DifferenceKind.ROOT: "Ranks pass different roots",
    DifferenceKind.TRANSFER: "A send and its receive have different sizes",
}


def call_sections(differences: Sequence[DifferentCalls]) -> Iterator[Section]:
    """Yield one section for each pair of calls that differ."""
    for difference in differences:
        facts = Facts(
            tuple(
                (f"rank {call.rank}", fact_value)
                for call in (difference.first, difference.second)
                for fact_value in (Text(f"{call.operation}, process {call.process}"), _stack(call))
            )
        )
        yield Section(_HEADINGS[difference.kind], (calls_note(difference), facts))


def calls_note(difference: DifferentCalls) -> Note:
    """Return the sentence of two calls that differ, and the finding for structured formats."""
    calls = (difference.first, difference.second)
    locations = tuple((f"rank {call.rank}: {call.operation}", _stack(call)) for call in calls)
    finding = Finding(
        f"different-{difference.kind.value}", MEANINGS[difference.kind], locations, count=1
    )
    return Note("error", capitalized(difference.sentence), (difference.hint,), finding)


def _stack(call: CollectiveCall) -> Stack:
    return Stack(call.stack, call.site)
