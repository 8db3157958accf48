from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bench.fleet.example_fleet import failed_gpu, fleet_host

from cudakit.bench.fleet.analysis import analyze
from cudakit.bench.fleet.report import present_fleet
from cudakit.bench.fleet.result import FleetHost, FleetResult, HostFacts
from cudakit.report import console, csv, html, markdown
from cudakit.report.document import Note, Section, Table


def example_fleet() -> FleetResult:
    """Return a fleet with a slow GPU, a slow link, a GPU that failed, and a host that failed."""
    first = fleet_host("node-a", gpus={2: {"gemm_rate": 700e12, "power_limit_w": 500.0}})
    second = fleet_host("node-b", gpus={1: {"h2d_rate": 50e9}})
    broken = failed_gpu(3, "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error", "replace it")
    second = replace(second, gpus=(*second.gpus[:3], broken))
    unreachable = HostFacts("node-c", error="no answer within 60 s", hint="see ray status")
    return analyze([first, second, FleetHost(unreachable, ())])


def headline(result: FleetResult) -> Note:
    return next(node for node in present_fleet(result).nodes if isinstance(node, Note))


def test_report_of_a_fleet_with_findings(golden: Callable[[str, str], None]) -> None:
    golden(
        "bench-fleet-80.txt",
        console.render(present_fleet(example_fleet()), width=80, color=False),
    )


def test_csv_has_a_row_per_comparison() -> None:
    result = example_fleet()
    lines = "".join(csv.render(present_fleet(result))).splitlines()

    assert lines[0].startswith("host,gpu,peer,kind,figure,group,unit,value,peer_median")
    assert len(lines) == len(result.comparisons) + 1
    slow_lines = [line for line in lines if line.endswith("true")]
    assert [line.split(",")[:5] for line in slow_lines] == [
        ["node-b", "1", "", "link", "copy h2d"],
        ["node-a", "2", "", "gpu", "gemm bf16"],
    ]


def test_page_and_markdown_name_every_finding() -> None:
    result = example_fleet()
    page = "".join(html.render(present_fleet(result, detail=True)))
    text = "".join(markdown.render(present_fleet(result)))

    for rendered in (page, text):
        for finding in result.findings:
            assert str(finding.subject) in rendered
    assert "All figures of node-b" in page


def test_healthy_fleet_is_confirmed_with_counts() -> None:
    note = headline(analyze([fleet_host("node-a"), fleet_host("node-b")]))

    assert note == Note("ok", "None is slower than its peers: 2 hosts, 8 GPUs, 32 links compared.")


def test_single_gpu_has_nothing_to_compare() -> None:
    note = headline(analyze([fleet_host(gpu_count=1)]))

    assert note == Note("info", "Nothing was compared: no GPU has peers.")


def test_gpu_without_peers_has_a_section_with_its_figures() -> None:
    document = present_fleet(analyze([fleet_host("node-a", gpu_count=1)]))

    assert document.title.endswith("bench suite, 1 GPU on 1 host, not compared")
    titles = [node.title for node in document.nodes if isinstance(node, Section)]
    assert titles == ["Figures of node-a GPU 0, without peers", "Hosts"]
    section = next(node for node in document.nodes if isinstance(node, Section))
    (table,) = section.nodes
    assert isinstance(table, Table)
    assert len(table.rows) > 1


def test_gpu_whose_links_alone_have_peers_has_a_section_with_its_figures() -> None:
    host = fleet_host("node-a", gpu_count=4)
    document = present_fleet(analyze([replace(host, gpus=host.gpus[:1])]))

    titles = [node.title for node in document.nodes if isinstance(node, Section)]
    assert titles == [
        "Figures of the fleet",
        "Figures of node-a GPU 0, without peers",
        "Hosts",
    ]


def test_gpus_with_peers_have_no_section_of_their_own() -> None:
    document = present_fleet(analyze([fleet_host("node-a"), fleet_host("node-b")]))

    titles = [node.title for node in document.nodes if isinstance(node, Section)]
    assert titles == ["Figures of the fleet", "Hosts"]


def test_many_slow_figures_are_counted_instead_of_listed() -> None:
    slow_gpu = {"gemm_rate": 700e12, "h2d_rate": 50e9}
    hosts = [
        fleet_host(f"node-{i:03}", gpus={1: slow_gpu, 2: {"peer_rates": {0: 100e9}}})
        for i in range(20)
    ]
    text = console.render(present_fleet(analyze(hosts)), width=100, color=False)

    assert "20 more slow figures in the JSON." in text


def test_gpu_that_was_measured_under_another_index_is_named() -> None:
    host = fleet_host(gpu_count=3)
    wrong_gpu = replace(host.gpus[0], index=2)
    result = analyze([replace(host, gpus=(*host.gpus[:2], wrong_gpu))])
    text = console.render(present_fleet(result), width=100, color=False)

    assert headline(result) == Note("error", "Measured another GPU: node-a GPU 2.")
    assert "node-a GPU 2: its result is that of another GPU: GPU-node-a-0 instead of" in text


def test_fleet_of_two_models_with_one_gpu_each_says_once_that_there_are_no_peers() -> None:
    host = fleet_host(gpu_count=2)
    result = analyze([replace(host, gpus=(host.gpus[0], replace(host.gpus[1], model="L4")))])

    assert headline(result) == Note("info", "Nothing was compared: no GPU has peers.")
    assert result.warnings == ()


def test_figure_that_differs_by_less_than_the_shown_digits_names_no_slowest_gpu() -> None:
    hosts = [
        fleet_host("node-a", gpus={1: {"gemm_rate": 789.95e12}}),
        fleet_host("node-b", gpus={}),
    ]
    report = console.render(present_fleet(analyze(hosts)), width=160, color=False)
    gemm_rows = [line.rstrip() for line in report.splitlines() if "gemm bf16" in line]

    assert gemm_rows
    assert all("100%" in row and row.endswith(" -") for row in gemm_rows)
