"""The notes below a table of cases: errors, cases that were not run, warnings, number of verified results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from cudakit.bench.labels import MEASUREMENT_AXIS, count_cases, describe_subset
from cudakit.bench.result import BenchResult, CaseResult
from cudakit.bench.stats import Summary
from cudakit.report.document import Note
from cudakit.units import Unavailable, capitalized, format_ratio

SIMULATED_NOTE = "Simulated: all values are computed on the CPU, not measured on a GPU."
# Largest plausible share of the peak. A share between 1 and this value is an error of the measurement or of
# the datasheet.
_MAX_SHARE = 1.02
# The bench that has no options for its method.
_SUITE = "suite"


def notes(result: BenchResult) -> list[Note]:
    """Return the notes of a result, each once, with the labels of the cases that it concerns."""
    cases = _table_rows(result)
    heading_notes = [Note("info", SIMULATED_NOTE)] if result.simulated else []
    return [
        *heading_notes,
        *_error_notes(cases),
        *_not_run_notes(cases),
        *_missing_figure_notes(cases),
        *_warning_notes(result, cases),
        *_verified_notes(cases),
    ]


def _table_rows(result: BenchResult) -> Sequence[CaseResult]:
    """Return a case per row of the table: the measurements of an overlap share a row."""
    if not result.overlaps:
        return result.results
    cases_by_row: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in result.results:
        row_axes = {name: value for name, value in case.axes.items() if name != MEASUREMENT_AXIS}
        cases_by_row.setdefault(tuple(row_axes.values()), []).append(replace(case, axes=row_axes))
    return [_merge_measurements(cases) for cases in cases_by_row.values()]


def _merge_measurements(cases: Sequence[CaseResult]) -> CaseResult:
    """Return one case with the defects of all measurements of an overlap."""
    doubtful_first = sorted(cases, key=lambda case: case.converged)
    withheld_cases = [case for case in cases if isinstance(case.median_s, Unavailable)]
    case = (withheld_cases or doubtful_first)[0]
    if isinstance(case.statistics, Summary):
        case = replace(
            case,
            statistics=replace(
                case.statistics,
                trend=any(_has_flag(measurement, "trend") for measurement in cases),
                bimodal=any(_has_flag(measurement, "bimodal") for measurement in cases),
            ),
        )
    return replace(case, verified=all(measurement.verified for measurement in cases))


def _error_notes(cases: Sequence[CaseResult]) -> Iterator[Note]:
    for case in cases:
        if isinstance(case.median_s, Unavailable) and not case.is_unsupported:
            label = describe_subset([case], cases)
            yield Note("error", f"{label}: {case.median_s.reason}. No time is reported.")


def _not_run_notes(cases: Sequence[CaseResult]) -> Iterator[Note]:
    cases_by_reason: dict[str, list[CaseResult]] = {}
    for case in cases:
        if case.is_unsupported and isinstance(case.median_s, Unavailable):
            cases_by_reason.setdefault(case.median_s.reason, []).append(case)
    for reason, cases_not_run in cases_by_reason.items():
        yield Note("info", f"Not run: {describe_subset(cases_not_run, cases)}: {reason}.")


def _missing_figure_notes(cases: Sequence[CaseResult]) -> Iterator[Note]:
    """Yield the reason for each figure that a measured case should have but does not have."""
    timed_cases = [case for case in cases if not isinstance(case.median_s, Unavailable)]
    has_energy = any(not isinstance(case.energy_j, Unavailable) for case in timed_cases)
    cases_by_reason: dict[tuple[str, str], list[CaseResult]] = {}
    for case in timed_cases:
        if case.amount and isinstance(case.ratio_to_limit, Unavailable):
            cases_by_reason.setdefault(("% of peak", case.ratio_to_limit.reason), []).append(case)
        if has_energy and case.operations and isinstance(case.energy_j, Unavailable):
            cases_by_reason.setdefault(("energy", case.energy_j.reason), []).append(case)
    for (figure, reason), affected_cases in cases_by_reason.items():
        affects_all_cases = len(affected_cases) == len(cases) > 1
        subset_text = "any case" if affects_all_cases else describe_subset(affected_cases, cases)
        yield Note("info", f"No {figure} for {subset_text}: {reason}.")


def _warning_notes(result: BenchResult, cases: Sequence[CaseResult]) -> Iterator[Note]:
    if not result.complete and not result.failure:
        yield Note("warn", f"Interrupted after {count_cases(len(cases))}.")
    if result.failure:
        yield Note("error", f"Ended after {count_cases(len(cases))}: {result.failure}.")
    for sentence in result.warnings:
        yield Note("warn", f"{capitalized(sentence)}.")
    summarized_cases = [case for case in cases if isinstance(case.statistics, Summary)]
    for doubt in _DOUBTS:
        if doubtful_cases := [case for case in summarized_cases if doubt.is_present(case)]:
            subset_text = describe_subset(doubtful_cases, cases)
            yield Note("warn", f"{doubt.text}: {subset_text}.", doubt.remedies(result.bench))


def _verified_notes(cases: Sequence[CaseResult]) -> Iterator[Note]:
    """Report how many cases were verified, not run, and without results; the sum is the number of cases."""
    verified_count = sum(case.verified for case in cases)
    wrong_count = sum(
        isinstance(case.median_s, Unavailable) and not case.is_unsupported for case in cases
    )
    if wrong_count or not verified_count:
        return
    if verified_count == len(cases):
        verified_text = {1: "the case", 2: "both cases"}.get(
            verified_count, f"all {verified_count} cases"
        )
        yield Note("ok", f"Results verified for {verified_text}.")
        return
    not_run_count = sum(case.is_unsupported for case in cases)
    unverified_count = len(cases) - verified_count - not_run_count
    other_count_texts = [f"{not_run_count} not run"] * bool(not_run_count) + [
        f"{unverified_count} without results to verify"
    ] * bool(unverified_count)
    yield Note(
        "ok",
        f"Results verified for {verified_count} of {len(cases)} cases ({', '.join(other_count_texts)}).",
    )


def _has_flag(case: CaseResult, flag: str) -> bool:
    return isinstance(case.statistics, Summary) and bool(getattr(case.statistics, flag))


def _is_above_peak(case: CaseResult) -> bool:
    share_of_peak = case.ratio_to_limit
    return not isinstance(share_of_peak, Unavailable) and share_of_peak > _MAX_SHARE


def _is_link_bound(case: CaseResult) -> bool:
    return not isinstance(case.limit, Unavailable) and case.limit.bound == "link"


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A reason to doubt the figures of a case, and the remedies by bench."""

    is_present: Callable[[CaseResult], bool]  # Whether the reason applies to a case.
    text: str  # The reason, as a sentence without a period.
    remedy: str = ""  # Advice to the user; empty if there is none.
    # Names of the benches with the options of ``remedy``; None: all benches.
    benches_with_remedy: Collection[str] | None = None
    suite_remedy: str = ""  # Advice for bench suite; empty if there is none.

    def remedies(self, bench: str) -> tuple[str, ...]:
        """Return the advice that a user of a bench can follow."""
        if bench == _SUITE:
            return (self.suite_remedy,) if self.suite_remedy else ()
        has_options = self.benches_with_remedy is None or bench in self.benches_with_remedy
        return (self.remedy,) if self.remedy and has_options else ()


def _lacks_precision(case: CaseResult, limits: Collection[str]) -> bool:
    """Return whether one of the limits ended sampling before the precision was reached."""
    was_ended = not case.converged and case.stop_reason in limits
    return (
        was_ended
        and isinstance(case.statistics, Summary)
        and (case.statistics.noise >= case.method.rule.precision)
    )


def _lacks_samples(case: CaseResult, limits: Collection[str]) -> bool:
    """Return whether one of the limits ended sampling with the precision, but with too few samples."""
    was_ended = not case.converged and case.stop_reason in limits
    has_few_samples = len(case.samples_s) < case.method.rule.min_samples
    return was_ended and has_few_samples and not _lacks_precision(case, limits)


# Reasons why sampling ended, in results of this version and of older ones.
_TIME_LIMIT, _BUDGET = ("timeout", ""), ("budget",)
_SEE_SAMPLES = "see the samples in the HTML report: -o bench.html"
_WITHOUT_QUICK = "measure without --quick"
_DOUBTS = (
    _Doubt(
        lambda case: _lacks_precision(case, _TIME_LIMIT),
        "The time limit ended sampling before the precision was reached",
        "allow more time with --timeout, or a wider interval with --precision",
    ),
    _Doubt(
        lambda case: _lacks_samples(case, _TIME_LIMIT),
        "The time limit ended sampling before the minimum number of samples was reached",
        "allow more time with --timeout, or fewer samples with --samples",
    ),
    _Doubt(
        lambda case: _lacks_precision(case, _BUDGET),
        "The time budget ended sampling before the precision was reached",
        "allow more time with --budget, or a wider interval with --precision",
        suite_remedy=_WITHOUT_QUICK,
    ),
    _Doubt(
        lambda case: _lacks_samples(case, _BUDGET),
        "The time budget ended sampling before the minimum number of samples was reached",
        "allow more time with --budget, or fewer samples with --samples",
        suite_remedy=_WITHOUT_QUICK,
    ),
    _Doubt(
        lambda case: _has_flag(case, "trend"),
        "Times drift between the first and the last third of the samples",
        "warm up longer with --warmup",
    ),
    _Doubt(
        lambda case: _has_flag(case, "bimodal"),
        "Times form two groups, so the median may jump between runs",
        _SEE_SAMPLES,
        suite_remedy=_SEE_SAMPLES,
    ),
    _Doubt(
        lambda case: _is_above_peak(case) and _is_link_bound(case) and case.environment.simulated,
        "Faster than the peak of the link, because the rate of a simulated link does not depend on the "
        "GPU model",
    ),
    _Doubt(
        lambda case: (
            _is_above_peak(case) and _is_link_bound(case) and not case.environment.simulated
        ),
        "Faster than the peak of the link: the peak is wrong",
    ),
    _Doubt(
        lambda case: _is_above_peak(case) and not _is_link_bound(case),
        f"More than {format_ratio(_MAX_SHARE - 1)} above the peak: data came from a cache, or the peak is "
        "wrong",
        "measure with --cache rotate",
        benches_with_remedy=("memory", "copy", "gemm", "nccl", "ops"),
    ),
)
