"""The rows below a table of cases: method, libraries, versions and GPU state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from cudakit.bench.case import Method
from cudakit.bench.environment import Environment
from cudakit.bench.labels import (
    CUDAKIT,
    MEASUREMENT_AXIS,
    axis_names,
    called_library,
    format_axis,
    join_first_names,
    short_labels,
    varying_axes,
)
from cudakit.bench.result import BenchResult, CaseResult, Collectives
from cudakit.report.document import Facts, Text, Value
from cudakit.units import Unavailable, format_bytes, format_seconds

_MODE_TEXTS = {
    "isolated": "one execution per sample, timed by CUDA events",
    "batch": "{n} per sample, timed by CUDA events",
    "graph": "a CUDA graph of {n} per sample, timed by CUDA events",
    "host": "host time until the GPU has finished",
    "call": "host time of the call",
}
# In mode "call", the time is that of one call, except in bench alloc, and for one call of bench launch.
_LAUNCH_TO_START = "launch-to-start"
_LAUNCH_TO_START_TEXT = "host time until the host sees the first write of the kernel"
_ALLOC_TEXT = "host time of one allocation and its free"
_OVERLAP_TEXT = "each sample has all copies, all GEMMs, or both, timed by CUDA events"
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


def title(result: BenchResult) -> str:
    """Return the title of a report: bench and GPU, with the prefix "Simulated: " for a simulated device."""
    text = f"{'Simulated: ' if result.simulated else ''}bench {_command(result.bench)}"
    if not result.results:
        return text
    gpu_name = result.results[0].environment.gpu
    return text if isinstance(gpu_name, Unavailable) else f"{text}, {gpu_name}"


def _command(bench: str) -> str:
    return "copy --overlap gemm" if bench == "copy-overlap" else bench


def machine_facts(cases: Sequence[CaseResult], collectives: Collectives | None = None) -> Facts:
    """Return rows with methods, libraries, ranks, versions, and the GPU state after the first case."""
    supported_cases = [case for case in cases if not case.is_unsupported] or cases
    first_case = supported_cases[0]
    rows = [*method_rows(supported_cases), *library_rows(supported_cases)]
    rows += collective_rows(collectives) if collectives else []
    rows += (
        [("versions", Text(_versions(first_case.environment)))]
        if first_case.environment.versions
        else []
    )
    gpu_state = _gpu_state(first_case)
    return Facts((*rows, ("GPU state", Text(gpu_state))) if gpu_state else tuple(rows))


def collective_rows(collectives: Collectives) -> list[tuple[str, Value]]:
    """Return the GPUs of the ranks, the links between them, and the NCCL variables that are set."""
    rank_texts = [
        f"{rank_number}: {rank.host} GPU {rank.device}"
        for rank_number, rank in enumerate(collectives.ranks)
    ]
    rows: list[tuple[str, Value]] = [("ranks", Text(join_first_names(rank_texts, 8)))]
    if collectives.links:
        links = [f"{pair} {path}" for pair, path in collectives.links.items()]
        rows.append(("links", Text(join_first_names(links, 8))))
    if collectives.variables:
        variable_texts = (f"{name}={text}" for name, text in collectives.variables.items())
        rows.append(("environment", Text(", ".join(variable_texts))))
    return rows


def library_rows(cases: Sequence[CaseResult]) -> list[tuple[str, Value]]:
    """Return the libraries with their settings in one row; no row if no case has a library."""
    library_texts = dict.fromkeys(
        _describe_library(case) for case in cases if "library" in case.settings
    )
    return [("library", Text("; ".join(library_texts)))] if library_texts else []


def _describe_library(case: CaseResult) -> str:
    settings = case.settings
    library = " ".join(str(settings[name]) for name in ("library", "version") if name in settings)
    workspace_bytes = settings.get("workspace_bytes")
    description_parts = [
        library,
        *(
            [f"workspace up to {format_bytes(workspace_bytes)}"]
            if isinstance(workspace_bytes, int)
            else []
        ),
        *(
            str(settings[name])
            for name in ("asked", "algorithm_source", "path", "buffers", "page_cache")
            if settings.get(name)
        ),
    ]
    return ", ".join(description_parts)


def method_rows(cases: Sequence[CaseResult]) -> list[tuple[str, Value]]:
    """Return a row per method, with the names of its cases if there are several methods."""
    cases_by_method: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in cases:
        method = case.method
        key = (method.mode, method.cache, method.fill, _timing_text(case))
        cases_by_method.setdefault(key, []).append(case)
    rows: list[tuple[str, Value]] = []
    for cases_of_method in cases_by_method.values():
        text = describe_method(
            [case.method for case in cases_of_method],
            cudakit_names=_first_varying_values(cases_of_method),
            called_library=_called_library(cases_of_method),
            timing_text=_timing_text(cases_of_method[0]),
        )
        rows.append(
            (
                "method",
                Text(
                    text
                    if len(cases_by_method) == 1
                    else f"{_name_group(cases_of_method, cases)}: {text}"
                ),
            )
        )
    return rows


def _timing_text(case: CaseResult) -> str:
    """Describe what the time of a case measures; return "" if the measurement mode already says it."""
    if case.method.mode == "call" and case.name == "alloc":
        return _ALLOC_TEXT
    if MEASUREMENT_AXIS in case.axes:
        return _OVERLAP_TEXT
    return _LAUNCH_TO_START_TEXT if case.axes.get("call") == _LAUNCH_TO_START else ""


def describe_method(
    methods: Sequence[Method],
    *,
    cudakit_names: Sequence[str] = (),
    called_library: str = CUDAKIT,
    timing_text: str = "",
) -> str:
    """Describe methods that differ only in their numbers: differing numbers are printed as ranges.

    ``cudakit_names`` are the names of the interleaved workloads if cudakit runs them all, without a baseline.
    ``called_library`` is the library that cudakit calls. ``timing_text`` says from when until when a sample
    is timed; if it is empty, the mode does.
    """
    first_method = methods[0]
    warmup_text = _range(
        [method.warmup_s for method in methods],
        lambda s: format_seconds(s, pad=True) if s else "0 s",
    )
    executions_text = _range([method.executions for method in methods], str)
    has_several_calls = first_method.mode == "call" and first_method.executions > 1
    if not timing_text:
        timing_text = (
            f"host time of a call, mean of {executions_text} consecutive calls"
            if has_several_calls
            else _MODE_TEXTS[first_method.mode].format(n=_with_noun(executions_text, "execution"))
        )
    # Work without data, such as an event, has no L2 state.
    has_data = first_method.fill != "no" or first_method.cache != "hot"
    cache_text = _CACHE_TEXTS[first_method.cache].format(
        sets=_range([method.buffer_sets for method in methods], str)
    )
    description_parts = [
        timing_text,
        *([cache_text] if has_data else []),
        *filter(None, (_FILL_TEXTS.get(first_method.fill, f"data: {first_method.fill}"),)),
        f"warm-up {warmup_text}" if any(method.warmup_s for method in methods) else "no warm-up",
    ]
    if any(method.rounds > 1 for method in methods):
        rounds_text = _range([method.rounds for method in methods], str)
        description_parts.append(f"{rounds_text} rounds, each with new buffers")
    interleaved_names = list(
        dict.fromkeys(name for method in methods for name in method.interleaved)
    )
    if interleaved_names == [CUDAKIT]:
        interleaved_names = list(cudakit_names)
    interleaved_names = [
        called_library if name == CUDAKIT else format_axis(MEASUREMENT_AXIS, name)
        for name in interleaved_names
    ]
    if interleaved_names:
        description_parts.append(f"interleaved samples of {', '.join(interleaved_names)}")
    return "; ".join(description_parts)


def _called_library(cases: Sequence[CaseResult]) -> str:
    """Return the library that cudakit calls in the first case with one, such as cublaslt."""
    libraries = (called_library(case) for case in cases if case.library == CUDAKIT)
    return next((library for library in libraries if library != CUDAKIT), CUDAKIT)


def _first_varying_values(cases: Sequence[CaseResult]) -> list[str]:
    """Return the values of the first axis that varies and has text values."""
    for name in varying_axes(cases):
        values = [case.axes.get(name) for case in cases]
        if len(set(values)) > 1 and all(isinstance(value, str) for value in values):
            return list(dict.fromkeys(map(str, values)))
    return []


def _name_group(group: Sequence[CaseResult], all_cases: Sequence[CaseResult]) -> str:
    """Name the cases of a group among all cases.

    The name lists the labels of single cases, then values of one axis that only cases of the group have. In
    the opposite order, a label "d2d 4.00 KiB" at the end could mean that all values are of 4 KiB. The axis
    is the one with the fewest labels. If the list is too long, the name is the number of cases.
    """
    cases_outside = [case for case in all_cases if not any(case is member for member in group)]
    label_by_id = dict(zip(map(id, all_cases), short_labels(all_cases), strict=True))
    best_names: tuple[int, list[str]] | None = None
    text_functions: list[Callable[[CaseResult], str]] = [lambda case: case.name]
    text_functions += [partial(_axis_text, name) for name in axis_names(all_cases)]
    for text_of in text_functions:
        values_outside = {text_of(case) for case in cases_outside}
        unique_values = dict.fromkeys(
            text_of(case) for case in group if text_of(case) not in values_outside
        )
        other_labels = [label_by_id[id(case)] for case in group if text_of(case) in values_outside]
        if best_names is None or len(other_labels) < best_names[0]:
            best_names = len(other_labels), [*other_labels, *unique_values]
    group_labels = best_names[1] if best_names else []
    # A case that was measured by two methods has one label.
    is_ambiguous = not {label_by_id[id(case)] for case in cases_outside}.isdisjoint(group_labels)
    return (
        _count_group(group)
        if is_ambiguous or len(group_labels) > _MAX_NAMES
        else ", ".join(group_labels)
    )


def _count_group(group: Sequence[CaseResult]) -> str:
    """Return the number of cases and their range of sizes."""
    count_text = _with_noun(str(len(group)), "case")
    for name in varying_axes(group):
        sizes = [case.axes.get(name) for case in group]
        if name.endswith("_bytes") and all(isinstance(size, int) for size in sizes):
            integers = [size for size in sizes if isinstance(size, int)]
            smallest_size_text, largest_size_text = (
                format_axis(name, min(integers)),
                format_axis(name, max(integers)),
            )
            return f"{count_text} of {smallest_size_text} to {largest_size_text}"
    return count_text


def _axis_text(name: str, case: CaseResult) -> str:
    return format_axis(name, case.axes.get(name))


def _with_noun(count_text: str, noun: str) -> str:
    return f"{count_text} {noun}" if count_text == "1" else f"{count_text} {noun}s"


def _range(values: Sequence[float], format_value: Callable[[float], str]) -> str:
    """Return ``low to high``, or the single value if all are equal."""
    lowest, highest = format_value(min(values)), format_value(max(values))
    return lowest if lowest == highest else f"{lowest} to {highest}"


def _versions(environment: Environment) -> str:
    return ", ".join(f"{name} {version}" for name, version in environment.versions.items())


def _gpu_state(case: CaseResult) -> str:
    moment = case.environment.after or case.environment.before
    if moment is None:
        return ""
    state_parts = [
        f"{amount:.0f} {unit}"
        for amount, unit in (
            (moment.temperature_c, "°C"),
            (moment.power_w, "W"),
            (moment.memory_clock_mhz, "MHz memory"),
        )
        if not isinstance(amount, Unavailable)
    ]
    limit = case.environment.power_limit_w
    if not isinstance(limit, Unavailable):
        state_parts.append(f"power limit {limit:.0f} W")
    return ", ".join(state_parts)
