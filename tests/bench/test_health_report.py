from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.example_results import FAILED_VERIFICATION, gemm, launch, machine, result

from cudakit.bench.case import Method
from cudakit.bench.health import SkippedBench, SuiteResult, assess_health, present_health
from cudakit.bench.report.nvbench import nvbench
from cudakit.bench.result import CaseResult
from cudakit.report import console, csv, html, markdown
from cudakit.report.document import Note
from cudakit.units import Unavailable

Golden = Callable[[str, str], None]
GEMM_NOT_RUN = SkippedBench(
    "gemm", "nvmath-python is not installed", "pip install 'nvmath-python>=1.0,<2'"
)


def suite(*cases: CaseResult, **options: Any) -> SuiteResult:
    simulated = bool(cases) and cases[0].environment.simulated
    bench_result = result(*cases, bench="suite", simulated=simulated)
    return assess_health(bench_result, quick=True, fields={}, **options)


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
