from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.bench.made import WRONG, gemm, launch, machine, result

from cudakit.core.bench.health import SuiteResult, conclude, figure
from cudakit.core.bench.measurement import Samples
from cudakit.core.bench.result import CaseResult
from cudakit.render import json
from cudakit.units import Unavailable

REFUSED = Unavailable("cublaslt does not offer it on this GPU")


def suite(*cases: CaseResult, **changes: Any) -> SuiteResult:
    simulated = all(case.environment.simulated for case in cases)
    return conclude(
        result(*cases, bench="suite", simulated=simulated), quick=True, fields={}, **changes
    )


def refused() -> CaseResult:
    made = gemm(samples=Samples((), converged=False), limit=REFUSED, verification=REFUSED)
    return replace(made, median_s=REFUSED)


def test_every_figure_is_judged_and_the_worst_is_the_verdict() -> None:
    low, wrong = gemm(rate=720e12), gemm(verification=WRONG)

    assert suite(gemm(), launch()).health == "pass"
    assert suite(gemm(), low, launch()).health == "warn"
    found = suite(gemm(), low, wrong)
    assert found.health == "fail"
    assert [one.health for one in found.figures] == ["pass", "warn", "fail"]
    assert isinstance(found.figures[2].reached, Unavailable)


def test_no_sample_is_a_failure_and_what_the_gpu_cannot_do_is_not() -> None:
    assert figure(gemm(samples=Samples(()))).health == "fail"
    assert figure(refused()).health == REFUSED
    assert suite(gemm(), refused()).health == "pass"


def test_where_nothing_is_expected_nothing_is_judged() -> None:
    made = gemm(environment=machine(gpu="NVIDIA L4"), limit=Unavailable("no clock"))

    found = suite(made)
    assert found.health == Unavailable(
        "no expectation is known of this GPU: figures are shown, and not judged"
    )
    assert found.figures[0].health == Unavailable("no expectation is known: no clock")


def test_a_simulated_gpu_is_not_judged_unless_it_computes_wrong_values() -> None:
    simulated = machine(simulated=True)

    found = suite(gemm(environment=simulated, rate=1e9), launch(environment=simulated))
    assert found.health == Unavailable("not judged: simulated")
    assert {one.health for one in found.figures} == {found.health}
    assert {one.band for one in found.figures} == {found.health}
    assert suite(gemm(environment=simulated, verification=WRONG)).health == "fail"


def test_causes_are_those_of_the_cases_that_are_out_of_band() -> None:
    capped = machine(power_limit_w=400.0)
    said = "the power limit is 400 W, not the default of 700 W"

    assert suite(gemm(), launch(environment=capped)).causes == ()
    assert suite(gemm(rate=5e14, environment=capped), launch()).causes == (said,)


def test_the_json_holds_judgements_and_the_measurement() -> None:
    plain = json.render(suite(gemm(rate=720e12), refused()))

    assert '"schema": "cudakit.suite/1"' in plain
    assert '"schema": "cudakit.bench/1"' in plain
    assert '"health": "warn"' in plain
