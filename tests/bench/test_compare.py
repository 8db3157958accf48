from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bench.example_results import FAILED_VERIFICATION, VERSIONS, gemm, launch, machine, result
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.case import Method
from cudakit.bench.compare import (
    CaseComparison,
    Comparison,
    FailOn,
    Verdict,
    compare,
    compare_case,
    failing_cases,
    parse_fail_on,
)
from cudakit.bench.labels import full_label
from cudakit.bench.result import CaseResult
from cudakit.bench.stats import Samples
from cudakit.errors import InputError, UsageError
from cudakit.units import Unavailable

OPPOSITE = {
    Verdict.FASTER: Verdict.SLOWER,
    Verdict.SLOWER: Verdict.FASTER,
    Verdict.SAME: Verdict.SAME,
    Verdict.AMBIGUOUS: Verdict.AMBIGUOUS,
}


def evenly_spread(centre: float, width: float, *, n: int = 41, clock_hz: float = 0.0) -> Samples:
    """Return samples spread evenly around a time, at one clock or without clocks."""
    times = tuple(centre * (1 + width * (2 * i / (n - 1) - 1)) for i in range(n))
    return Samples(times, (clock_hz,) * n if clock_hz else ())


def case_of(samples: Samples, **changes: Any) -> CaseResult:
    return gemm(samples=samples, **changes)


def compare_samples(before: Samples, after: Samples) -> CaseComparison:
    return compare_case(case_of(before), case_of(after))


@st.composite
def samples_strategy(draw: st.DrawFn) -> Samples:
    times = draw(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=40))
    clocks = draw(st.lists(st.floats(1e9, 2e9), min_size=len(times), max_size=len(times)))
    return Samples(tuple(times), tuple(clocks) if draw(st.booleans()) else ())


@given(samples_strategy(), samples_strategy())
def test_swapped_runs_have_opposite_verdict(first: Samples, last: Samples) -> None:
    assert compare_samples(last, first).verdict is OPPOSITE[compare_samples(first, last).verdict]


@given(samples_strategy())
def test_run_is_same_as_itself(samples: Samples) -> None:
    comparison = compare_samples(samples, samples)

    assert comparison.verdict is Verdict.SAME
    assert comparison.change == 0


@given(samples_strategy(), st.floats(4.1, 100.0), st.booleans())
def test_samples_beyond_both_intervals_are_never_the_same(
    samples: Samples, factor: float, reverse: bool
) -> None:
    # The slowest sample takes at most four times as long as the fastest, so times multiplied by over four do
    # not overlap with the original ones.
    distant_samples = replace(
        samples, times_s=tuple(factor * 1.02 * time for time in samples.times_s)
    )
    pair = (distant_samples, samples) if reverse else (samples, distant_samples)

    assert compare_samples(*pair).verdict is not Verdict.SAME


@given(samples_strategy(), samples_strategy())
def test_change_is_inside_its_interval(first: Samples, last: Samples) -> None:
    comparison = compare_samples(first, last)

    assert not isinstance(comparison.change, Unavailable)
    assert not isinstance(comparison.change_interval, Unavailable)
    assert comparison.change_interval[0] <= comparison.change <= comparison.change_interval[1]


def test_time_ten_percent_higher_is_slower_and_lower_is_faster() -> None:
    comparison = compare_samples(evenly_spread(1.0, 0.01), evenly_spread(1.1, 0.01))

    assert (comparison.verdict, comparison.reason) == (Verdict.SLOWER, "")
    assert comparison.change == pytest.approx(0.1)
    assert (
        compare_samples(evenly_spread(1.1, 0.01), evenly_spread(1.0, 0.01)).verdict
        is Verdict.FASTER
    )


def test_change_below_resolution_is_the_same() -> None:
    assert (
        compare_samples(evenly_spread(1.0, 1e-5), evenly_spread(1.004, 1e-5)).verdict
        is Verdict.SAME
    )


def test_overlapping_intervals_without_both_medians_are_ambiguous() -> None:
    comparison = compare_samples(evenly_spread(1.0, 1e-5), evenly_spread(1.007, 1e-5))

    assert comparison.verdict is Verdict.AMBIGUOUS
    assert "overlap" in comparison.reason


def test_lower_clock_alone_is_ambiguous() -> None:
    comparison = compare_samples(
        evenly_spread(1.0, 0.01, clock_hz=1.9e9), evenly_spread(1.1, 0.01, clock_hz=1.9e9 / 1.1)
    )

    assert comparison.verdict is Verdict.AMBIGUOUS
    assert comparison.reason == "slower in time, the same in cycles"
    assert comparison.clock_change == pytest.approx(-1 / 11)


def test_slower_at_the_same_clock_is_slower_in_cycles_too() -> None:
    comparison = compare_samples(
        evenly_spread(1.0, 0.01, clock_hz=1.9e9), evenly_spread(1.1, 0.01, clock_hz=1.9e9)
    )

    assert (comparison.verdict, comparison.cycles_change) == (Verdict.SLOWER, pytest.approx(0.1))


def test_times_decide_if_one_run_has_no_clock() -> None:
    comparison = compare_samples(evenly_spread(1.0, 0.01, clock_hz=1.9e9), evenly_spread(1.1, 0.01))

    assert comparison.verdict is Verdict.SLOWER
    assert isinstance(comparison.cycles_change, Unavailable)


def test_case_without_time_is_ambiguous_with_reason() -> None:
    comparison = compare_case(gemm(), gemm(verification=FAILED_VERIFICATION))

    assert comparison.verdict is Verdict.AMBIGUOUS
    assert comparison.reason.startswith("no time in AFTER: wrong results")
    assert isinstance(comparison.change, Unavailable)


def test_time_missing_in_both_runs_is_not_attributed_to_one() -> None:
    comparison = compare_case(
        gemm(verification=FAILED_VERIFICATION), gemm(verification=FAILED_VERIFICATION)
    )

    assert comparison.reason.startswith("no time in either run: wrong results")
    assert "BEFORE" not in comparison.reason


def test_times_of_different_numbers_of_transfers_are_ambiguous() -> None:
    samples = evenly_spread(1.0, 0.01, clock_hz=1.9e9)
    comparison = compare_case(
        case_of(samples, settings={"transfers_per_execution": 32}),
        case_of(samples, settings={"transfers_per_execution": 8}),
    )

    assert comparison.verdict is Verdict.AMBIGUOUS
    assert (
        comparison.reason
        == "the times are those of 32 transfers in BEFORE, and of 8 transfers in AFTER"
    )
    assert comparison.change == comparison.cycles_change == Unavailable(comparison.reason)


def test_case_without_settings_differs_in_no_setting() -> None:
    comparison = compare(
        result(gemm(settings={"library": "cublaslt"})),
        result(gemm(settings={"library": "cublaslt", "workspace_bytes": 1 << 20, "asked": ""})),
    )

    assert comparison.differences == ()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            {"asked": ""},
            {"asked": "deterministic"},
            "GEMM settings: default before, deterministic after",
        ),
        (
            {"workspace_bytes": 32 << 20},
            {"workspace_bytes": 1 << 20},
            "workspace limit: 32.0 MiB before, 1.00 MiB after",
        ),
        (
            {"page_cache": "page cache used"},
            {"page_cache": "page cache bypassed by O_DIRECT"},
            "page cache: used before, bypassed by O_DIRECT after",
        ),
    ],
)
def test_different_settings_are_named_with_units(
    before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    comparison = compare(result(gemm(settings=before)), result(gemm(settings=after)), force=True)

    assert comparison.differences == (message,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": machine(gpu="NVIDIA H100")}, "GPU: NVIDIA H200 before, NVIDIA H100 after"),
        ({"environment": machine(versions={**VERSIONS, "driver": "1"})}, "driver:"),
        ({"environment": machine(versions={**VERSIONS, "cublas": "1"})}, "cublas:"),
        ({"environment": machine(simulated=True)}, "simulated:"),
        ({"method": Method("isolated", "hot")}, "cache: rotate before, hot after"),
        (
            {"method": Method("isolated", "rotate", blocker=False)},
            "blocker: on before, off after",
        ),
        ({"method": Method("graph", "rotate")}, "mode: isolated before, graph after"),
    ],
)
def test_different_runs_are_rejected_without_force(changes: dict[str, Any], message: str) -> None:
    before, after = result(gemm(), gemm(4096)), result(gemm(), gemm(4096, **changes))

    with pytest.raises(InputError, match="not comparable") as caught:
        compare(before, after)
    assert message in caught.value.message
    assert "--ignore-mismatch" in caught.value.hint
    assert any(message in line for line in compare(before, after, force=True).differences)


def test_runs_without_common_case_are_rejected() -> None:
    with pytest.raises(InputError, match=r"BEFORE has gemm 8192³ bf16, AFTER has launch empty"):
        compare(result(gemm()), result(launch()), force=True)


def test_cases_of_one_run_only_are_named() -> None:
    comparison = compare(result(gemm(1024), gemm(2048)), result(gemm(2048), gemm(4096)))

    assert [case.axes["m"] for case in comparison.cases] == [2048]
    assert comparison.only_before == ("gemm 1024³ bf16",)
    assert comparison.only_after == ("gemm 4096³ bf16",)


def test_baseline_is_separate_case() -> None:
    comparison = compare(result(gemm(), gemm(library="torch")), result(gemm()))

    assert [full_label(case) for case in comparison.cases] == ["gemm 8192³ bf16"]
    assert comparison.only_before == ("gemm 8192³ bf16 by torch",)


def compare_runs(before: Samples, after: Samples) -> Comparison:
    return compare(result(case_of(before)), result(case_of(after)))


def test_fail_on_finds_cases_above_threshold() -> None:
    slower = compare_runs(evenly_spread(1.0, 0.001), evenly_spread(1.06, 0.001))

    assert len(failing_cases(slower, [parse_fail_on("slower:5%")])) == 1
    assert failing_cases(slower, [parse_fail_on("slower:7%")]) == ()
    assert len(failing_cases(slower, [parse_fail_on("slower")])) == 1
    assert failing_cases(slower, [parse_fail_on("faster")]) == ()


def test_fail_on_slower_does_not_match_ambiguous_case() -> None:
    lower_clock = compare_runs(
        evenly_spread(1.0, 0.01, clock_hz=1.9e9), evenly_spread(1.2, 0.01, clock_hz=1.9e9 / 1.2)
    )

    assert failing_cases(lower_clock, [parse_fail_on("slower")]) == ()
    assert len(failing_cases(lower_clock, [parse_fail_on("ambiguous")])) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("slower", (Verdict.SLOWER, 0.0)),
        ("slower:5%", (Verdict.SLOWER, 0.05)),
        (" faster:0.1 ", (Verdict.FASTER, 0.1)),
        ("ambiguous", (Verdict.AMBIGUOUS, 0.0)),
    ],
)
def test_parse_fail_on(text: str, expected: FailOn) -> None:
    assert parse_fail_on(text) == expected


@pytest.mark.parametrize(
    "text", ["", "slow", "same", "slower:", "slower:x", "slower:-5%", "slower:inf", "5%"]
)
def test_invalid_fail_on_error(text: str) -> None:
    with pytest.raises(UsageError, match="--fail-on"):
        parse_fail_on(text)
