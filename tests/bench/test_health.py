""""""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from bench.example_results import FAILED_VERIFICATION, gemm, launch, machine, result

from cudakit.bench.case import Method
from cudakit.bench.health import (
    Band,
    SkippedBench,
    SuiteResult,
    assess_health,
    band,
    figure,
    figure_name,
    measured_value,
    present_health,
)
from cudakit.bench.report.nvbench import nvbench
from cudakit.bench.result import CaseResult
from cudakit.bench.stats import Samples
from cudakit.report import console, csv, html, json, markdown
from cudakit.report.document import Note
from cudakit.units import Unavailable

REASON = Unavailable("cublaslt does not offer it on this GPU")


def suite(*cases: CaseResult, **changes: Any) -> SuiteResult:
    simulated = bool(cases) and all(case.environment.simulated for case in cases)
    return assess_health(
        result(*cases, bench="suite", simulated=simulated), quick=True, fields={}, **changes
    )


def unsupported() -> CaseResult:
    case = gemm(samples=Samples((), converged=False), limit=REASON, verification=REASON)
    return replace(case, median_s=REASON)


def test_health_is_that_of_worst_figure() -> None:
    slow_case, wrong_case = gemm(rate=720e12), gemm(verification=FAILED_VERIFICATION)

    assert suite(gemm(), launch()).health == "pass"
    assert suite(gemm(), slow_case, launch()).health == "warn"
    suite_result = suite(gemm(), slow_case, wrong_case)
    assert suite_result.health == "fail"
    assert [item.health for item in suite_result.figures] == ["pass", "warn", "fail"]
    assert isinstance(suite_result.figures[2].reached, Unavailable)


def test_case_without_sample_fails_and_unsupported_case_does_not() -> None:
    assert figure(gemm(samples=Samples(()))).health == "fail"
    assert figure(unsupported()).health == REASON
    assert suite(gemm(), unsupported()).health == "pass"


def test_figure_without_expected_value_is_not_assessed() -> None:
    case = gemm(environment=machine(gpu="NVIDIA L4"), limit=Unavailable("no clock"))

    suite_result = suite(case)
    assert suite_result.health == Unavailable(
        "not assessed: no expected values are known for this GPU"
    )
    assert suite_result.figures[0].health == Unavailable("no clock")


def test_simulated_gpu_is_assessed_only_for_wrong_values() -> None:
    simulated = machine(simulated=True)

    suite_result = suite(gemm(environment=simulated, rate=1e9), launch(environment=simulated))
    assert suite_result.health == Unavailable(
        "not assessed: all values are simulated, computed on the CPU"
    )
    assert {item.health for item in suite_result.figures} == {suite_result.health}
    assert {item.band for item in suite_result.figures} == {suite_result.health}
    assert suite(gemm(environment=simulated, verification=FAILED_VERIFICATION)).health == "fail"


def test_only_cases_out_of_band_have_causes() -> None:
    power_capped = machine(power_limit_w=400.0)
    message = "the power limit is 400 W instead of the default 700 W"

    assert suite(gemm(), launch(environment=power_capped)).causes == ()
    assert suite(gemm(rate=5e14, environment=power_capped), launch()).causes == (message,)


def test_json_has_health_and_measurement() -> None:
    plain = json.render(suite(gemm(rate=720e12), unsupported()))

    assert '"schema": "cudakit.suite/1"' in plain
    assert '"schema": "cudakit.bench/1"' in plain
    assert '"health": "warn"' in plain


L4 = machine(gpu="NVIDIA L4")


def case_of(name: str, **axes: str | int) -> CaseResult:
    """Return a case that moves data."""
    return replace(gemm(), name=name, axes=axes, operations=0.0, bytes_moved=2.0**30)


def known_band(suite_result: Band | Unavailable) -> Band:
    assert isinstance(suite_result, Band)
    return suite_result


@pytest.mark.parametrize(
    ("rate", "health"),
    [(793e12, "pass"), (745e12, "pass"), (720e12, "warn"), (600e12, "fail"), (940e12, "warn")],
)
def test_health_of_rate_depends_on_share_of_measured_rate(rate: float, health: str) -> None:
    suite_result = known_band(band(gemm()))

    assert (suite_result.expected, suite_result.source) == (793e12, "measured")
    assert suite_result.health_of(rate) == health


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (gemm(), "gemm bf16"),
        (case_of("copy", direction="h2d", size_bytes=4096), "copy h2d"),
        (case_of("copy", direction="peer", peer=1, access="direct"), "copy peer to 1"),
        (case_of("memory", operation="triad"), "memory triad"),
        (case_of("launch", call="launch-to-start"), "launch-to-start"),
        (case_of("alloc", allocator="stream-ordered"), "alloc stream-ordered"),
        (launch(), "launch"),
    ],
)
def test_figure_is_named_after_axis_value(case: CaseResult, name: str) -> None:
    assert figure_name(case) == name


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (case_of("copy", direction="h2d"), 55.5e9),
        (case_of("copy", direction="d2h"), 55.4e9),
        (case_of("copy", direction="d2d"), 4260e9),
        (case_of("memory", operation="copy"), 4273e9),
        (case_of("memory", operation="triad"), 4377e9),
    ],
)
def test_h200_has_measured_rates(case: CaseResult, expected: float) -> None:
    assert known_band(band(case)).expected == expected


def test_other_models_have_derived_rates_with_wider_band() -> None:
    case = gemm(environment=L4)
    suite_result = known_band(band(case))
    datasheet = 989.4e12

    assert suite_result.source == "derived"
    assert suite_result.expected == pytest.approx(0.75 * datasheet, rel=1e-3)
    assert suite_result.health_of(0.8 * suite_result.expected) == "pass"
    assert suite_result.health_of(0.7 * suite_result.expected) == "warn"
    assert suite_result.health_of(0.4 * suite_result.expected) == "fail"
    assert suite_result.health_of(1.3 * suite_result.expected) == "pass"


def test_case_without_peak_has_reason_instead_of_expected_value() -> None:
    case = gemm(environment=L4, limit=Unavailable("the memory clock is unknown"))

    assert band(case) == Unavailable("the memory clock is unknown")
    assert isinstance(band(case_of("copy", direction="pageable-h2d")), Unavailable)
    assert isinstance(band(case_of("sort", direction="up")), Unavailable)


def test_latency_has_upper_bound() -> None:
    for environment in (machine(), L4):
        suite_result = known_band(band(launch(environment=environment)))

        assert (suite_result.unit, suite_result.source) == ("s", "bound")
        assert [
            suite_result.health_of(microseconds * 1e-6) for microseconds in (1, 20, 21, 60, 61)
        ] == [
            "pass",
            "pass",
            "warn",
            "warn",
            "fail",
        ]
    assert isinstance(band(replace(launch(), axes={"call": "stream-create-destroy"})), Unavailable)


def test_figure_is_rate_or_time() -> None:
    assert measured_value(gemm(rate=790e12)) == (pytest.approx(790e12, rel=1e-3), "FLOP/s")
    assert measured_value(case_of("copy", direction="h2d"))[1] == "B/s"
    assert measured_value(launch()) == (launch().median_s, "s")


Golden = Callable[[str, str], None]
GEMM_NOT_RUN = SkippedBench(
    "gemm", "nvmath-python is not installed", "pip install 'nvmath-python>=1.0,<2'"
)


def headline(suite_result: SuiteResult) -> Note:
    return next(node for node in present_health(suite_result).nodes if isinstance(node, Note))


def test_health_check_on_terminal(golden: Golden) -> None:
    capped = machine(power_limit_w=400.0, other_processes=1)
    assert capped.after
    capped = replace(capped, after=replace(capped.after, power_w=399.0))
    wrong = gemm(rate=6e14, verification=FAILED_VERIFICATION, environment=capped)
    suite_result = suite(
        launch(method=Method("call", "hot"), environment=capped),
        gemm(rate=5e14, environment=capped),
        replace(wrong, axes=wrong.axes | {"dtype": "fp16"}),
    )

    golden(
        "bench-suite-100.txt", console.render(present_health(suite_result), width=100, color=False)
    )


def test_headline_has_verdict_bad_figures_and_causes() -> None:
    capped = machine(power_limit_w=400.0)
    note = headline(suite(gemm(), gemm(rate=5e14, environment=capped)))

    assert note.level == "error"
    assert note.text == (
        "Fail: 1 of 2 figures are not as expected: gemm bf16 (63.0% of expected). Likely causes: the power "
        "limit "
        "is 400 W instead of the default 700 W."
    )


def test_failing_suite_without_cause_suggests_commands() -> None:
    note = headline(suite(gemm(rate=720e12)))

    assert (note.level, note.text[:8]) == ("warn", "Warning:")
    assert any("cudakit doctor" in remedy for remedy in note.remedies)


def test_headline_of_healthy_gpu() -> None:
    note = headline(suite(gemm(), launch()))

    assert (note.level, note.text) == (
        "ok",
        "Pass: all 2 assessed figures are as expected.",
    )


def test_unassessed_suite_gives_reason() -> None:
    simulated = machine(simulated=True)
    unknown = gemm(environment=machine(gpu="NVIDIA L4"), limit=Unavailable("no clock"))

    assert headline(suite(gemm(environment=simulated))).text.startswith(
        "Not assessed: all values are simulated"
    )
    assert headline(suite(unknown)).text.startswith("Not assessed: no expected values")


def test_bench_that_was_not_run_has_remedy() -> None:
    suite_result = present_health(suite(gemm(), left_out=[GEMM_NOT_RUN]))
    notes = [node for node in suite_result.nodes if isinstance(node, Note)]

    (note,) = [note for note in notes if "was not run" in note.text]
    assert note.remedies == ("pip install 'nvmath-python>=1.0,<2'",)


def test_health_check_renders_in_every_format() -> None:
    suite_result = present_health(suite(gemm(), launch()), detail=True)

    assert "Distribution of the samples" in html.render(suite_result)
    assert "gemm bf16" in markdown.render(suite_result)
    assert "median_s" in "".join(csv.render(suite_result))
    assert "gemm" in nvbench(suite_result)
    assert present_health(suite()).nodes
