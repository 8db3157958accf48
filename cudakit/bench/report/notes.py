"""Below the table of cases: errors, warnings, and the method, versions and GPU state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from typing import NamedTuple

from cudakit.bench.benchmarks import BENCHMARKS, spec_class, words_of_bench
from cudakit.bench.case import Method
from cudakit.bench.labels import (
    CUDAKIT,
    MEASUREMENT_AXIS,
    axis_names,
    called_library,
    count_cases,
    describe_subset,
    format_axis,
    short_labels,
    varying_axes,
)
from cudakit.bench.report.table import text_range
from cudakit.bench.result import BenchResult, CaseResult
from cudakit.bench.stats import Summary
from cudakit.report.document import Facts, Note, Text, Value
from cudakit.units import Unavailable, capitalized, format_bytes, format_ratio, format_seconds

SIMULATED_NOTE = "Simulated: all values are computed on the CPU, not measured on a GPU."


def title(result: BenchResult) -> str:
    """Return the title of a report: bench and GPU, with the prefix "Simulated: " for a simulated device."""
    command = "copy --overlap gemm" if result.bench == "copy-overlap" else result.bench
    text = f"{'Simulated: ' if result.simulated else ''}bench {command}"
    gpu = result.results[0].environment.gpu if result.results else Unavailable("no case")
    return text if isinstance(gpu, Unavailable) else f"{text}, {gpu}"


def notes(result: BenchResult) -> list[Note]:
    """Return the notes of a result, each once, with the labels of the cases that it concerns."""
    cases = words_of_bench(result.bench).rows(result)
    return [
        *([Note("info", SIMULATED_NOTE)] if result.simulated else []),
        *_missing_notes(cases),
        *_warning_notes(result, cases),
        *_verified_notes(cases),
    ]


def _missing_notes(cases: Sequence[CaseResult]) -> Iterator[Note]:
    """Yield the reason for each time and figure that a case should have but does not have."""
    timed = [case for case in cases if not isinstance(case.median_s, Unavailable)]
    has_energy = any(not isinstance(case.energy_j, Unavailable) for case in timed)
    not_run: dict[str, list[CaseResult]] = {}
    without_figure: dict[tuple[str, str], list[CaseResult]] = {}
    for case in cases:
        time_s, share, energy_j = case.median_s, case.ratio_to_limit, case.energy_j
        if isinstance(time_s, Unavailable):
            if case.is_unsupported:
                not_run.setdefault(time_s.reason, []).append(case)
            else:
                label = describe_subset([case], cases)
                yield Note("error", f"{label}: {time_s.reason}. No time is reported.")
            continue
        if case.amount and isinstance(share, Unavailable):
            without_figure.setdefault(("% of peak", share.reason), []).append(case)
        if has_energy and case.operations and isinstance(energy_j, Unavailable):
            without_figure.setdefault(("energy", energy_j.reason), []).append(case)
    for reason, affected in not_run.items():
        yield Note("info", f"Not run: {describe_subset(affected, cases)}: {reason}.")
    for (figure, reason), affected in without_figure.items():
        affects_all = len(affected) == len(cases) > 1
        subset = "any case" if affects_all else describe_subset(affected, cases)
        yield Note("info", f"No {figure} for {subset}: {reason}.")


def _warning_notes(result: BenchResult, cases: Sequence[CaseResult]) -> Iterator[Note]:
    if result.failure:
        yield Note("error", f"Ended after {count_cases(len(cases))}: {result.failure}.")
    elif not result.complete:
        yield Note("warn", f"Interrupted after {count_cases(len(cases))}.")
    for sentence in result.warnings:
        yield Note("warn", f"{capitalized(sentence)}.")
    for doubt in _DOUBTS:
        doubtful = [
            case
            for case in cases
            if isinstance(case.statistics, Summary) and doubt.applies(case, case.statistics)
        ]
        if doubtful:
            subset = describe_subset(doubtful, cases)
            remedy = doubt.suite_remedy if result.bench == "suite" else doubt.remedy
            if remedy == _ROTATE and not (
                result.bench in BENCHMARKS
                and any(it.name == "cache" for it in fields(spec_class(result.bench)))
            ):
                remedy = ""
            yield Note("warn", f"{doubt.text}: {subset}.", (remedy,) if remedy else ())


def _verified_notes(cases: Sequence[CaseResult]) -> Iterator[Note]:
    """Report how many cases were verified, not run, and without results; the sum is the number of cases."""
    verified = sum(case.verified for case in cases)
    not_run = sum(case.is_unsupported for case in cases)
    missing = sum(isinstance(case.median_s, Unavailable) for case in cases)
    if missing > not_run or not verified:
        return
    if verified == len(cases):
        all_cases = {1: "the case", 2: "both cases"}.get(verified, f"all {verified} cases")
        yield Note("ok", f"Results verified for {all_cases}.")
        return
    unverified = len(cases) - verified - not_run
    others = [f"{not_run} not run"] if not_run else []
    others += [f"{unverified} without results to verify"] if unverified else []
    yield Note(
        "ok", f"Results verified for {verified} of {len(cases)} cases ({', '.join(others)})."
    )


# --- reasons to doubt the figures of a case -----------------------------------------------------------

# Largest plausible share of the peak. A share between 1 and this value is an error of the measurement or of
# the datasheet.
_MAX_SHARE = 1.02


class _Doubt(NamedTuple):
    """A reason to doubt the figures of a case."""

    applies: Callable[[CaseResult, Summary], bool]
    text: str  # The reason, as a sentence without a period.
    remedy: str = ""  # Advice to the user; empty if there is none.
    suite_remedy: str = ""  # Advice for bench suite, which has no options for its method.


def _was_ended(
    case: CaseResult, summary: Summary, limits: Collection[str], *, with_precision: bool
) -> bool:
    """Return whether one of the limits ended sampling, without the precision or with too few samples."""
    rule = case.method.rule
    if case.converged or case.stop_reason not in limits:
        return False
    is_precise = summary.noise < rule.precision
    return (
        is_precise and len(case.samples_s) < rule.min_samples if with_precision else not is_precise
    )


def _is_above(case: CaseResult, *bounds: str) -> bool:
    """Return whether a case is faster than the peak of one of these terms."""
    share, limit = case.ratio_to_limit, case.limit
    if isinstance(share, Unavailable) or isinstance(limit, Unavailable):
        return False
    return share > _MAX_SHARE and limit.bound in bounds


def _limit_doubts(
    limit: str, option: str, reasons: Collection[str], remedy: str = ""
) -> tuple[_Doubt, _Doubt]:
    """Return the doubts about cases that a limit ended; ``reasons`` are those why sampling ended."""
    text, advice = f"The {limit} ended sampling before the", f"allow more time with {option}, or"
    return (
        _Doubt(
            lambda case, summary: _was_ended(case, summary, reasons, with_precision=False),
            f"{text} precision was reached",
            f"{advice} a wider interval with --precision",
            remedy,
        ),
        _Doubt(
            lambda case, summary: _was_ended(case, summary, reasons, with_precision=True),
            f"{text} minimum number of samples was reached",
            f"{advice} fewer samples with --samples",
            remedy,
        ),
    )


_ROTATE = "measure with --cache rotate"  # Advice for benches with this option.
_SEE_SAMPLES = "see the samples in the HTML report: -o bench.html"
_DOUBTS = (
    # Results of older versions have no reason.
    *_limit_doubts("time limit", "--timeout", ("timeout", "")),
    *_limit_doubts("time budget", "--budget", ("budget",), "measure without --quick"),
    _Doubt(
        lambda _, summary: summary.trend,
        "Times drift between the first and the last third of the samples",
        "warm up longer with --warmup",
    ),
    _Doubt(
        lambda _, summary: summary.bimodal,
        "Times form two groups, so the median may jump between runs",
        _SEE_SAMPLES,
        _SEE_SAMPLES,
    ),
    _Doubt(
        lambda case, _: _is_above(case, "link") and case.environment.simulated,
        "Faster than the peak of the link, because the rate of a simulated link does not depend on the "
        "GPU model",
    ),
    _Doubt(
        lambda case, _: _is_above(case, "link") and not case.environment.simulated,
        "Faster than the peak of the link: the peak is wrong",
    ),
    _Doubt(
        lambda case, _: _is_above(case, "arithmetic", "memory"),
        f"More than {format_ratio(_MAX_SHARE - 1)} above the peak: data came from a cache, or the peak is "
        "wrong",
        _ROTATE,
    ),
)


# --- the rows below the notes: method, libraries, versions and GPU state ------------------------------

_MODE_TEXTS = {
    "isolated": "one execution per sample, timed by CUDA events",
    "batch": "{n} per sample, timed by CUDA events",
    "graph": "a CUDA graph of {n} per sample, timed by CUDA events",
    "host": "host time until the GPU has finished",
    "call": "host time of the call",
}
_CACHE_TEXTS = {
    "rotate": "L2: {sets} buffer sets in rotation",
    "flush": "L2 flushed before each sample",
    "hot": "L2 hot",
}
_FILL_TEXTS = {
    "uniform": "uniform random data",
    "normal": "normal random data",
    "int": "random small integers",
    "bits": "random bits",
    "no": "",
}
_MAX_NAMES = 7  # Longer lists of names are replaced by their count.


def machine_facts(result: BenchResult) -> Facts:
    """Return rows with methods, libraries, ranks, versions, and the GPU state after the first case."""
    cases = [case for case in result.results if not case.is_unsupported] or result.results
    environment = cases[0].environment
    rows = method_rows(cases)
    libraries: dict[str, None] = {}  # Each with its settings.
    for settings in (case.settings for case in cases if "library" in case.settings):
        parts = [" ".join(str(settings[it]) for it in ("library", "version") if it in settings)]
        workspace_bytes = settings.get("workspace_bytes")
        if isinstance(workspace_bytes, int):
            parts.append(f"workspace up to {format_bytes(workspace_bytes)}")
        names = ("asked", "algorithm_source", "path", "buffers", "page_cache")
        parts += (str(settings[name]) for name in names if settings.get(name))
        libraries[", ".join(parts)] = None
    rows += [("library", Text("; ".join(libraries)))] if libraries else []
    rows += words_of_bench(result.bench).facts(result)
    if environment.versions:
        versions = (f"{name} {version}" for name, version in environment.versions.items())
        rows.append(("versions", Text(", ".join(versions))))
    if moment := environment.after or environment.before:
        amounts = (
            (moment.temperature_c, "°C"),
            (moment.power_w, "W"),
            (moment.memory_clock_mhz, "MHz memory"),
        )
        states = [f"{it:.0f} {unit}" for it, unit in amounts if not isinstance(it, Unavailable)]
        limit_w = environment.power_limit_w
        states += [] if isinstance(limit_w, Unavailable) else [f"power limit {limit_w:.0f} W"]
        rows += [("GPU state", Text(", ".join(states)))] if states else []
    return Facts(tuple(rows))


def method_rows(cases: Sequence[CaseResult]) -> list[tuple[str, Value]]:
    """Return a row per method, with the names of its cases if there are several methods."""
    groups: dict[tuple[str, str, str, str], list[CaseResult]] = {}
    for case in cases:
        timing = words_of_bench(case.name).timing(case)
        key = (case.method.mode, case.method.cache, case.method.fill, timing)
        groups.setdefault(key, []).append(case)
    rows: list[tuple[str, Value]] = []
    for (_, _, _, timing), group in groups.items():
        libraries = (called_library(case) for case in group if case.library == CUDAKIT)
        values_by_axis = [[case.axes.get(name) for case in group] for name in varying_axes(group)]
        text = describe_method(
            [case.method for case in group],
            cudakit_names=next(
                (
                    [str(value) for value in dict.fromkeys(values)]
                    for values in values_by_axis
                    if len(set(values)) > 1 and all(isinstance(value, str) for value in values)
                ),
                [],
            ),
            called_library=next((name for name in libraries if name != CUDAKIT), CUDAKIT),
            timing_text=timing,
        )
        prefix = f"{_name_group(group, cases)}: " if len(groups) > 1 else ""
        rows.append(("method", Text(prefix + text)))
    return rows


def describe_method(
    methods: Sequence[Method],
    *,
    cudakit_names: Sequence[str] = (),
    called_library: str = CUDAKIT,
    timing_text: str = "",
) -> str:
    """Describe methods that differ only in their numbers: differing numbers are printed as ranges.

    ``cudakit_names`` are the names of the interleaved workloads if cudakit runs them all, without a baseline:
    the values of the first axis that varies and has text values.
    ``called_library`` is the library that cudakit calls. ``timing_text`` says from when until when a sample
    is timed; if it is empty, the mode does.
    """
    first = methods[0]

    def span(values: Sequence[float], format_value: Callable[[float], str] = str) -> str:
        return text_range(format_value(min(values)), format_value(max(values)))

    executions = span([method.executions for method in methods])
    if not timing_text and first.mode == "call" and first.executions > 1:
        timing_text = f"host time of a call, mean of {executions} consecutive calls"
    elif not timing_text:
        timing_text = _MODE_TEXTS[first.mode].format(n=_with_noun(executions, "execution"))
    parts = [timing_text]
    # Work without data, such as an event, has no L2 state.
    if first.fill != "no" or first.cache != "hot":
        sets = span([method.buffer_sets for method in methods])
        parts.append(_CACHE_TEXTS[first.cache].format(sets=sets))
    parts += filter(None, [_FILL_TEXTS.get(first.fill, f"data: {first.fill}")])
    warmups_s = [method.warmup_s for method in methods]
    warmup = span(warmups_s, lambda s: format_seconds(s, pad=True) if s else "0 s")
    parts.append(f"warm-up {warmup}" if any(warmups_s) else "no warm-up")
    rounds = [method.rounds for method in methods]
    if max(rounds) > 1:
        parts.append(f"{span(rounds)} rounds, each with new buffers")
    names = list(dict.fromkeys(name for method in methods for name in method.interleaved))
    if names == [CUDAKIT]:
        names = list(cudakit_names)
    if names:
        shown = (
            called_library if it == CUDAKIT else format_axis(MEASUREMENT_AXIS, it) for it in names
        )
        parts.append(f"interleaved samples of {', '.join(shown)}")
    return "; ".join(parts)


def _name_group(group: Sequence[CaseResult], all_cases: Sequence[CaseResult]) -> str:
    """Name the cases of a group among all cases.

    The name lists the labels of single cases, then values of one axis that only cases of the group have. In
    the opposite order, a label "d2d 4.00 KiB" at the end could mean that all values are of 4 KiB. The axis
    is the one with the fewest labels. If the list is too long, the name is the number of cases.
    """
    outside = [case for case in all_cases if not any(case is member for member in group)]
    label_by_id = dict(zip(map(id, all_cases), short_labels(all_cases), strict=True))
    candidates: list[tuple[int, list[str]]] = []
    for axis in ("", *axis_names(all_cases)):
        texts = {
            id(case): format_axis(axis, case.axes.get(axis)) if axis else case.name
            for case in all_cases
        }
        taken = {texts[id(case)] for case in outside}
        labels = [label_by_id[id(case)] for case in group if texts[id(case)] in taken]
        unique = dict.fromkeys(texts[id(case)] for case in group if texts[id(case)] not in taken)
        candidates.append((len(labels), [*labels, *unique]))
    _, names = min(candidates, key=lambda candidate: candidate[0])
    # A case that was measured by two methods has one label.
    is_ambiguous = not {label_by_id[id(case)] for case in outside}.isdisjoint(names)
    if not is_ambiguous and len(names) <= _MAX_NAMES:
        return ", ".join(names)
    count = _with_noun(str(len(group)), "case")
    for axis in varying_axes(group):
        sizes = [size for case in group if isinstance(size := case.axes.get(axis), int)]
        if axis.endswith("_bytes") and len(sizes) == len(group):
            return f"{count} of {format_axis(axis, min(sizes))} to {format_axis(axis, max(sizes))}"
    return count


def _with_noun(count_text: str, noun: str) -> str:
    return f"{count_text} {noun}" if count_text == "1" else f"{count_text} {noun}s"
