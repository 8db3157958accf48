from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core.bench.made import WRONG, gemm, launch, machine, result

from cudakit.core.bench.health import (
    Band,
    SuiteResult,
    assess,
    band,
    figure,
    figure_of,
    measured_value,
)
from cudakit.core.bench.measurement import Samples
from cudakit.core.bench.result import CaseResult
from cudakit.render import json
from cudakit.units import Unavailable

REASON = Unavailable("cublaslt does not offer it on this GPU")


def suite(*cases: CaseResult, **changes: Any) -> SuiteResult:
    simulated = all(case.environment.simulated for case in cases)
    return assess(
        result(*cases, bench="suite", simulated=simulated), quick=True, fields={}, **changes
    )


def unsupported() -> CaseResult:
    made = gemm(samples=Samples((), converged=False), limit=REASON, verification=REASON)
    return replace(made, median_s=REASON)


def test_health_is_that_of_worst_figure() -> None:
    low, wrong = gemm(rate=720e12), gemm(verification=WRONG)

    assert suite(gemm(), launch()).health == "pass"
    assert suite(gemm(), low, launch()).health == "warn"
    found = suite(gemm(), low, wrong)
    assert found.health == "fail"
    assert [one.health for one in found.figures] == ["pass", "warn", "fail"]
    assert isinstance(found.figures[2].reached, Unavailable)


def test_case_without_sample_fails_and_unsupported_case_does_not() -> None:
    assert figure(gemm(samples=Samples(()))).health == "fail"
    assert figure(unsupported()).health == REASON
    assert suite(gemm(), unsupported()).health == "pass"


def test_figure_without_expected_value_is_not_assessed() -> None:
    made = gemm(environment=machine(gpu="NVIDIA L4"), limit=Unavailable("no clock"))

    found = suite(made)
    assert found.health == Unavailable("not assessed: no expected values are known for this GPU")
    assert found.figures[0].health == Unavailable("no clock")


def test_simulated_gpu_is_assessed_only_for_wrong_values() -> None:
    simulated = machine(simulated=True)

    found = suite(gemm(environment=simulated, rate=1e9), launch(environment=simulated))
    assert found.health == Unavailable(
        "not assessed: all values are simulated, computed on the CPU"
    )
    assert {one.health for one in found.figures} == {found.health}
    assert {one.band for one in found.figures} == {found.health}
    assert suite(gemm(environment=simulated, verification=WRONG)).health == "fail"


def test_causes_are_those_of_the_cases_that_are_out_of_band() -> None:
    capped = machine(power_limit_w=400.0)
    message = "the power limit is 400 W instead of the default 700 W"

    assert suite(gemm(), launch(environment=capped)).causes == ()
    assert suite(gemm(rate=5e14, environment=capped), launch()).causes == (message,)


def test_json_has_health_and_measurement() -> None:
    plain = json.render(suite(gemm(rate=720e12), unsupported()))

    assert '"schema": "cudakit.suite/1"' in plain
    assert '"schema": "cudakit.bench/1"' in plain
    assert '"health": "warn"' in plain


L4 = machine(gpu="NVIDIA L4")


def case(name: str, **axes: str | int) -> CaseResult:
    """Return a case that moves data."""
    return replace(gemm(), name=name, axes=axes, operations=0.0, bytes_moved=2.0**30)


def known(found: Band | Unavailable) -> Band:
    assert isinstance(found, Band)
    return found


@pytest.mark.parametrize(
    ("rate", "health"),
    [(793e12, "pass"), (745e12, "pass"), (720e12, "warn"), (600e12, "fail"), (940e12, "warn")],
)
def test_health_of_rate_depends_on_share_of_measured_rate(rate: float, health: str) -> None:
    found = known(band(gemm()))

    assert (found.expected, found.source) == (793e12, "measured")
    assert found.health_of(rate) == health


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (gemm(), "gemm bf16"),
        (case("copy", direction="h2d", size_bytes=4096), "copy h2d"),
        (case("copy", direction="peer", peer=1, access="direct"), "copy peer to 1"),
        (case("memory", operation="triad"), "memory triad"),
        (case("launch", call="launch-to-start"), "launch-to-start"),
        (case("alloc", allocator="stream-ordered"), "alloc stream-ordered"),
        (launch(), "launch"),
    ],
)
def test_figure_is_named_after_axis_value(made: CaseResult, name: str) -> None:
    assert figure_of(made) == name


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (case("copy", direction="h2d"), 55.5e9),
        (case("copy", direction="d2h"), 55.4e9),
        (case("copy", direction="d2d"), 4260e9),
        (case("memory", operation="copy"), 4273e9),
        (case("memory", operation="triad"), 4377e9),
    ],
)
def test_h200_has_measured_rates(made: CaseResult, expected: float) -> None:
    assert known(band(made)).expected == expected


def test_other_models_have_derived_rates_with_wider_band() -> None:
    made = gemm(environment=L4)
    found = known(band(made))
    datasheet = 989.4e12

    assert found.source == "derived"
    assert found.expected == pytest.approx(0.75 * datasheet, rel=1e-3)
    assert found.health_of(0.8 * found.expected) == "pass"
    assert found.health_of(0.7 * found.expected) == "warn"
    assert found.health_of(0.4 * found.expected) == "fail"
    assert found.health_of(1.3 * found.expected) == "pass"


def test_case_without_peak_has_reason_instead_of_expected_value() -> None:
    made = gemm(environment=L4, limit=Unavailable("the memory clock is unknown"))

    assert band(made) == Unavailable("the memory clock is unknown")
    assert isinstance(band(case("copy", direction="pageable-h2d")), Unavailable)
    assert isinstance(band(case("sort", direction="up")), Unavailable)


def test_latency_has_upper_bound() -> None:
    for environment in (machine(), L4):
        found = known(band(launch(environment=environment)))

        assert (found.unit, found.source) == ("s", "bound")
        assert [found.health_of(micro * 1e-6) for micro in (1, 20, 21, 60, 61)] == [
            "pass",
            "pass",
            "warn",
            "warn",
            "fail",
        ]
    assert isinstance(band(replace(launch(), axes={"call": "stream-create-destroy"})), Unavailable)


def test_figure_is_rate_or_time() -> None:
    assert measured_value(gemm(rate=790e12)) == (pytest.approx(790e12, rel=1e-3), "FLOP/s")
    assert measured_value(case("copy", direction="h2d"))[1] == "B/s"
    assert measured_value(launch()) == (launch().median_s, "s")
