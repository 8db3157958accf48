from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core.bench.made import VERSIONS, WRONG, gemm, launch, machine, result
from hypothesis import given
from hypothesis import strategies as st

from cudakit.core.bench.compare import (
    CaseComparison,
    Comparison,
    FailOn,
    Verdict,
    compare,
    compare_case,
    parse_fail_on,
)
from cudakit.core.bench.labels import full_label
from cudakit.core.bench.measurement import Samples
from cudakit.core.bench.method import Method
from cudakit.core.bench.result import CaseResult
from cudakit.errors import InputError, UsageError
from cudakit.units import Unavailable

OPPOSITE = {
    Verdict.FASTER: Verdict.SLOWER,
    Verdict.SLOWER: Verdict.FASTER,
    Verdict.SAME: Verdict.SAME,
    Verdict.AMBIGUOUS: Verdict.AMBIGUOUS,
}


def evenly(centre: float, width: float, *, n: int = 41, clock_hz: float = 0.0) -> Samples:
    """Return samples evenly around a time, at one clock or without clocks."""
    times = tuple(centre * (1 + width * (2 * i / (n - 1) - 1)) for i in range(n))
    return Samples(times, (clock_hz,) * n if clock_hz else ())


def case(samples: Samples, **changes: Any) -> CaseResult:
    return gemm(samples=samples, **changes)


def verdict(before: Samples, after: Samples) -> CaseComparison:
    return compare_case(case(before), case(after))


@st.composite
def measured(draw: st.DrawFn) -> Samples:
    times = draw(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=40))
    clocks = draw(st.lists(st.floats(1e9, 2e9), min_size=len(times), max_size=len(times)))
    return Samples(tuple(times), tuple(clocks) if draw(st.booleans()) else ())


@given(measured(), measured())
def test_swapped_runs_have_opposite_verdict(first: Samples, last: Samples) -> None:
    assert verdict(last, first).verdict is OPPOSITE[verdict(first, last).verdict]


@given(measured())
def test_run_is_same_as_itself(samples: Samples) -> None:
    found = verdict(samples, samples)

    assert found.verdict is Verdict.SAME
    assert found.change == 0


@given(measured(), st.floats(4.1, 100.0), st.booleans())
def test_beyond_both_intervals_it_is_never_the_same(
    samples: Samples, factor: float, reverse: bool
) -> None:
    # Times of a run are at most fourfold apart, so fourfold times have no interval in common.
    far = replace(samples, times_s=tuple(factor * 1.02 * time for time in samples.times_s))
    pair = (far, samples) if reverse else (samples, far)

    assert verdict(*pair).verdict is not Verdict.SAME


@given(measured(), measured())
def test_change_is_inside_its_interval(first: Samples, last: Samples) -> None:
    found = verdict(first, last)

    assert not isinstance(found.change, Unavailable)
    assert not isinstance(found.change_interval, Unavailable)
    assert found.change_interval[0] <= found.change <= found.change_interval[1]


def test_ten_percent_more_time_is_slower_and_less_is_faster() -> None:
    found = verdict(evenly(1.0, 0.01), evenly(1.1, 0.01))

    assert (found.verdict, found.reason) == (Verdict.SLOWER, "")
    assert found.change == pytest.approx(0.1)
    assert verdict(evenly(1.1, 0.01), evenly(1.0, 0.01)).verdict is Verdict.FASTER


def test_less_than_runs_of_one_machine_differ_is_the_same() -> None:
    assert verdict(evenly(1.0, 1e-5), evenly(1.004, 1e-5)).verdict is Verdict.SAME


def test_intervals_that_overlap_without_holding_both_medians_are_ambiguous() -> None:
    found = verdict(evenly(1.0, 1e-5), evenly(1.007, 1e-5))

    assert found.verdict is Verdict.AMBIGUOUS
    assert "overlap" in found.reason


def test_lower_clock_alone_is_ambiguous() -> None:
    found = verdict(evenly(1.0, 0.01, clock_hz=1.9e9), evenly(1.1, 0.01, clock_hz=1.9e9 / 1.1))

    assert found.verdict is Verdict.AMBIGUOUS
    assert found.reason == "slower in time, the same in cycles"
    assert found.clock_change == pytest.approx(-1 / 11)


def test_slower_at_the_same_clock_is_slower_in_cycles_too() -> None:
    found = verdict(evenly(1.0, 0.01, clock_hz=1.9e9), evenly(1.1, 0.01, clock_hz=1.9e9))

    assert (found.verdict, found.cycles_change) == (Verdict.SLOWER, pytest.approx(0.1))


def test_times_decide_if_one_run_has_no_clock() -> None:
    found = verdict(evenly(1.0, 0.01, clock_hz=1.9e9), evenly(1.1, 0.01))

    assert found.verdict is Verdict.SLOWER
    assert isinstance(found.cycles_change, Unavailable)


def test_case_without_time_is_ambiguous_with_reason() -> None:
    found = compare_case(gemm(), gemm(verification=WRONG))

    assert found.verdict is Verdict.AMBIGUOUS
    assert found.reason.startswith("after: wrong results")
    assert isinstance(found.change, Unavailable)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"environment": machine(gpu="NVIDIA H100")}, "GPU: NVIDIA H200 before, NVIDIA H100 after"),
        ({"environment": machine(versions={**VERSIONS, "driver": "1"})}, "driver:"),
        ({"environment": machine(versions={**VERSIONS, "cublas": "1"})}, "cublas:"),
        ({"environment": machine(simulated=True)}, "simulated:"),
        ({"method": Method("isolated", "hot")}, "cache: rotate before, hot after"),
        ({"method": Method("graph", "rotate")}, "mode: isolated before, graph after"),
    ],
)
def test_different_runs_are_rejected_without_force(changes: dict[str, Any], words: str) -> None:
    before, after = result(gemm(), gemm(4096)), result(gemm(), gemm(4096, **changes))

    with pytest.raises(InputError, match="not comparable") as caught:
        compare(before, after)
    assert words in caught.value.message
    assert "--ignore-mismatch" in caught.value.hint
    assert any(words in line for line in compare(before, after, force=True).differences)


def test_runs_without_common_case_are_rejected() -> None:
    with pytest.raises(InputError, match=r"no common case: gemm 8192³ bf16 and launch empty"):
        compare(result(gemm()), result(launch()), force=True)


def test_cases_of_one_run_only_are_named() -> None:
    found = compare(result(gemm(1024), gemm(2048)), result(gemm(2048), gemm(4096)))

    assert [entry.axes["m"] for entry in found.cases] == [2048]
    assert found.only_before == ("gemm 1024³ bf16",)
    assert found.only_after == ("gemm 4096³ bf16",)


def test_baseline_is_separate_case() -> None:
    found = compare(result(gemm(), gemm(library="torch")), result(gemm()))

    assert [full_label(entry) for entry in found.cases] == ["gemm 8192³ bf16"]
    assert found.only_before == ("gemm 8192³ bf16 by torch",)


def comparison(before: Samples, after: Samples) -> Comparison:
    return compare(result(case(before)), result(case(after)))


def test_fail_on_finds_cases_above_threshold() -> None:
    slower = comparison(evenly(1.0, 0.001), evenly(1.06, 0.001))

    assert len(parse_fail_on("slower:5%").matching_cases(slower)) == 1
    assert parse_fail_on("slower:7%").matching_cases(slower) == ()
    assert len(parse_fail_on("slower").matching_cases(slower)) == 1
    assert parse_fail_on("faster").matching_cases(slower) == ()


def test_fail_on_does_not_take_the_ambiguous_for_slower() -> None:
    lower_clock = comparison(
        evenly(1.0, 0.01, clock_hz=1.9e9), evenly(1.2, 0.01, clock_hz=1.9e9 / 1.2)
    )

    assert parse_fail_on("slower").matching_cases(lower_clock) == ()
    assert len(parse_fail_on("ambiguous").matching_cases(lower_clock)) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("slower", FailOn(Verdict.SLOWER)),
        ("slower:5%", FailOn(Verdict.SLOWER, 0.05)),
        (" faster:0.1 ", FailOn(Verdict.FASTER, 0.1)),
        ("ambiguous", FailOn(Verdict.AMBIGUOUS)),
    ],
)
def test_fail_on_is_read(text: str, expected: FailOn) -> None:
    assert parse_fail_on(text) == expected


@pytest.mark.parametrize(
    "text", ["", "slow", "same", "slower:", "slower:x", "slower:-5%", "slower:inf", "5%"]
)
def test_invalid_fail_on_error(text: str) -> None:
    with pytest.raises(UsageError, match="--fail-on"):
        parse_fail_on(text)
