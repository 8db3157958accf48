"""The report of ``bench gemm`` on the simulated device, with baselines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import pytest
from bench.example_results import gemm, launch, machine, result, samples_near

from cudakit.bench.gemm import GemmSpec
from cudakit.bench.pipeline import run
from cudakit.bench.report import present
from cudakit.bench.report.nvbench import nvbench
from cudakit.bench.report.table import relative_rate
from cudakit.bench.result import BenchResult, CaseResult
from cudakit.bench.stats import Samples
from cudakit.gpu.api.facts import RunContext
from cudakit.gpu.api.gemm import Gemm, GemmSettings
from cudakit.gpu.sim import Sim
from cudakit.report import console, csv, html, markdown
from cudakit.report.document import Document, Note, Table, Text, Value
from cudakit.units import Unavailable

Golden = Callable[[str, str], None]
REASON = Unavailable("cublas does not do that")


def simulated_result() -> BenchResult:
    cube = Gemm(dtype="bf16", m=128, n=128, k=128)
    gemms = (
        cube,
        replace(cube, epilogue="gelu-bias"),
        Gemm(dtype="int8", m=96, n=64, k=32, layout="tn"),
        Gemm(dtype="int8", m=96, n=64, k=32, epilogue="relu"),
    )
    spec = GemmSpec(
        gemms=gemms,
        baselines=("cublas",),
        mode="isolated",
        cache="hot",
        settings=GemmSettings(deterministic=True),
    )
    run_context = RunContext(versions={"CUDA": "13.0", "cudakit": "0.1.0"})
    with closing(Sim()) as gpu:
        return run(spec, gpu, run_context=run_context, now_ns=lambda: 0)


def unsupported(case: CaseResult) -> CaseResult:
    reason = REASON
    empty = replace(
        case, samples_s=(), sm_clock_hz=(), limit=reason, verification=reason, verified=False
    )
    return replace(
        empty,
        median_s=reason,
        ci95_s=reason,
        ratio_to_limit=reason,
        ratio_to_datasheet=reason,
        statistics=reason,
        energy_j=reason,
    )


def table(document: Document) -> Table:
    return next(node for node in document.nodes if isinstance(node, Table))


def column_names(*cases: CaseResult) -> list[str]:
    return [column.name for column in table(present(result(*cases))).columns]


def caption(*cases: CaseResult) -> str:
    return table(present(result(*cases))).caption


def notes(*cases: CaseResult) -> list[str]:
    nodes = present(result(*cases)).nodes
    return [f"{node.level}: {node.text}" for node in nodes if isinstance(node, Note)]


@pytest.mark.parametrize("width", [80, 160])
def test_report_of_simulated_run_on_terminal(width: int, golden: Golden) -> None:
    text = console.render(present(simulated_result()), width=width, color=False)

    golden(f"bench-gemm-sim-{width}.txt", text)


def test_unsupported_case_renders_in_every_format() -> None:
    document = present(simulated_result(), detail=True)

    assert "n/a" in markdown.render(document)
    assert "Roofline" in "".join(html.render(document))
    assert "".join(csv.render(document)).count("\n") == 9
    assert '"is_skipped": true' in nvbench(document)


def test_cases_not_run_are_grouped_by_reason() -> None:
    cases = [gemm(), *(unsupported(gemm(size, library="cublas")) for size in (1, 2, 3, 4, 5))]

    message = notes(*cases)

    assert message == [
        "info: Not run: 1³ by cublas, 2³ by cublas, 3³ by cublas and 2 more: cublas does not do that.",
        "ok: Results verified for 1 of 6 cases (5 not run).",
    ]


def rate(cudakit_case: CaseResult, baseline_case: CaseResult) -> Value:
    return relative_rate("torch", cudakit_case, (cudakit_case, baseline_case))


def rate_text(cudakit_case: CaseResult, baseline_case: CaseResult) -> str:
    value = rate(cudakit_case, baseline_case)
    assert isinstance(value, Text)
    return value.value


def test_relative_rate_of_pairs_ignores_common_drift() -> None:
    drifting = [1e-3 * (1 + 0.3 * (i % 13) / 13) for i in range(200)]
    cudakit_case = gemm(samples=Samples(tuple(drifting)))
    slower = gemm(library="torch", samples=Samples(tuple(1.02 * t for t in drifting)))

    assert rate_text(cudakit_case, slower) == "102.0% ± 0.0%"


def test_relative_rate_has_ci_of_pairs() -> None:
    cudakit_case = gemm(samples=samples_near(1e-3))
    noisy = Samples(tuple(1e-3 * (1 + 0.1 * ((i * 37 % 64) / 32 - 1)) for i in range(64)))

    rate, _, half_width = rate_text(cudakit_case, gemm(library="torch", samples=noisy)).partition(
        " ± "
    )

    assert rate.startswith(("100.", "99."))
    assert 1 < float(half_width.rstrip("%")) < 5


def test_rounds_of_different_length_are_paired_separately() -> None:
    cudakit_case = gemm(samples=Samples((1.0, 1.0, 1.0, 2.0), rounds=(3, 1)))
    baseline_case = gemm(library="torch", samples=Samples((1.1, 2.2, 2.2, 2.2), rounds=(1, 3)))

    assert rate_text(cudakit_case, baseline_case).startswith("110.0%")


def test_case_without_time_has_no_relative_rate() -> None:
    assert rate(gemm(), unsupported(gemm(library="torch"))) == REASON
    assert rate(unsupported(gemm()), gemm(library="torch")) == REASON
    assert isinstance(rate(gemm(), gemm(4096, library="torch")), Unavailable)
    assert rate(gemm(library="torch"), gemm()) == Text("-")


def test_measured_baselines_have_columns_and_caption() -> None:
    cases = (gemm(), gemm(library="torch"), gemm(library="cupy"))

    assert [name for name in column_names(*cases) if name.startswith(("vs ", "%"))] == [
        *("vs torch", "vs cupy", "% of peak", "% of datasheet")
    ]
    assert "Vs torch and vs cupy: rate relative to the baseline" in caption(*cases)
    without_baseline_time = (gemm(), unsupported(gemm(library="torch")))
    assert "vs torch" not in column_names(*without_baseline_time)
    assert "baseline" not in caption(*without_baseline_time)


def without_clock(case: CaseResult) -> CaseResult:
    nodes = case.limit
    assert not isinstance(nodes, Unavailable)
    unknown = Unavailable("the clock was not measured")
    return replace(
        case, sm_clock_hz=(), limit=replace(nodes, measured_s=unknown, measured_clock_hz=unknown)
    )


def test_caption_names_clock_of_peak() -> None:
    assert "at the measured SM clock. % of datasheet: the same at the SM clock" in caption(gemm())
    assert "at the SM clock that was measured, if any" in caption(gemm(), without_clock(gemm(4096)))
    unknown_clock = without_clock(gemm())
    assert "at the SM clock of the datasheet, because the clock was not measured." in caption(
        unknown_clock
    )
    assert "% of datasheet" not in column_names(unknown_clock)
    without_arithmetic = gemm(operations=0.0)
    assert "divided by the theoretical bandwidth of the memory or link. Bound: " in caption(
        without_arithmetic
    )
    assert "% of datasheet" not in column_names(without_arithmetic)
    assert "Peak" not in caption(launch())


def test_named_shape_has_column() -> None:
    named = gemm(settings={"shape": "llama3-8b qkv, 16 tokens"})
    nodes = table(present(result(named, gemm(4096))))
    index = [column.name for column in nodes.columns].index("shape")

    assert nodes.rows[0][index] == Text("llama3-8b qkv, 16 tokens")
    assert nodes.rows[1][index] == Text("-")


def test_libraries_are_listed_with_settings() -> None:
    cudakit_case = {
        "library": "cublaslt",
        "version": "13.1.0",
        "workspace_bytes": 32 << 20,
        "asked": "",
    }
    torch_settings = {"library": "torch", "version": "2.15.0", "asked": "deterministic"}
    cases = (
        gemm(settings=cudakit_case),
        gemm(4096, settings=cudakit_case),
        gemm(library="torch", settings=torch_settings),
    )

    text = markdown.render(present(result(*cases)))

    assert "**library**: cublaslt 13.1.0, workspace up to 32.0 MiB; torch 2.15.0, determin" in text


def test_unsupported_first_case_keeps_method_and_state_of_others() -> None:
    first = replace(unsupported(gemm()), environment=machine(after=None, before=None))
    text = console.render(present(result(first, gemm(4096))), width=160, color=False)

    assert "power limit 700 W" in text
