from __future__ import annotations

from dataclasses import replace

from bench.example_results import gemm, samples_near

from cudakit.bench.graph import are_graph_steps as are_graph_operations
from cudakit.bench.report.table import cases_table
from cudakit.bench.result import CaseResult
from cudakit.report.document import Seconds, Text
from cudakit.units import Unavailable

TIMES = {1: 2.0**-20, 8: 2.0**-18}


def step(name: str, nodes: int, topology: str = "chain") -> CaseResult:
    axes = {"step": name, "topology": topology, "kind": "kernel", "nodes": nodes}
    return replace(gemm(samples=samples_near(TIMES[nodes])), name="graph", axes=axes)


def step_of_all_sizes(name: str, topology: str = "chain") -> list[CaseResult]:
    return [step(name, nodes, topology) for nodes in TIMES]


def test_step_has_row_with_time_per_number_of_nodes() -> None:
    table = cases_table([*step_of_all_sizes("capture"), *step_of_all_sizes("launch")])

    assert [column.name for column in table.columns] == ["step", "1 node", "8 nodes"]
    assert table.rows == tuple(
        (Text(name), Seconds(TIMES[1]), Seconds(TIMES[8])) for name in ("capture", "launch")
    )


def test_rows_of_steps_of_one_graph_are_adjacent() -> None:
    cases = [
        step(name, nodes, topology)
        for nodes in TIMES
        for topology in ("fork-join", "chain")
        for name in ("run", "launch")
    ]
    table = cases_table(cases)

    assert [row[:2] for row in table.rows] == [
        (Text("fork-join"), Text("run")),
        (Text("fork-join"), Text("launch")),
        (Text("chain"), Text("run")),
        (Text("chain"), Text("launch")),
    ]


def test_steps_caption_has_ci_and_clock() -> None:
    caption = cases_table([*step_of_all_sizes("run"), *step_of_all_sizes("launch")]).caption

    assert caption.startswith(
        "Median time of each step. All cases: topology chain, node type kernel. ±: "
    )
    assert "half the width of the 95% CI" in caption
    assert caption.endswith("SM clock: 1755 MHz.")


def test_missing_step_time_is_shown_as_dash() -> None:
    table = cases_table([*step_of_all_sizes("run"), step("launch", 1)])

    assert table.rows[1][1] == Seconds(TIMES[1])
    assert table.rows[1][2] == Text("-")


def test_cases_of_one_size_or_step_are_listed() -> None:
    assert not are_graph_operations([gemm(), *step_of_all_sizes("run")])
    assert not are_graph_operations([step("run", 1), step("launch", 1)])
    assert not are_graph_operations(step_of_all_sizes("run"))
    assert len(cases_table([step("run", 1), step("launch", 1)]).rows) == 2


def test_transfer_counts_of_gds_leave_out_cases_without_a_time() -> None:
    axes = {"size_bytes": 4, "direction": "read"}
    measured = replace(gemm(), name="gds", axes=axes, operations=0, bytes_moved=256)
    not_run = replace(measured, median_s=Unavailable("not run"), bytes_moved=0)

    assert "transfers of a sample (64)." in cases_table([measured, not_run]).caption
    assert "transfers of a sample." in cases_table([not_run]).caption
