"""Results as Columns, which are named arrays, for CSV, nvbench's JSON and charts.

``results`` has a row per case: ``name``, the axes, then figures from ``median_s`` on; NaN is an unavailable
figure. With baselines, ``contender`` is "cudakit" or the baseline, and ``library`` the library as the report
names it, such as "cublaslt". ``samples`` has a row per sample, ``device`` one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from cudakit.bench.environment import Environment
from cudakit.bench.labels import Axis, axis_names, called_library, short_labels
from cudakit.bench.result import CaseResult
from cudakit.bench.stats import Summary
from cudakit.report.document import Array, Columns
from cudakit.units import Unavailable


def result_columns(cases: Sequence[CaseResult]) -> Columns:
    """Return the Columns ``results``, with a row per case."""
    arrays: dict[str, Array] = {}
    texts_by_column: dict[str, tuple[str, ...]] = {}
    arrays["name"], texts_by_column["name"] = _encode_words([case.name for case in cases])
    for name in axis_names(cases):
        values = [case.axes.get(name) for case in cases]
        if dtype := _dtype(values):
            arrays[name] = np.array(values, dtype)
        else:
            texts_of_axis = [None if value is None else str(value) for value in values]
            arrays[name], texts_by_column[name] = _encode_words(texts_of_axis)
    if {case.library for case in cases} - {"cudakit"}:
        arrays["contender"], texts_by_column["contender"] = _encode_words(
            [case.library for case in cases]
        )
    for figure in _case_figures(cases[0]) if cases else ():
        arrays[figure] = np.array([_case_figures(case)[figure] for case in cases], np.float64)
    if any(case.bus_factor is not None for case in cases):
        arrays["busbw_bytes_per_s"] = np.array([number(case.bus_bandwidth) for case in cases])
    if cases:
        arrays["samples"] = np.array([len(case.samples_s) for case in cases], np.int64)
        arrays["verified"] = np.array([case.verified for case in cases], np.bool_)
        arrays["converged"] = np.array([case.converged for case in cases], np.bool_)
        arrays["simulated"] = np.array([case.environment.simulated for case in cases], np.bool_)
    if "contender" in arrays:
        libraries = [called_library(case) for case in cases]
        arrays["library"], texts_by_column["library"] = _encode_words(libraries)
    return Columns("results", arrays, texts_by_column)


def sample_columns(cases: Sequence[CaseResult]) -> Columns:
    """Return the Columns ``samples``: the samples of each case in the order measured."""
    sizes = [len(case.samples_s) for case in cases]
    clocks = (case.sm_clock_hz or (np.nan,) * len(case.samples_s) for case in cases)
    return Columns(
        "samples",
        {
            "case": np.repeat(np.arange(len(cases)), sizes),
            "time_s": np.array([time for case in cases for time in case.samples_s], np.float64),
            "sm_clock_hz": np.array([hz for row in clocks for hz in row], np.float64),
            "round": np.array(
                [round_number for case in cases for round_number in _round_numbers(case)], np.int64
            ),
        },
        {"case": tuple(short_labels(cases))},
    )


def device_columns(environment: Environment) -> Columns:
    """Return the Columns ``device``, with one row."""
    arrays: dict[str, Array] = {}
    texts_by_column: dict[str, tuple[str, ...]] = {}
    for name, description in (
        ("gpu", environment.gpu),
        ("compute_capability", environment.compute_capability),
    ):
        arrays[name], texts_by_column[name] = _encode_words(
            [None if isinstance(description, Unavailable) else description]
        )
    for name, value in (
        ("multiprocessors", environment.multiprocessors),
        ("sm_clock_max_hz", _multiply(environment.sm_clock_max_mhz, 1e6)),
        ("memory_clock_hz", _multiply(environment.memory_clock_mhz, 1e6)),
        ("memory_bus_bits", environment.memory_bus_bits),
        ("memory_bytes", environment.memory_bytes),
        ("l2_bytes", environment.l2_bytes),
    ):
        arrays[name] = np.array([number(value)], np.float64)
    return Columns("device", arrays, texts_by_column)


def _case_figures(case: CaseResult) -> dict[str, float]:
    summary = case.statistics if isinstance(case.statistics, Summary) else None
    ci_low_s, ci_high_s = summary.ci95_s if summary else (np.nan, np.nan)
    return {
        "median_s": number(case.median_s),
        "ci95_low_s": ci_low_s,
        "ci95_high_s": ci_high_s,
        **{
            name: getattr(summary, name) if summary else np.nan
            for name in ("minimum_s", "q1_s", "q3_s", "maximum_s", "mean_s", "stdev_s")
        },
        "operations_per_s": _rate(case, case.operations),
        "bytes_per_s": _rate(case, case.bytes_moved),
        "limit_s": limit_s(case),
        "ratio_to_limit": number(case.ratio_to_limit),
        "ratio_to_datasheet": number(case.ratio_to_datasheet),
        "sm_clock_hz": median(case.sm_clock_hz) if case.sm_clock_hz else np.nan,
        "energy_j": number(case.energy_j),
    }


def _dtype(values: Sequence[Axis | None]) -> type[np.generic] | None:
    """Return the dtype of an array of these values; None if they are not all int or all float."""
    # The type must be exact, because bool is a subclass of int.
    for value_type, dtype in ((int, np.int64), (float, np.float64)):
        if all(type(value) is value_type for value in values):
            return dtype
    return None


def _encode_words(words: Sequence[str | None]) -> tuple[Array, tuple[str, ...]]:
    """Return an index per word, -1 for None, and the tuple of distinct words that the indices refer to."""
    distinct_words = list(dict.fromkeys(word for word in words if word is not None))
    index_by_word = {word: i for i, word in enumerate(distinct_words)}
    return np.array(
        [-1 if word is None else index_by_word[word] for word in words], np.int64
    ), tuple(distinct_words)


def _round_numbers(case: CaseResult) -> list[int]:
    """Return the round of each sample, counted from 0."""
    sizes = case.rounds or (len(case.samples_s),)
    return [round_number for round_number, size in enumerate(sizes) for _ in range(size)]


def _rate(case: CaseResult, amount: float) -> float:
    return number(case.per_second(amount)) if amount else np.nan


def _multiply(value: float | Unavailable, factor: float) -> float | Unavailable:
    return value if isinstance(value, Unavailable) else value * factor


def limit_s(case: CaseResult) -> float:
    """Return the lower bound of the time of a case; NaN if it is unavailable."""
    return np.nan if isinstance(case.limit, Unavailable) else case.limit.seconds


def number(value: float | Unavailable) -> float:
    """Return the value as a float; NaN if it is unavailable."""
    return np.nan if isinstance(value, Unavailable) else float(value)
