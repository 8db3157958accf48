from __future__ import annotations

from dataclasses import replace

import numpy as np
from bench.example_results import gemm, samples_near

from cudakit.bench.report.curves import sweeps
from cudakit.bench.result import CaseResult, GraphCosts, StepCost
from cudakit.report.document import Columns, walk
from cudakit.units import Unavailable


def curve_columns(*cases: CaseResult, graphs: tuple[GraphCosts, ...] = ()) -> dict[str, Columns]:
    nodes = walk(sweeps(cases, graphs))
    return {node.name: node for node in nodes if isinstance(node, Columns)}


def step(name: str, nodes: int, topology: str = "chain") -> CaseResult:
    axes = {"step": name, "topology": topology, "kind": "kernel", "nodes": nodes}
    example = gemm(samples=samples_near(1e-6 * nodes), operations=0.0, bytes_moved=0.0)
    return replace(example, name="graph", axes=axes, limit=Unavailable("a latency"))


def test_square_gemms_have_one_axis() -> None:
    columns = curve_columns(*(gemm(size) for size in (1024, 4096, 2048)))["sweep m=n=k"]

    assert columns.arrays["m=n=k"].tolist() == [1024, 2048, 4096]
    assert columns.arrays["amount"].tolist() == [2.0 * size**3 for size in (1024, 2048, 4096)]
    assert columns.text["unit"] == ("FLOP",)


def test_gemms_that_are_not_square_have_curve_along_varying_axis() -> None:
    cases = [
        replace(gemm(), axes={"dtype": "bf16", "m": m, "n": 64, "k": 32}) for m in (16, 32, 64)
    ]

    assert list(curve_columns(*cases)) == ["sweep m"]


def test_baseline_curve_has_colour_of_same_work_and_index_of_its_library() -> None:
    sizes = (1024, 2048, 4096)
    cudakit_cases = [gemm(size) for size in sizes]
    baseline = [gemm(size, library="torch") for size in sizes]
    fp16_cases = [replace(case, axes={**case.axes, "dtype": "fp16"}) for case in cudakit_cases]

    columns = curve_columns(*cudakit_cases, *baseline, *fp16_cases)["sweep m=n=k"]

    assert columns.text["line"] == ("bf16", "bf16 by torch", "fp16")
    assert columns.arrays["colour"].reshape(3, 3)[:, 0].tolist() == [0, 0, 1]
    assert columns.arrays["library"].reshape(3, 3)[:, 0].tolist() == [0, 1, 0]


def test_many_lines_are_split_into_few_charts() -> None:
    cases = [
        step(name, nodes, topology)
        for name in "abcdefg"
        for topology in ("chain", "fork-join")
        for nodes in (1, 8, 64)
    ]
    columns_by_name = curve_columns(*cases)

    assert list(columns_by_name) == ["sweep nodes: chain", "sweep nodes: fork-join"]
    assert columns_by_name["sweep nodes: chain"].text["line"] == tuple("abcdefg")


def test_step_has_values_of_its_fit() -> None:
    costs = GraphCosts("chain", "kernel", (StepCost("run", 1e-6, 2e-6, 0.0),), ())
    cases = [step(name, nodes) for name in ("run", "launch") for nodes in (1, 8, 64)]

    fit = curve_columns(*cases, graphs=(costs,))["sweep nodes"].arrays["fit_s"]

    assert np.allclose(fit[:3], [3e-6, 17e-6, 129e-6])
    assert np.isnan(fit[3:]).all()


def test_two_points_or_cases_without_time_have_no_curve() -> None:
    assert curve_columns(gemm(1024), gemm(2048)) == {}
    cases_without_time = [
        replace(gemm(size), median_s=Unavailable("no")) for size in (1024, 2048, 4096)
    ]
    assert curve_columns(*cases_without_time) == {}


def test_curves_in_bytes_and_in_operations_share_a_chart_of_times() -> None:
    sizes = (1_000, 10_000, 100_000)
    products, sums = (
        [
            replace(
                gemm(operations=operations, bytes_moved=8.0 * size),
                name="ops",
                axes={"operation": operation, "elements": size},
            )
            for size in sizes
        ]
        for operation, operations in (("matmul", 1e6), ("sum", 0.0))
    )

    assert np.isnan(curve_columns(*products, *sums)["sweep elements"].arrays["amount"]).all()
    assert curve_columns(*products)["sweep elements"].arrays["amount"].tolist() == [1e6] * 3
    assert curve_columns(*sums)["sweep elements"].text["unit"] == ("B",)
