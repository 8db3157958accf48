from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from core.bench.made import WRONG, gemm, launch, machine, result, times

from cudakit.core.bench.compare import compare
from cudakit.core.bench.measurement import Samples
from cudakit.core.bench.present import present
from cudakit.core.bench.present.comparison import present_comparison
from cudakit.core.bench.present.nvbench import nvbench
from cudakit.core.bench.result import BenchResult
from cudakit.document import Columns, Document, Note, Section, Table, View
from cudakit.render import console, csv, html, markdown

Golden = Callable[[str, str], None]

CUBES = result(
    *(gemm(size, rate=rate) for size, rate in ((1024, 3e14), (4096, 7e14), (8192, 79e13)))
)
AGAINST_TORCH = result(gemm(), gemm(library="torch", rate=795e12), gemm(4096, rate=7e14))
SLOWER = result(
    gemm(1024, rate=27e13),
    gemm(4096, rate=702e12),
    gemm(8192, rate=85e13),
    gemm(2048),
)


def notes(document: Document) -> list[str]:
    return [f"{node.level}: {node.text}" for node in document.nodes if isinstance(node, Note)]


def table(document: Document) -> Table:
    return next(node for node in document.nodes if isinstance(node, Table))


@pytest.mark.parametrize("width", [80, 160])
def test_the_report_on_a_terminal(width: int, golden: Golden) -> None:
    golden(f"bench-gemm-{width}.txt", console.render(present(CUBES), width=width, color=False))


def test_the_comparison_on_a_terminal(golden: Golden) -> None:
    found = compare(CUBES, SLOWER)

    golden(
        "bench-compare-120.txt", console.render(present_comparison(found), width=120, color=False)
    )


def test_the_report_against_a_peer_in_markdown(golden: Golden) -> None:
    golden("bench-gemm.md", markdown.render(present(AGAINST_TORCH, detail=True)))


def test_the_figures_as_csv(golden: Golden) -> None:
    golden("bench-gemm.csv", "".join(csv.render(present(AGAINST_TORCH))))


def test_the_figures_for_nvbench(golden: Golden) -> None:
    golden("bench-gemm-nvbench.json", nvbench(present(AGAINST_TORCH)))


def test_a_page_can_be_made_of_every_detail() -> None:
    page = html.render(present(CUBES, detail=True))

    assert "Roofline" in page
    assert "Distribution of the samples" in page


def test_the_pictures_name_columns_that_are_there() -> None:
    document = present(CUBES, detail=True)
    sections = [node for node in document.nodes if isinstance(node, Section)]
    inner = [*document.nodes, *(node for section in sections for node in section.nodes)]
    columns = {node.name for node in inner if isinstance(node, Columns)}
    views = [node for node in inner if isinstance(node, View)]

    assert {name for view in views for name in view.columns} <= columns
    assert [section.title for section in sections] == [
        *("Along m = n = k", "Roofline", "Distribution of the samples")
    ]


def test_an_axis_that_alone_varies_is_a_curve() -> None:
    cases = (
        replace(gemm(size), axes={"size_bytes": 2**at}) for at, size in enumerate((64, 128, 256))
    )
    sections = [
        node.title
        for node in present(result(*cases), detail=True).nodes
        if isinstance(node, Section)
    ]

    assert sections[0] == "Along size"


def test_axes_that_are_the_same_everywhere_stand_below_the_table() -> None:
    found = table(present(CUBES))

    assert [column.name for column in found.columns][:3] == ["m", "n", "k"]
    assert found.caption.startswith("All with dtype bf16.")


def test_a_latency_has_neither_rate_nor_limit() -> None:
    names = [column.name for column in table(present(result(launch()))).columns]

    assert names == ["kernel", "time", "±", "SM clock"]


def test_the_peer_stands_back_and_the_rate_is_compared_with_it() -> None:
    found = table(present(AGAINST_TORCH))

    assert found.faint == {1}
    assert "of torch" in [column.name for column in found.columns]


def test_a_simulated_result_says_so_first_of_all() -> None:
    document = present(result(gemm(), simulated=True))

    assert document.title.startswith("Simulated: ")
    assert notes(document)[0] == "info: Simulated: nothing here is a measurement of a GPU."


def test_wrong_values_are_an_error_and_have_no_figures() -> None:
    document = present(result(gemm(verification=WRONG), gemm(4096)))
    said = notes(document)

    assert said[0].startswith(
        "error: gemm m=8192 n=8192 k=8192 dtype=bf16: the computed values are wrong"
    )
    assert said[0].endswith("Its figures are withheld.")
    assert not any(line.startswith("ok") for line in said)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (result(gemm(), complete=False), "Interrupted after 1 case"),
        (result(gemm(), warnings=("the clock was held down",)), "The clock was held down."),
        (result(gemm(samples=replace(times(1e-3), converged=False))), "the time ran out"),
        (result(gemm(samples=Samples(tuple(1 + i / 300 for i in range(300))))), "times drift"),
        (
            result(gemm(samples=Samples(tuple((1 + i % 2) * (1 + i * 1e-6) for i in range(200))))),
            "two groups",
        ),
        (result(gemm(rate=2e15)), "faster than the limit by more than 2.0%"),
    ],
)
def test_doubtful_case_has_warning(made: BenchResult, words: str) -> None:
    warnings = [line for line in notes(present(made)) if line.startswith("warn")]

    assert any(words in line for line in warnings), warnings


def test_all_well_is_said() -> None:
    assert notes(present(CUBES)) == ["ok: 3 cases computed the right values."]


def test_many_doubtful_cases_are_counted() -> None:
    cases = (gemm(size, samples=replace(times(1e-3), converged=False)) for size in range(64, 69))
    (said,) = notes(present(result(*cases)))

    assert "and 2 more:" in said


def test_a_result_without_cases_is_still_a_document() -> None:
    empty = result(complete=False)

    assert notes(present(empty, detail=True)) == ["warn: Interrupted after 0 cases."]


def test_slower_is_an_error_and_unlike_runs_are_said() -> None:
    document = present_comparison(
        compare(
            CUBES, result(gemm(1024, rate=27e13, environment=machine(gpu="NVIDIA L4"))), force=True
        )
    )

    assert notes(document)[:2] == [
        "error: 1 slower.",
        "warn: The runs are not alike: the GPU is NVIDIA H200 and NVIDIA L4.",
    ]


def test_clock_change_behind_verdicts_is_noted_once() -> None:
    clocks = {1024: 0.95, 4096: 0.9}
    slower = result(
        *(
            replace(
                case,
                samples_s=tuple(time_s / clocks[int(case.axes["m"])] for time_s in case.samples_s),
                sm_clock_hz=tuple(hz * clocks[int(case.axes["m"])] for hz in case.sm_clock_hz),
            )
            for case in CUBES.results[:2]
        )
    )

    said = notes(present_comparison(compare(CUBES, slower)))
    (found,) = [note for note in said if "in cycles" in note]
    assert "m=1024" in found
    assert "m=4096" in found
    assert found.endswith(
        ": slower in time, the same in cycles: the clock was 5.0 to 10.0 % lower."
    )
