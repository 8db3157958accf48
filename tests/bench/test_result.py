from __future__ import annotations

import json

import pytest
from bench.example_results import (
    FAILED_VERIFICATION,
    PASSED_VERIFICATION,
    gemm,
    launch,
    result,
)

from cudakit.bench.case import Verification
from cudakit.bench.stats import Samples
from cudakit.report.json import render
from cudakit.units import Unavailable

# Keys of the JSON that the documentation names.
DOCUMENTED_KEYS = (
    "name",
    "axes",
    "median_s",
    "ci95_s",
    "samples_s",
    "limit",
    "ratio_to_limit",
    "verified",
    "method",
    "environment",
)


def test_json_has_documented_keys() -> None:
    plain = json.loads(render(result(gemm(), launch())))

    assert plain["schema"] == "cudakit.bench/1"
    for case in plain["results"]:
        assert not set(DOCUMENTED_KEYS) - set(case)


def test_result_has_every_sample() -> None:
    samples = Samples(tuple(1e-3 + i * 1e-6 for i in range(500)))

    assert gemm(samples=samples).samples_s == samples.times_s


def test_figures_of_wrong_values_are_unavailable_with_reason() -> None:
    case = gemm(verification=FAILED_VERIFICATION)

    assert isinstance(case.median_s, Unavailable)
    assert (
        "the relative error is 0.7, compared with an fp64 computation of 64 rows; "
        "rounding explains at most 0.01" in case.median_s.reason
    )
    assert case.samples_s == case.sm_clock_hz == ()
    for figure in (case.ci95_s, case.ratio_to_limit, case.statistics, case.energy_j):
        assert figure == case.median_s
    assert not case.verified
    assert case.verification == FAILED_VERIFICATION


def test_failed_verification_detail_is_the_reason() -> None:
    case = gemm(verification=Verification(False, 0.1, 0.01, "float64", "3 values are not written"))

    assert case.median_s == Unavailable("wrong results: 3 values are not written")


def test_latency_is_measured_without_verification() -> None:
    case = launch()

    assert not case.verified
    assert case.median_s == pytest.approx(2.1e-6, rel=0.01)


def test_case_without_samples_has_no_time() -> None:
    case = gemm(samples=Samples((), discarded=7))

    assert case.median_s == Unavailable("all samples were discarded")
    assert (case.discarded, case.converged) == (7, False)


def test_ratio_uses_limit_at_measured_clock() -> None:
    case = gemm(rate=790e12, verification=PASSED_VERIFICATION)

    # 4096 operations a clock on 132 SMs: 948.9 TFLOP/s at 1755 MHz, 989.4 at 1830 MHz.
    assert case.ratio_to_limit == pytest.approx(790 / 948.9, rel=0.01)
    assert case.ratio_to_datasheet == pytest.approx(790 / 989.4, rel=0.01)


def test_case_with_zero_time_has_no_rate() -> None:
    case = gemm(samples=Samples((0.0,) * 10))

    assert case.ratio_to_limit == case.per_second(1) == Unavailable("the measured time is 0")
