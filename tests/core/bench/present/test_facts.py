from __future__ import annotations

from dataclasses import replace

from core.bench.made import gemm, launch

from cudakit.core.bench.method import Method
from cudakit.core.bench.present.facts import describe_method, method_rows
from cudakit.core.bench.result import CaseResult
from cudakit.document import Text

COLD = Method("isolated", "rotate", buffer_sets=8)
HOT = Method("batch", "hot", executions=500)


def words(*cases: CaseResult) -> list[str]:
    rows = method_rows(cases)
    assert {name for name, _ in rows} == {"method"}
    return [value.value for _, value in rows if isinstance(value, Text)]


def test_cases_of_one_method_share_row_with_ranges() -> None:
    (row,) = words(
        gemm(method=COLD), gemm(4096, method=replace(COLD, buffer_sets=64, warmup_s=1.5))
    )

    assert "8 to 64 buffer sets" in row
    assert row.endswith("warm-up 0 s to 1.50 s")


def test_methods_are_named_by_distinguishing_axis() -> None:
    cold, hot, other = gemm(method=COLD), gemm(4096, method=HOT), gemm(2048, method=HOT)

    rows = words(cold, hot, other)

    assert [row.partition(": ")[0] for row in rows] == ["8192", "4096, 2048"]


def test_group_without_distinguishing_axis_is_counted() -> None:
    rows = words(gemm(method=COLD), gemm(method=HOT), launch(method=HOT))

    assert [row.partition(": ")[0] for row in rows] == ["1 case", "2 cases"]


def copied(direction: str, size_bytes: int, method: Method) -> CaseResult:
    return replace(
        gemm(method=method), name="copy", axes={"direction": direction, "size_bytes": size_bytes}
    )


def test_group_is_named_by_its_own_axis_values_and_other_labels() -> None:
    rows = words(
        copied("h2d", 4096, HOT),
        copied("h2d", 65536, HOT),
        copied("d2d", 4096, HOT),
        copied("d2d", 65536, COLD),
    )

    assert [row.partition(": ")[0] for row in rows] == ["h2d, d2d 4.00 KiB", "d2d 64.0 KiB"]


def test_large_group_is_counted_with_size_range() -> None:
    reads = [copied("read", 2**at, HOT if at < 18 else COLD) for at in range(8, 28)]
    copies = [copied("copy", 2**at, HOT if at < 17 else COLD) for at in range(8, 28)]

    rows = words(*reads, *copies)

    assert rows[0].startswith("19 cases of 256 B to 128 KiB: ")
    assert rows[1].startswith("21 cases of 128 KiB to 128 MiB: ")


def test_group_of_one_bench_is_named_by_bench() -> None:
    rows = words(gemm(method=COLD), gemm(4096, method=COLD), launch())

    assert [row.partition(": ")[0] for row in rows] == ["gemm", "launch"]


def test_interleaved_libraries_and_own_steps_are_named() -> None:
    turns = replace(HOT, interleaved=("cudakit", "cudakit"))
    steps = [
        replace(gemm(method=turns), name="graph", axes={"step": step, "nodes": 8})
        for step in ("replay", "eager")
    ]
    peers = replace(HOT, interleaved=("cudakit", "torch", "cupy"))

    assert words(*steps)[0].endswith("; interleaved: replay, eager")
    assert words(gemm(method=peers))[0].endswith("; interleaved: cudakit, torch, cupy")
    others = describe_method([replace(HOT, interleaved=("other algorithms",))])
    assert others.endswith("; interleaved: other algorithms")
    assert "interleaved" not in words(gemm(method=turns))[0]


def test_single_execution_is_singular() -> None:
    assert describe_method([replace(HOT, executions=1)]).startswith("1 execution per sample, ")


def test_every_mode_and_l2_state_is_described() -> None:
    assert describe_method([HOT]).startswith(
        "500 executions per sample, timed by CUDA events; L2 hot; "
    )
    for mode in ("isolated", "batch", "graph", "host", "call"):
        for cache in ("rotate", "flush", "hot"):
            assert "{" not in describe_method([Method(mode, cache)])
