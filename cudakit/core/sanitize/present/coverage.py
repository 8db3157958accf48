"""Notes on how much of the program was recorded, and what the verdict leaves out."""

from __future__ import annotations

from collections.abc import Iterator

from cudakit.core.sanitize.races import Coverage
from cudakit.core.sanitize.result import SanitizeResult
from cudakit.document import Note
from cudakit.units import format_bytes, format_count

_MOST_GAPS = 8


def notes(result: SanitizeResult) -> Iterator[Note]:
    """Yield the notes on what was recorded, and then on what was not."""
    yield _seen(result)
    yield from _exactness(result.coverage)
    for text in result.notes:
        yield Note("warn", text)
    yield from _unknown_launches(result)
    yield from _gaps(result)
    yield from _suppressed(result)
    if result.coverage.suspected:
        yield _suspected(result.coverage.suspected)
    if result.simulated:
        yield Note("info", "simulated: no GPU took part")


def _seen(result: SanitizeResult) -> Note:
    seen, gaps = result.coverage, sum(result.gaps.values())
    if not any((seen.launches, seen.copies, seen.fills, seen.graph_launches, gaps)):
        return Note("info", "nothing was enqueued on a GPU: there was nothing to look at")
    done = _listed(
        ("launch", seen.launches),
        ("copy", seen.copies),
        ("fill", seen.fills),
        ("graph launch", seen.graph_launches),
    )
    known = [
        f"{format_count(count)} {how}"
        for how, count in (
            ("exact", seen.accesses_exact),
            ("in pieces that were joined", seen.accesses_summary),
            ("assumed from arguments", seen.accesses_assumed),
            ("uncertain, in tables among arguments", seen.accesses_uncertain),
        )
        if count
    ]
    understood = f"{_counted('event', gaps)} not understood" if gaps else "every event understood"
    accesses = f"; accesses: {', '.join(known)}" if known else ""
    return Note("info", f"seen: {', '.join(done)}{_across(result)}{accesses}; {understood}")


def _exactness(seen: Coverage) -> Iterator[Note]:
    """Yield a note on how many launches are known exactly, and the memory that recording took."""
    kernels = seen.launches_exact + seen.launches_assumed + seen.launches_unknown
    if not kernels:
        return
    nodes = ", those of graphs included" if kernels > seen.launches else ""
    held = (
        f"; recording held {format_bytes(seen.arenas_bytes)} of the devices' memory at most"
        if seen.arenas_bytes
        else ""
    )
    exact = format_count(seen.launches_exact)
    yield Note("info", f"launches: {format_count(kernels)}{nodes}, of which {exact} exact{held}")


def _across(result: SanitizeResult) -> str:
    number = len(result.processes)
    return f" in {number:,} processes" if number > 1 else ""


def _unknown_launches(result: SanitizeResult) -> Iterator[Note]:
    unknown = result.coverage.launches_unknown
    if unknown:
        did = "its arguments were" if unknown == 1 else "their arguments were"
        yield Note("warn", f"of {_counted('launch', unknown)} nothing is known: {did} not seen")


def _gaps(result: SanitizeResult) -> Iterator[Note]:
    gaps = list(result.gaps.items())
    for what, count in gaps[:_MOST_GAPS]:
        yield Note("warn", f"not understood: {what} ({_times(count)})")
    if len(gaps) > _MOST_GAPS:
        rest = sum(count for _, count in gaps[_MOST_GAPS:])
        yield Note(
            "warn", f"not understood: {len(gaps) - _MOST_GAPS:,} more kinds ({_times(rest)})"
        )


def _suppressed(result: SanitizeResult) -> Iterator[Note]:
    for hidden in result.suppressed:
        if hidden.races:
            races = _counted("race", hidden.races)
            yield Note(
                "info",
                f"{races} suppressed, found {_times(hidden.count)}: {hidden.pattern} ({hidden.origin})",
            )


def _suspected(number: int) -> Note:
    verb = "is" if number == 1 else "are"
    return Note(
        "info",
        f"{_counted('conflict', number)} that {verb} only possible {verb} not shown: "
        "what the kernels touch is not known well enough",
        remedies=("--show possible shows them",),
    )


def _listed(*amounts: tuple[str, int]) -> list[str]:
    return [_counted(what, number) for what, number in amounts if number]


def _counted(what: str, number: int) -> str:
    plural = {"launch": "launches", "copy": "copies", "graph launch": "graph launches"}
    name = what if number == 1 else plural.get(what, f"{what}s")
    return f"{format_count(number)} {name}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{format_count(number)} times"
