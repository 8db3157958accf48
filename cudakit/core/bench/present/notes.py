"""Notes: errors, refusals and warnings of a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cudakit.core.bench.compare import label
from cudakit.core.bench.present.labels import brief_label, first_few
from cudakit.core.bench.result import BenchResult, CaseResult
from cudakit.core.bench.stats import Summary
from cudakit.document import Note
from cudakit.units import Unavailable, format_ratio

# Measurement and limit are not exact enough for a smaller excess to be meaningful.
_ABOVE_LIMIT = 1.02


def notes(result: BenchResult) -> list[Note]:
    """Return errors, then warnings, or that all values were correct."""
    found = [*_wrong(result.results), *_refused(result.results), *_doubts(result)]
    if not any(note.level in ("warn", "error") for note in found) and result.results:
        checked = sum(case.verified for case in result.results)
        if checked:
            found.append(Note("ok", f"{_cases(checked)} computed the right values."))
    if result.simulated:
        found.insert(0, Note("info", "Simulated: nothing here is a measurement of a GPU."))
    return found


def _wrong(cases: Sequence[CaseResult]) -> Iterator[Note]:
    for case in cases:
        if isinstance(case.median_s, Unavailable) and not case.refused:
            sentence = f"{label(case)}: {case.median_s.reason}. Its figures are withheld."
            yield Note("error", sentence)


def _refused(cases: Sequence[CaseResult]) -> Iterator[Note]:
    reasons: dict[str, list[CaseResult]] = {}
    for case in cases:
        if case.refused and isinstance(case.median_s, Unavailable):
            reasons.setdefault(case.median_s.reason, []).append(case)
    for reason, refused in reasons.items():
        names = first_few([brief_label(case, cases) for case in refused], separator=", ")
        yield Note("info", f"Not measured: {names}: {reason}.")


def _doubts(result: BenchResult) -> Iterator[Note]:
    if not result.complete:
        yield Note("warn", f"Interrupted after {_cases(len(result.results))}.")
    yield from (
        Note("warn", f"{sentence[0].upper()}{sentence[1:]}.") for sentence in result.warnings
    )
    known = [case for case in result.results if isinstance(case.statistics, Summary)]
    for doubtful, says, remedies in _DOUBTS:
        cases = [case for case in known if doubtful(case)]
        if cases:
            yield Note("warn", f"{first_few(list(map(label, cases)))}: {says}.", remedies)


def _cases(count: int) -> str:
    return "1 case" if count == 1 else f"{count} cases"


def _statistics(case: CaseResult, name: str) -> bool:
    return isinstance(case.statistics, Summary) and bool(getattr(case.statistics, name))


def _is_above_limit(case: CaseResult) -> bool:
    ratio = case.ratio_to_limit
    return not isinstance(ratio, Unavailable) and ratio > _ABOVE_LIMIT


_DOUBTS: tuple[tuple[Callable[[CaseResult], bool], str, tuple[str, ...]], ...] = (
    (
        lambda case: not case.converged,
        "the time ran out before the median was known well enough",
        ("allow more time with --timeout, or a wider interval with --precision",),
    ),
    (
        lambda case: _statistics(case, "trend"),
        "times drift from the first third of the samples to the last, as with a clock that settles",
        ("warm up longer with --warmup",),
    ),
    (
        lambda case: _statistics(case, "bimodal"),
        "times fall into two groups, and the median is of the larger",
        ("look at the samples in the HTML page: -o bench.html",),
    ),
    (
        _is_above_limit,
        f"faster than the limit by more than {format_ratio(_ABOVE_LIMIT - 1)}: the data stayed in a "
        "cache, or the limit is not of this device",
        ("measure with --cache rotate",),
    ),
)
