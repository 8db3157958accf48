"""Notes on how much of the program was recorded, and how much of the recording was analyzed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cudakit.core.sanitize.races import Coverage
from cudakit.core.sanitize.result import SanitizeResult
from cudakit.document import Note
from cudakit.units import capitalized, format_bytes, format_count

_MOST_GAPS = 8

NOTHING_RECORDED = "no GPU work was recorded, so nothing was checked"


def notes(result: SanitizeResult) -> Iterator[Note]:
    """Yield the counts of recorded work, then everything that was not recorded, analyzed or shown."""
    yield from _recorded(result)
    yield from recorder_notes(result)
    yield from _unknown_launches(result.coverage.launches_unknown)
    yield from _without_call_site(result.coverage)
    yield from _gaps(result)
    yield from _suppressed(result)
    if result.coverage.suspected:
        yield _hidden(result.coverage.suspected)
    if result.simulated:
        yield Note("info", "Simulated device: no GPU was used")


def recorder_notes(result: SanitizeResult) -> Iterator[Note]:
    """Yield what the recorder did not record, or recorded less exactly."""
    for reason in result.notes:
        yield Note("warn", capitalized(reason))


def is_empty(result: SanitizeResult) -> bool:
    """Return whether no GPU work was recorded at all."""
    return not (result.coverage.has_work or result.gaps)


def nothing_recorded(result: SanitizeResult) -> str:
    """Return the verdict on a run without GPU work, with the reason if it is known."""
    reason = f" ({result.no_gpu_work})" if result.no_gpu_work else ""
    return f"{NOTHING_RECORDED}{reason}"


def _recorded(result: SanitizeResult) -> Iterator[Note]:
    if is_empty(result):
        if result.no_gpu_work:
            yield Note("warn", capitalized(result.no_gpu_work))
        return
    seen, gaps = result.coverage, sum(result.gaps.values())
    work = _nonzero(
        ("kernel launch", seen.launches),
        ("copy", seen.copies),
        ("fill", seen.fills),
        ("graph launch", seen.graph_launches),
    )
    number = len(result.processes)
    across = f" in {number:,} processes" if number > 1 else ""
    analyzed = f"{_counted('event', gaps)} not analyzed" if gaps else "all events analyzed"
    yield Note("info", f"Recorded {_merged(work) or 'no work'}{across}; {analyzed}")
    # If all are exact, the number of launches with exact accesses says so.
    if (accesses := _accesses(seen)) and seen.accesses_exact < _counted_accesses(seen):
        yield Note("info", f"Accesses of kernels: {', '.join(accesses)}")
    yield from _exactness(seen)


def _accesses(seen: Coverage) -> list[str]:
    return [
        f"{format_count(count)} {precision}"
        for precision, count in (
            ("exact", seen.accesses_exact),
            ("to whole tensors", seen.accesses_summary),
            ("in merged ranges", seen.accesses_merged),
            ("assumed from pointer arguments", seen.accesses_assumed),
            ("assumed from pointer tables, which may be stale", seen.accesses_uncertain),
        )
        if count
    ]


def _counted_accesses(seen: Coverage) -> int:
    known = seen.accesses_exact + seen.accesses_summary + seen.accesses_merged
    return known + seen.accesses_assumed + seen.accesses_uncertain


def _exactness(seen: Coverage) -> Iterator[Note]:
    """Yield the number of launches with exact accesses, and the device memory that recording used."""
    kernels = seen.launches_exact + seen.launches_assumed + seen.launches_unknown
    if not kernels:
        return
    nodes = " (including graph nodes)" if kernels > seen.launches else ""
    memory = (
        f"; recording used up to {format_bytes(seen.arenas_bytes)} of device memory"
        if seen.arenas_bytes
        else ""
    )
    exact, launches = format_count(seen.launches_exact), _counted("kernel launch", kernels)
    have = "has" if kernels == 1 else "have"
    yield Note("info", f"{exact} of {launches}{nodes} {have} exact accesses{memory}")
    if seen.launches_whole_tensor:
        stores = format_count(seen.launches_whole_tensor)
        yield Note(
            "info", f"{stores} of these store to a part of a tensor that is not known exactly"
        )


def _unknown_launches(unknown: int) -> Iterator[Note]:
    if unknown:
        launches = _counted("kernel launch", unknown)
        yield Note("warn", f"Accesses of {launches} are unknown: the arguments were not recorded")


def _without_call_site(seen: Coverage) -> Iterator[Note]:
    if missing := seen.launches_without_call_site:
        launches = _counted("kernel launch", seen.launches)
        have = "has" if missing == 1 else "have"
        yield Note("info", f"{format_count(missing)} of {launches} {have} no Python call stack")


def _gaps(result: SanitizeResult) -> Iterator[Note]:
    gaps = list(result.gaps.items())
    for event, count in gaps[:_MOST_GAPS]:
        yield Note("warn", f"Not analyzed: {event} ({_times(count)})")
    if rest := gaps[_MOST_GAPS:]:
        times = _times(sum(count for _, count in rest))
        yield Note("warn", f"Not analyzed: {_counted('other kind', len(rest))} of events ({times})")


def _suppressed(result: SanitizeResult) -> Iterator[Note]:
    for hidden in result.suppressed:
        if hidden.races:
            races = _counted("race", hidden.races)
            times = f", found {_times(hidden.count)}"
            yield Note("info", f"{races} suppressed by {hidden.pattern} ({hidden.origin}){times}")


def _hidden(number: int) -> Note:
    conflicts = _counted("possible conflict", number)
    verb = "is" if number == 1 else "are"
    return Note(
        "info",
        f"{conflicts} {verb} not shown: the accesses of the kernels are not known exactly",
        remedies=(
            "show them with --show possible" if number > 1 else "show it with --show possible",
        ),
    )


def _nonzero(*amounts: tuple[str, int]) -> list[str]:
    return [_counted(name, number) for name, number in amounts if number]


def _merged(items: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))


def _counted(name: str, number: int) -> str:
    plural = {
        "copy": "copies",
        "kernel launch": "kernel launches",
        "graph launch": "graph launches",
    }
    return f"{format_count(number)} {name if number == 1 else plural.get(name, f'{name}s')}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{format_count(number)} times"
