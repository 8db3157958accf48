from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from bench.example_results import (
    FAILED_VERIFICATION,
    NVML_FIELDS,
    gemm,
    launch,
    machine,
    result,
    samples_near,
)

from cudakit.bench.case import Method, Rule
from cudakit.bench.compare import compare, present_comparison
from cudakit.bench.report import present
from cudakit.bench.report.nvbench import nvbench
from cudakit.bench.result import BenchResult
from cudakit.bench.roofline import Work, limit
from cudakit.bench.stats import Samples
from cudakit.report import console, csv, html, markdown
from cudakit.report.document import Columns, Document, Note, Section, Table, View, walk
from cudakit.units import Unavailable

Golden = Callable[[str, str], None]

CUBES = result(
    *(gemm(size, rate=rate) for size, rate in ((1024, 3e14), (4096, 7e14), (8192, 79e13)))
)
AGAINST_TORCH = result(gemm(), gemm(library="torch", rate=795e12), gemm(4096, rate=7e14))
# Samples whose CI is wider than the default precision, because a limit ended sampling.
IMPRECISE = Samples(tuple(1e-3 + 1e-5 * (i * 37 % 64) for i in range(64)), converged=False)
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
def test_report_on_terminal(width: int, golden: Golden) -> None:
    golden(f"bench-gemm-{width}.txt", console.render(present(CUBES), width=width, color=False))


def test_comparison_on_terminal(golden: Golden) -> None:
    report = compare(CUBES, SLOWER)

    golden(
        "bench-compare-120.txt", console.render(present_comparison(report), width=120, color=False)
    )


def test_report_with_baseline_in_markdown(golden: Golden) -> None:
    golden("bench-gemm.md", markdown.render(present(AGAINST_TORCH)))


def test_results_as_csv(golden: Golden) -> None:
    golden("bench-gemm.csv", "".join(csv.render(present(AGAINST_TORCH))))


def test_results_in_nvbench_format(golden: Golden) -> None:
    golden("bench-gemm-nvbench.json", nvbench(present(AGAINST_TORCH)))


def test_detailed_report_renders_as_page() -> None:
    page = html.render(present(CUBES, detail=True))

    assert "Roofline" in page
    assert "Distribution of the samples" in page


def test_views_name_existing_columns() -> None:
    document = present(CUBES, detail=True)
    sections = [node for node in document.nodes if isinstance(node, Section)]
    all_nodes = list(walk(document.nodes))
    columns = {node.name for node in all_nodes if isinstance(node, Columns)}
    views = [node for node in all_nodes if isinstance(node, View)]

    assert {name for view in views for name in view.columns} <= columns
    assert [section.title for section in sections] == [
        *("By m = n = k", "Roofline", "Distribution of the samples")
    ]


def test_single_varying_axis_has_curve() -> None:
    cases = (
        replace(gemm(size), axes={"size_bytes": 2**exponent})
        for exponent, size in enumerate((64, 128, 256))
    )
    sections = [
        node.title
        for node in present(result(*cases), detail=True).nodes
        if isinstance(node, Section)
    ]

    assert sections[0] == "By size"


def test_common_axes_are_in_caption() -> None:
    report = table(present(CUBES))

    assert [column.name for column in report.columns][:3] == ["m", "n", "k"]
    assert report.caption.startswith("All cases: dtype bf16.")


def test_latency_has_neither_rate_nor_peak() -> None:
    names = [column.name for column in table(present(result(launch()))).columns]

    assert names == ["kernel", "time", "±", "SM clock"]


def test_baseline_is_faint_and_has_relative_rate() -> None:
    report = table(present(AGAINST_TORCH))

    assert report.faint_rows == {1}
    assert "vs torch" in [column.name for column in report.columns]


def test_simulated_result_is_labelled() -> None:
    document = present(result(gemm(), simulated=True))

    assert document.title.startswith("Simulated: ")
    assert notes(document)[0].startswith("info: Simulated: all values are computed on the CPU")


def test_wrong_values_are_an_error() -> None:
    document = present(result(gemm(verification=FAILED_VERIFICATION), gemm(4096)))
    message = notes(document)

    assert message[0].startswith("error: 8192³: wrong results: the relative error is 0.7")
    assert message[0].endswith(". No time is reported.")
    assert not any(line.startswith("ok") for line in message)


@pytest.mark.parametrize(
    ("bench_result", "expected"),
    [
        (result(gemm(), complete=False), "Interrupted after 1 case"),
        (result(gemm(), warnings=("the clock was held down",)), "The clock was held down."),
        (
            result(gemm(samples=IMPRECISE)),
            "The time limit ended sampling",
        ),
        (result(gemm(samples=Samples(tuple(1 + i / 300 for i in range(300))))), "Times drift"),
        (
            result(gemm(samples=Samples(tuple((1 + i % 2) * (1 + i * 1e-6) for i in range(200))))),
            "two groups",
        ),
        (result(gemm(rate=2e15)), "More than 2.0% above the peak"),
    ],
)
def test_doubtful_case_has_warning(bench_result: BenchResult, expected: str) -> None:
    warnings = [line for line in notes(present(bench_result)) if line.startswith("warn")]

    assert any(expected in line for line in warnings), warnings


def test_verified_cases_are_counted() -> None:
    assert notes(present(CUBES)) == ["ok: Results verified for all 3 cases."]


@pytest.mark.parametrize(
    ("bench", "stop_reason", "expected"),
    [
        ("memory", "timeout", [("The time limit ended", ("--timeout",))]),
        ("memory", "budget", [("The time budget ended", ("--budget",))]),
        ("suite", "timeout", [("The time limit ended", ())]),
        ("suite", "budget", [("The time budget ended", ("--quick",))]),
        ("memory", "interrupted", []),
    ],
)
def test_advice_after_an_early_end_names_the_option_that_ended_sampling(
    bench: str, stop_reason: str, expected: list[tuple[str, tuple[str, ...]]]
) -> None:
    case = gemm(samples=IMPRECISE, stop_reason=stop_reason)
    document = present(replace(result(case), bench=bench))

    doubts = [
        node for node in document.nodes if isinstance(node, Note) and "ended sampling" in node.text
    ]
    assert len(doubts) == len(expected)
    for doubt, (text, options) in zip(doubts, expected, strict=True):
        assert doubt.text.startswith(text)
        assert len(doubt.remedies) == len(options)
        assert all(option in remedy for option, remedy in zip(options, doubt.remedies, strict=True))


@pytest.mark.parametrize(("bench", "has_remedy"), [("memory", True), ("gds", False)])
def test_cache_option_is_advised_only_to_benches_that_have_it(bench: str, has_remedy: bool) -> None:
    document = present(replace(result(gemm(rate=2e15)), bench=bench))

    (doubt,) = [node for node in document.nodes if isinstance(node, Note) and "peak" in node.text]
    assert doubt.remedies == (("measure with --cache rotate",) if has_remedy else ())


@pytest.mark.parametrize(
    ("stop_reason", "option"), [("timeout", "--timeout"), ("budget", "--budget")]
)
def test_too_few_samples_with_the_precision_have_a_warning(stop_reason: str, option: str) -> None:
    method = Method("isolated", "rotate", rule=Rule(min_samples=100))
    precise = replace(samples_near(1e-3), converged=False)
    document = present(result(gemm(samples=precise, stop_reason=stop_reason, method=method)))

    (doubt,) = [
        node for node in document.nodes if isinstance(node, Note) and "sampling" in node.text
    ]
    assert "ended sampling before the minimum number of samples was reached" in doubt.text
    assert doubt.remedies == (f"allow more time with {option}, or fewer samples with --samples",)


@pytest.mark.parametrize(
    ("simulated", "cause"),
    [
        (False, ": the peak is wrong"),
        (True, ", because the rate of a simulated link does not depend on the GPU model"),
    ],
)
def test_rate_above_the_peak_of_a_link_has_its_cause(simulated: bool, cause: str) -> None:
    peak = limit(Work(link_bytes=1e6, link="host"), NVML_FIELDS, None)
    case = gemm(samples=samples_near(1e-6), limit=peak, environment=machine(simulated=simulated))

    (doubt,) = [
        node
        for node in present(result(case)).nodes
        if isinstance(node, Note) and node.level == "warn"
    ]
    assert doubt.text.startswith(f"Faster than the peak of the link{cause}")
    assert doubt.remedies == ()


def test_doubtful_cases_are_grouped() -> None:
    cases = (gemm(size, samples=IMPRECISE) for size in range(64, 69))
    message = notes(present(result(gemm(), *cases)))

    assert any(line.endswith(": 64³, 65³, 66³ and 2 more.") for line in message)


def test_missing_peak_has_reason_once() -> None:
    unknown = Unavailable("the peak is unknown")
    cases = [gemm(size, limit=unknown) for size in (64, 128)]

    assert "info: No % of peak for 64³, 128³: the peak is unknown." in notes(
        present(result(gemm(), *cases))
    )
    assert not any("% of peak" in line for line in notes(present(result(launch()))))


def test_result_without_cases_has_report() -> None:
    empty = result(complete=False)

    assert notes(present(empty, detail=True)) == ["warn: Interrupted after 0 cases."]


def test_slower_case_and_differences_are_warned() -> None:
    document = present_comparison(
        compare(
            CUBES, result(gemm(1024, rate=27e13, environment=machine(gpu="NVIDIA L4"))), force=True
        )
    )

    assert notes(document)[:2] == [
        "warn: 1 case: 1 slower.",
        "warn: The runs differ: GPU: NVIDIA H200 before, NVIDIA L4 after.",
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

    message = notes(present_comparison(compare(CUBES, slower)))
    (report,) = [note for note in message if "in cycles" in note]
    assert "1024³" in report
    assert "4096³" in report
    assert report.endswith(
        ": slower in time, the same in cycles, because the SM clock was 5.0% to 10.0% lower."
    )
