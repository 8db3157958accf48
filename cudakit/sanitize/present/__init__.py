"""Present a SanitizeResult as a Document: verdict, races, coverage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cudakit.report.document import Document, Node, Note, Section
from cudakit.sanitize.present import coverage, races
from cudakit.sanitize.present.different_calls import call_sections, calls_note
from cudakit.sanitize.races import RaceKind
from cudakit.sanitize.result import SanitizeResult
from cudakit.trace.run_log import reasons_for_missing_events
from cudakit.units import capitalized, format_count


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
        nodes.append(_library_section(library_sections))
    omitted_count = len(result.races) - len(shown_races)
    if omitted_count:
        omitted_races_text = (
            "1 more race is" if omitted_count == 1 else f"{omitted_count:,} more races are"
        )
        nodes.append(Note("info", f"{omitted_races_text} not shown"))
    notes = tuple(coverage.notes(result))
    return Document(title(result), (*nodes, Section("Coverage", notes)) if nodes else notes)


def _library_section(sections: Sequence[Section]) -> Section:
    """Return a folded section with races of libraries that do not count."""
    note = Note(
        "info",
        "The program cannot fix these races, so they do not change the exit code",
        remedies=("count races inside libraries, too: --internal",),
    )
    return Section("Races inside libraries", (note, *sections), is_folded=True)


def brief_sentences(result: SanitizeResult) -> tuple[str | Note, ...]:
    """Return the verdict, the reasons why the recording is incomplete, the races and the notes."""
    is_empty = coverage.is_empty(result) and not result.races
    verdict = coverage.nothing_recorded(result) if is_empty else title(result)
    notes_on_races = map(races.race_note, filter(result.is_counted, result.races))
    return (
        capitalized(verdict),
        *_incomplete_notes(result),
        *map(calls_note, result.different_calls),
        *map(races.unverified_note, result.unverified),
        *notes_on_races,
        *coverage.recorder_notes(result),
    )


def _incomplete_notes(result: SanitizeResult) -> Iterator[Note]:
    for reason in result.incomplete:
        yield Note("error", capitalized(reason))


def title(result: SanitizeResult) -> str:
    """Return the verdict: ``2 races between streams, found 1,204 times``."""
    verdict = ", ".join(_verdict(result))
    if _lacks_required_gpu(result) and not coverage.is_empty(result):
        verdict = f"failed, because no work of a real GPU was recorded: {verdict}"
    return capitalized(verdict)


def _lacks_required_gpu(result: SanitizeResult) -> bool:
    """Return whether work of a real GPU was required (--require-gpu), but not recorded."""
    return len(reasons_for_missing_events(result.incomplete)) < len(result.incomplete)


def _no_races_text(result: SanitizeResult) -> str:
    """Return that no races were found, except those that are not reported."""
    exceptions = []
    if any(suppression.races for suppression in result.suppressed):
        exceptions.append("suppressed races")
    if result.baseline and result.baseline.races:
        exceptions.append("races of the baseline")
    return f"no races found{' except ' if exceptions else ''}{' and '.join(exceptions)}"


def _verdict(result: SanitizeResult) -> Iterator[str]:
    counted_races = [race for race in result.races if result.is_counted(race)]
    race_count, occurrence_count = len(counted_races), sum(race.count for race in counted_races)
    has_race_elsewhere = any(
        race.kind is RaceKind.HOST or race.current.stream_number == race.previous.stream_number
        for race in counted_races
    )
    place_text = "" if has_race_elsewhere else " between streams"
    if race_count:
        yield f"{race_count:,} race{'s' if race_count > 1 else ''}{place_text}"
    else:
        yield coverage.NOTHING_RECORDED if coverage.is_empty(result) else _no_races_text(result)
    if different_call_count := len(result.different_calls):
        plural = "s" if different_call_count > 1 else ""
        yield f"{different_call_count:,} collective{plural} called differently by ranks"
    if unverified_count := len(result.unverified):
        plural = "s" if unverified_count > 1 else ""
        yield f"{unverified_count:,} pair{plural} of operations not checked (needs --accesses exact)"
    if occurrence_count > race_count:
        yield f"found {format_count(occurrence_count)} times"
    if library_race_count := len(result.races) - race_count:
        one_race_text, several_races_text = (
            "1 race inside a library",
            f"{library_race_count:,} races inside libraries",
        )
        yield one_race_text if library_race_count == 1 else several_races_text
    if reasons_for_missing_events(result.incomplete):
        yield "result incomplete"
    if result.simulated:
        yield "on a simulated device"
    if result.stopped:
        yield "stopped at the first race"
