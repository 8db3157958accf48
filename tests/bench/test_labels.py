from __future__ import annotations

from dataclasses import replace

from bench.example_results import gemm, launch

from cudakit.bench.labels import (
    Axis,
    describe_common_axes,
    format_axis,
    full_label,
    is_square,
    short_labels,
)
from cudakit.bench.result import CaseResult


def gemm_with_shape(m: int, n: int, k: int, **other_axes: Axis) -> CaseResult:
    return replace(gemm(), axes={"dtype": "bf16", "m": m, "n": n, "k": k, **other_axes})


def graph_step(step: str, nodes: int) -> CaseResult:
    return replace(gemm(), name="graph", axes={"step": step, "nodes": nodes})


def test_label_has_varying_axes() -> None:
    cases = (
        gemm_with_shape(64, 64, 64),
        gemm_with_shape(64, 32, 64),
        gemm_with_shape(128, 128, 128),
    )

    assert short_labels(cases) == ["64³", "64×32×64", "128³"]


def test_label_of_single_case_has_all_axes() -> None:
    assert short_labels([gemm_with_shape(64, 64, 64, layout="tn")]) == ["bf16 64³ tn"]


def test_label_has_units_of_sizes_and_names_of_numbers() -> None:
    sizes = [replace(gemm(), axes={"size_bytes": size}) for size in (4096, 1 << 20)]
    batches = [gemm_with_shape(64, 64, 64, batch=count) for count in (1, 16)]

    assert short_labels(sizes) == ["4.00 KiB", "1.00 MiB"]
    assert short_labels(batches) == ["batch 1", "batch 16"]
    assert short_labels([graph_step("run", 1), graph_step("launch", 8)]) == [
        "run 1 node",
        "launch 8 nodes",
    ]


def test_label_names_baseline_and_bench_if_several_are_measured() -> None:
    cases = [gemm(), gemm(library="torch")]

    assert short_labels(cases) == ["gemm", "gemm by torch"]
    assert short_labels(cases, with_library=False) == ["gemm", "gemm"]
    assert short_labels([gemm(64), launch()]) == ["gemm 64³ bf16", "launch empty"]


def test_label_has_the_axes_in_the_order_of_its_own_bench() -> None:
    copy = replace(gemm(), name="copy", axes={"size_bytes": 4096, "direction": "h2d"})
    memory = replace(gemm(), name="memory", axes={"operation": "read", "size_bytes": 1 << 20})

    assert short_labels([copy, memory]) == ["copy 4.00 KiB h2d", "memory read 1.00 MiB"]


def test_label_of_a_call_does_not_repeat_the_name_of_its_bench() -> None:
    calls = [replace(launch(), axes={"call": call}) for call in ("launch-to-start", "event-record")]

    assert short_labels([gemm(64), *calls])[1:] == ["launch-to-start", "launch event-record"]


def test_full_label_has_every_axis_with_its_unit() -> None:
    assert full_label(gemm_with_shape(64, 64, 64, layout="tn")) == "gemm bf16 64³ tn"
    assert [full_label(case) for case in (gemm(64), launch())] == ["gemm 64³ bf16", "launch empty"]


def test_label_names_the_peer_of_a_copy_and_counts_elements() -> None:
    copy = replace(
        gemm(), name="copy", axes={"direction": "peer", "peer": 1, "size_bytes": 1 << 20}
    )
    addition = replace(gemm(), name="ops", axes={"operation": "add", "elements": 10_000})

    assert full_label(copy) == "copy peer GPU 1 1.00 MiB"
    assert full_label(addition) == "ops add 10,000 elements"


def test_short_labels_leave_out_given_axes() -> None:
    cases = (graph_step("run", 1), graph_step("run", 8), graph_step("launch", 8))

    assert short_labels(cases, omitted_axes=("nodes",)) == ["run", "run", "launch"]


def test_square_gemm_has_equal_dimensions() -> None:
    assert is_square(gemm_with_shape(8, 8, 8))
    assert not is_square(gemm_with_shape(8, 8, 9))
    assert not is_square(launch())


def test_common_axes_have_units() -> None:
    cases = [
        replace(gemm(), axes={"direction": direction, "size_bytes": 4096})
        for direction in ("h2d", "d2h")
    ]

    assert describe_common_axes(cases) == "size 4.00 KiB"
    assert format_axis("nodes", None) == "-"
