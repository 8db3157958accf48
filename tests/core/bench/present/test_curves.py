from __future__ import annotations

from dataclasses import replace

import numpy as np
from core.bench.made import gemm, times

from cudakit.core.bench.present.curves import sweeps
from cudakit.core.bench.result import CaseResult, GraphCosts, StepCost
from cudakit.document import Columns, Section
from cudakit.units import Unavailable


def pictures(*cases: CaseResult, graphs: tuple[GraphCosts, ...] = ()) -> dict[str, Columns]:
    sections = [node for node in sweeps(cases, graphs) if isinstance(node, Section)]
    nodes = [node for section in sections for node in section.nodes]
    return {node.name: node for node in nodes if isinstance(node, Columns)}


def step(name: str, nodes: int, topology: str = "chain") -> CaseResult:
    axes = {"step": name, "topology": topology, "kind": "kernel", "nodes": nodes}
    made = gemm(samples=times(1e-6 * nodes), operations=0.0, bytes_moved=0.0)
    return replace(made, name="graph", axes=axes, limit=Unavailable("a latency"))


def test_square_gemms_have_one_axis() -> None:
    found = pictures(*(gemm(size) for size in (1024, 4096, 2048)))["sweep m=n=k"]

    assert found.arrays["m=n=k"].tolist() == [1024, 2048, 4096]
    assert found.arrays["amount"].tolist() == [2.0 * size**3 for size in (1024, 2048, 4096)]
    assert found.text["unit"] == ("FLOP",)


def test_other_gemms_have_curve_along_varying_axis() -> None:
    cases = [
        replace(gemm(), axes={"dtype": "bf16", "m": m, "n": 64, "k": 32}) for m in (16, 32, 64)
    ]

    assert list(pictures(*cases)) == ["sweep m"]


def test_baseline_has_colour_of_same_work_and_own_library_index() -> None:
    sizes = (1024, 2048, 4096)
    own = [gemm(size) for size in sizes]
    baseline = [gemm(size, library="torch") for size in sizes]
    half = [replace(case, axes={**case.axes, "dtype": "fp16"}) for case in own]

    found = pictures(*own, *baseline, *half)["sweep m=n=k"]

    assert found.text["line"] == ("bf16", "bf16 by torch", "fp16")
    assert found.arrays["colour"].reshape(3, 3)[:, 0].tolist() == [0, 0, 1]
    assert found.arrays["library"].reshape(3, 3)[:, 0].tolist() == [0, 1, 0]


def test_many_lines_are_split_into_few_charts() -> None:
    cases = [
        step(name, nodes, topology)
        for name in "abcdefg"
        for topology in ("chain", "fork-join")
        for nodes in (1, 8, 64)
    ]
    found = pictures(*cases)

    assert list(found) == ["sweep nodes: chain", "sweep nodes: fork-join"]
    assert found["sweep nodes: chain"].text["line"] == tuple("abcdefg")


def test_step_has_values_of_its_fit() -> None:
    costs = GraphCosts("chain", "kernel", (StepCost("run", 1e-6, 2e-6, 0.0),), ())
    cases = [step(name, nodes) for name in ("run", "launch") for nodes in (1, 8, 64)]

    fit = pictures(*cases, graphs=(costs,))["sweep nodes"].arrays["fit_s"]

    assert np.allclose(fit[:3], [3e-6, 17e-6, 129e-6])
    assert np.isnan(fit[3:]).all()


def test_two_points_or_cases_without_time_make_no_curve() -> None:
    assert pictures(gemm(1024), gemm(2048)) == {}
    nothing = [replace(gemm(size), median_s=Unavailable("no")) for size in (1024, 2048, 4096)]
    assert pictures(*nothing) == {}
