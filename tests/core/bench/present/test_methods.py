from __future__ import annotations

from dataclasses import replace

from core.bench.made import gemm, launch

from cudakit.core.bench.method import Method
from cudakit.core.bench.present.methods import method_rows, method_words
from cudakit.core.bench.result import CaseResult
from cudakit.document import Text

COLD = Method("isolated", "rotate", buffer_sets=8)
HOT = Method("batch", "hot", executions=500)


def words(*cases: CaseResult) -> list[str]:
    rows = method_rows(cases)
    assert {name for name, _ in rows} == {"method"}
    return [value.value for _, value in rows if isinstance(value, Text)]


def test_cases_that_were_measured_alike_share_a_row_with_the_range_of_its_numbers() -> None:
    (row,) = words(
        gemm(method=COLD), gemm(4096, method=replace(COLD, buffer_sets=64, warmup_s=1.5))
    )

    assert "8 to 64 buffer sets" in row
    assert row.endswith("warm-up 0 s to 1.5 s")


def test_methods_that_differ_are_named_by_the_axis_that_tells_them_apart() -> None:
    cold, hot, other = gemm(method=COLD), gemm(4096, method=HOT), gemm(2048, method=HOT)

    rows = words(cold, hot, other)

    assert [row.partition(": ")[0] for row in rows] == ["8192", "4096, 2048"]


def test_where_no_axis_does_cases_are_counted() -> None:
    rows = words(gemm(method=COLD), gemm(method=HOT), launch(method=HOT))

    assert [row.partition(": ")[0] for row in rows] == ["1 case", "2 cases"]


def test_every_mode_and_cache_has_words() -> None:
    assert method_words([HOT]).startswith("500 executions between two events; L2 cache hot; ")
    for mode in ("isolated", "batch", "graph", "host", "call"):
        for cache in ("rotate", "flush", "hot"):
            assert "{" not in method_words([Method(mode, cache)])
