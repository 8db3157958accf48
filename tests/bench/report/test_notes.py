from __future__ import annotations

from dataclasses import replace

from bench.example_results import gemm, launch

from cudakit.bench.case import Method
from cudakit.bench.report.notes import describe_method, method_rows
from cudakit.bench.result import CaseResult
from cudakit.report.document import Text

COLD = Method("isolated", "rotate", buffer_sets=8)
HOT = Method("batch", "hot", executions=500)


def describe_methods(*cases: CaseResult) -> list[str]:
    rows = method_rows(cases)
    assert {name for name, _ in rows} == {"method"}
    return [value.value for _, value in rows if isinstance(value, Text)]


def test_cases_of_one_method_share_row_with_ranges() -> None:
    (row,) = describe_methods(
        gemm(method=COLD), gemm(4096, method=replace(COLD, buffer_sets=64, warmup_s=1.5))
    )

    assert "8 to 64 buffer sets" in row
    assert row.endswith("warm-up 0 s to 1.50 s")


def test_methods_are_named_by_distinguishing_axis() -> None:
    cold, hot, second_hot = gemm(method=COLD), gemm(4096, method=HOT), gemm(2048, method=HOT)

    rows = describe_methods(cold, hot, second_hot)

    assert [row.partition(": ")[0] for row in rows] == ["8192", "4096, 2048"]


def test_group_without_distinguishing_axis_is_counted() -> None:
    rows = describe_methods(gemm(method=COLD), gemm(method=HOT), launch(method=HOT))

    assert [row.partition(": ")[0] for row in rows] == ["1 case", "2 cases"]


def copy_case(direction: str, size_bytes: int, method: Method) -> CaseResult:
    return replace(
        gemm(method=method), name="copy", axes={"direction": direction, "size_bytes": size_bytes}
    )


def test_group_name_has_unique_axis_values_and_labels_of_remaining_cases() -> None:
    rows = describe_methods(
        copy_case("h2d", 4096, HOT),
        copy_case("h2d", 65536, HOT),
        copy_case("d2d", 4096, HOT),
        copy_case("d2d", 65536, COLD),
    )

    assert [row.partition(": ")[0] for row in rows] == ["d2d 4.00 KiB, h2d", "d2d 64.0 KiB"]


def test_large_group_is_counted_with_size_range() -> None:
    reads = [copy_case("read", 2**at, HOT if at < 18 else COLD) for at in range(8, 28)]
    copies = [copy_case("copy", 2**at, HOT if at < 17 else COLD) for at in range(8, 28)]

    rows = describe_methods(*reads, *copies)

    assert rows[0].startswith("19 cases of 256 B to 128 KiB: ")
    assert rows[1].startswith("21 cases of 128 KiB to 128 MiB: ")


def test_group_of_one_bench_is_named_by_bench() -> None:
    rows = describe_methods(gemm(method=COLD), gemm(4096, method=COLD), launch())

    assert [row.partition(": ")[0] for row in rows] == ["gemm", "launch"]


def test_interleaved_libraries_and_steps_are_named() -> None:
    interleaved_method = replace(HOT, interleaved=("cudakit", "cudakit"))
    steps = [
        replace(gemm(method=interleaved_method), name="graph", axes={"step": step, "nodes": 8})
        for step in ("replay", "eager")
    ]
    with_baselines = replace(HOT, interleaved=("cudakit", "torch", "cupy"))

    assert describe_methods(*steps)[0].endswith("; interleaved samples of replay, eager")
    assert describe_methods(gemm(method=with_baselines))[0].endswith(
        "; interleaved samples of cudakit, torch, cupy"
    )
    description = describe_method([replace(HOT, interleaved=("all algorithms",))])
    assert description.endswith("; interleaved samples of all algorithms")
    assert "interleaved" not in describe_methods(gemm(method=interleaved_method))[0]


def test_time_of_bench_alloc_includes_the_free() -> None:
    case = replace(launch(method=Method("call", "hot")), name="alloc")

    assert describe_methods(case)[0].startswith("host time of one allocation and its free; ")


def test_launch_to_start_has_a_method_row_of_its_own() -> None:
    cases = [
        replace(launch(method=Method("call", "hot")), axes={"call": call})
        for call in ("launch", "launch-to-start")
    ]

    first_text, second_text = describe_methods(*cases)
    assert first_text.startswith("launch: host time of the call; ")
    assert second_text.startswith(
        "launch-to-start: host time until the host sees the first write of the kernel; "
    )


def test_single_execution_is_singular() -> None:
    assert describe_method([replace(HOT, executions=1)]).startswith("1 execution per sample, ")


def test_every_mode_and_l2_state_is_described() -> None:
    assert describe_method([HOT]).startswith(
        "500 executions per sample, timed by CUDA events; L2 hot; "
    )
    for mode in ("isolated", "batch", "graph", "host", "call"):
        for cache in ("rotate", "flush", "hot"):
            assert "{" not in describe_method([Method(mode, cache)])
