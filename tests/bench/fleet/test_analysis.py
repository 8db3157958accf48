""""""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import pytest
from bench.example_results import FAILED_VERIFICATION, gemm, machine, result
from bench.fleet.example_fleet import (
    failed_gpu,
    fleet_gpu,
    fleet_host,
    gpu_cases,
    gpu_uuid,
    suite_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from cudakit.bench.fleet.analysis import (
    MAX_SCORE,
    SIGMA_PER_MAD,
    analyze,
    compare_with_peers,
    separate_wrong_results,
)
from cudakit.bench.fleet.result import Finding, FleetGpu, FleetHost, HostFacts, Subject
from cudakit.bench.health import SkippedBench, assess_health


def slow_figures(*hosts: FleetHost) -> dict[str, list[str]]:
    """Return the names of the slow figures of each subject with a finding."""
    return {
        str(finding.subject): [slow.figure for slow in finding.slow_figures]
        for finding in analyze(hosts).findings
        if finding.kind == "slower"
    }


def test_equal_gpus_have_no_findings() -> None:
    fleet_result = analyze([fleet_host("node-a"), fleet_host("node-b")])

    assert fleet_result.findings == ()
    assert fleet_result.warnings == ()
    assert fleet_result.complete
    subjects = {comparison.subject.kind for comparison in fleet_result.comparisons}
    assert subjects == {"host", "gpu", "link"}


def test_slow_gpu_is_named_with_figure_and_peers() -> None:
    host = fleet_host(gpus={2: {"gemm_rate": 700e12}})
    (finding,) = analyze([host]).findings

    assert finding.kind == "slower"
    assert finding.subject == Subject("gpu", "node-a", 2)
    (slow,) = finding.slow_figures
    assert slow.figure == "gemm bf16"
    assert slow.peer_count == 3
    assert 0.88 < slow.of_peers < 0.89
    assert slow.value < slow.limit < slow.peer_median


@settings(max_examples=15)  # An example takes 30 ms.
@given(st.integers(0, 2), st.integers(0, 3), st.floats(0.3, 0.9))
def test_planted_slow_gpu_is_the_only_finding(host: int, gpu: int, share: float) -> None:
    hosts = [
        fleet_host(f"node-{i}", gpus={gpu: {"gemm_rate": 790e12 * share}} if i == host else {})
        for i in range(3)
    ]

    assert slow_figures(*hosts) == {f"node-{host} GPU {gpu}": ["gemm bf16"]}


def test_slow_link_to_the_host_is_named() -> None:
    host = fleet_host(gpus={1: {"h2d_rate": 27e9}})

    assert slow_figures(host) == {"node-a link GPU 1-host": ["copy h2d"]}


def test_slow_link_between_gpus_is_named() -> None:
    host = fleet_host(gpus={1: {"peer_rates": {3: 100e9}}})

    assert slow_figures(host) == {"node-a link GPU 1-GPU 3": ["copy peer"]}


def test_gpu_whose_links_are_all_slow_is_named_instead_of_its_links() -> None:
    slow_links = {2: {"peer_rates": dict.fromkeys((0, 1, 3), 100e9)}}
    host = fleet_host(gpus={**slow_links, **{i: {"peer_rates": {2: 100e9}} for i in (0, 1, 3)}})

    assert slow_figures(host) == {"node-a GPU 2": ["copy peer"]}


def test_slow_host_is_named_instead_of_its_gpus() -> None:
    slow_host = fleet_host("node-c", gpus={i: {"gemm_rate": 700e12} for i in range(4)})

    assert slow_figures(fleet_host("node-a"), fleet_host("node-b"), slow_host) == {
        "node-c": ["gemm bf16"]
    }


def test_links_of_other_topology_are_not_compared() -> None:
    host = fleet_host(
        gpu_count=3, gpus={0: {"peer_rates": {1: 50e9}}, 1: {"peer_rates": {0: 50e9}}}
    )
    links = tuple(
        replace(link, path="SYS")
        if {link.first_uuid, link.second_uuid} == {gpu_uuid("node-a", 0), gpu_uuid("node-a", 1)}
        else link
        for link in host.facts.links
    )

    assert slow_figures(replace(host, facts=replace(host.facts, links=links))) == {}


def test_links_of_a_failed_gpu_keep_their_topology() -> None:
    host = fleet_host(gpus={1: {"peer_rates": {3: 100e9}}})
    host = replace(host, gpus=(*host.gpus[:3], failed_gpu(3, "it fell off the bus")))

    assert slow_figures(host) == {"node-a link GPU 1-GPU 3": ["copy peer"]}


def test_other_gpu_models_are_not_compared() -> None:
    host = fleet_host(gpu_count=3, gpus={2: {"gemm_rate": 700e12}})
    other_model = replace(host.gpus[2], model="NVIDIA L4")
    fleet_result = analyze([replace(host, gpus=(*host.gpus[:2], other_model))])

    assert fleet_result.findings == ()
    assert (
        "NVIDIA L4: not compared with other GPUs, because only one was measured"
        in fleet_result.warnings
    )


def test_noise_that_explains_the_difference_is_no_finding() -> None:
    host = fleet_host(gpu_count=4)
    noisy_gemm = gemm(rate=700e12)
    low_s, high_s = noisy_gemm.ci95_s
    noisy_gemm = replace(noisy_gemm, ci95_s=(low_s * 0.8, high_s))
    noisy_gpu = fleet_gpu(3, *gpu_cases(3, gpu_count=4)[:-1], noisy_gemm)

    assert slow_figures(replace(host, gpus=(*host.gpus[:3], noisy_gpu))) == {}


def test_conditions_that_differ_from_peers_are_reported() -> None:
    host = fleet_host(
        gpus={2: {"gemm_rate": 700e12, "power_limit_w": 500.0, "power_limit_default_w": 700.0}}
    )
    (finding,) = analyze([host]).findings

    assert finding.conditions == ("the power limit is 500 W instead of the default 700 W",)


def test_setting_that_most_peers_do_not_have_is_reported() -> None:
    host = fleet_host(
        gpus={2: {"gemm_rate": 700e12, "memory_clock_mhz": 2600.0, "pcie": "4.0 x16"}}
    )
    (finding,) = analyze([host]).findings

    assert finding.conditions == (
        "the memory clock is 2600 MHz, that of most peers 3201 MHz",
        "the PCIe link is 4.0 x16, that of most peers 5.0 x16",
    )


def test_failed_host_and_gpu_are_findings_beside_the_results_of_others() -> None:
    dead_host = FleetHost(HostFacts("node-b", error="no answer within 60 s", hint="ray status"), ())
    host = fleet_host()
    broken = failed_gpu(1, "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error", "replace it")
    fleet_result = analyze([replace(host, gpus=(host.gpus[0], broken, *host.gpus[2:])), dead_host])

    assert [
        (finding.kind, str(finding.subject), finding.hint) for finding in fleet_result.findings
    ] == [
        ("failed", "node-a GPU 1", "replace it"),
        ("failed", "node-b", "ray status"),
    ]
    assert fleet_result.complete
    assert fleet_result.comparisons


def test_gpu_with_wrong_values_is_unhealthy() -> None:
    host = fleet_host()
    wrong = gemm(verification=FAILED_VERIFICATION, environment=machine(uuid="GPU-0"))
    broken = fleet_gpu(0, *gpu_cases(0, gpu_count=4)[:-1], wrong)
    (finding,) = analyze([replace(host, gpus=(broken, *host.gpus[1:]))]).findings

    assert finding.kind == "unhealthy"
    assert finding.subject == Subject("gpu", "node-a", 0)
    assert finding.text == "the health check fails: gemm bf16"


def test_missing_gpu_makes_the_result_incomplete() -> None:
    host = fleet_host()
    missing = FleetGpu(3)
    fleet_result = analyze([replace(host, gpus=(*host.gpus[:3], missing))])

    assert not fleet_result.complete
    assert fleet_result.findings == ()
    assert "not measured: node-a GPU 3" in fleet_result.warnings


def test_interrupted_suite_makes_the_result_incomplete() -> None:
    host = fleet_host()
    suite = suite_of(host.gpus[0])
    interrupted = replace(suite, bench=replace(suite.bench, complete=False))
    fleet_result = analyze(
        [replace(host, gpus=(replace(host.gpus[0], suite=interrupted), *host.gpus[1:]))]
    )

    assert not fleet_result.complete
    assert "the suite was interrupted on node-a GPU 0" in fleet_result.warnings


def test_different_versions_are_one_warning_per_program() -> None:
    other_versions = {"cudakit": "0.2.0", "ray": "2.60.0", "python": "3.11.7"}
    hosts = [fleet_host(name, 2) for name in ("node-a", "node-b", "node-c")]
    hosts[2] = replace(hosts[2], facts=replace(hosts[2].facts, versions=other_versions))

    assert analyze(hosts).warnings == (
        "the hosts have different versions of cudakit: 0.1.0 on node-a, node-b; 0.2.0 on node-c",
    )


def test_gpu_without_cases_is_not_compared() -> None:
    host = fleet_host(gpu_count=2)
    empty = assess_health(result(bench="suite"), quick=True, fields={})
    fleet_result = analyze([replace(host, gpus=(host.gpus[0], replace(host.gpus[1], suite=empty)))])

    assert fleet_result.comparisons == ()


def test_bench_that_a_host_skipped_is_a_warning() -> None:
    host = fleet_host(gpu_count=2)
    skipped = SkippedBench("gemm", "cublaslt is not installed", "pip install 'cudakit[bench]'")
    suite = replace(suite_of(host.gpus[1]), left_out=(skipped,))
    fleet_result = analyze([replace(host, gpus=(host.gpus[0], replace(host.gpus[1], suite=suite)))])

    assert fleet_result.warnings == (
        "gemm was not run on node-a GPU 1: cublaslt is not installed: pip install 'cudakit[bench]'",
    )


def test_unhealthy_gpu_is_described_with_share_of_the_expected_speed() -> None:
    host = fleet_host(gpu_count=4, gpus={i: {"gemm_rate": 600e12} for i in range(4)})
    findings = analyze([host]).findings

    assert [finding.kind for finding in findings] == ["unhealthy"] * 4
    assert findings[0].text == "the health check fails: gemm bf16 (75.7% of the expected speed)"


def wrong_gpu_findings(hosts: Sequence[FleetHost]) -> list[Finding]:
    return separate_wrong_results(hosts)[1]


def with_gpu(host: FleetHost, index: int, gpu: FleetGpu) -> FleetHost:
    """Return a host whose GPU at an index has the result of another GPU."""
    gpus = list(host.gpus)
    gpus[index] = replace(gpu, index=index)
    return replace(host, gpus=tuple(gpus))


def without_uuids(host: FleetHost) -> FleetHost:
    """Return a host whose facts do not have the UUIDs of its GPUs."""
    return replace(host, facts=replace(host.facts, gpu_uuids=()))


def test_results_of_distinct_gpus_have_no_finding() -> None:
    assert wrong_gpu_findings([fleet_host("node-a"), fleet_host("node-b")]) == []


def test_gpu_that_was_measured_twice_is_found_by_its_uuid() -> None:
    host = fleet_host(gpu_count=2)
    (finding,) = wrong_gpu_findings([with_gpu(without_uuids(host), 1, host.gpus[0])])

    assert (finding.kind, finding.subject) == ("wrong-gpu", Subject("gpu", "node-a", 1))
    assert finding.text == "its result is that of the same GPU as node-a GPU 0: GPU-node-a-0"
    assert "measure it again" in finding.hint


def test_result_of_another_gpu_than_the_host_has_at_the_index_is_found() -> None:
    host = fleet_host(gpu_count=2)
    exchanged_host = with_gpu(with_gpu(host, 0, host.gpus[1]), 1, host.gpus[0])
    first, second = wrong_gpu_findings([exchanged_host])

    assert first.text == "its result is that of another GPU: GPU-node-a-1 instead of GPU-node-a-0"
    assert second.text == "its result is that of another GPU: GPU-node-a-0 instead of GPU-node-a-1"


def test_gpu_that_two_hosts_offer_is_found() -> None:
    first_host, second_host = fleet_host("node-a", 1), without_uuids(fleet_host("node-b", 1))
    (finding,) = wrong_gpu_findings([first_host, with_gpu(second_host, 0, first_host.gpus[0])])

    assert finding.subject == Subject("gpu", "node-b", 0)
    assert "the same GPU as node-a GPU 0" in finding.text


def test_simulated_gpus_of_two_hosts_may_have_the_same_uuids() -> None:
    first_host, second_host = fleet_host("node-a", 1), without_uuids(fleet_host("node-b", 1))
    gpu = first_host.gpus[0]
    simulated_gpu = replace(gpu, suite=replace(suite_of(gpu), simulated=True))

    hosts = [with_gpu(first_host, 0, simulated_gpu), with_gpu(second_host, 0, simulated_gpu)]
    assert wrong_gpu_findings(hosts) == []


def test_gpu_without_uuid_has_no_finding() -> None:
    host = without_uuids(fleet_host(gpu_count=2))
    gpu = replace(host.gpus[0], uuid="")

    assert wrong_gpu_findings([with_gpu(with_gpu(host, 0, gpu), 1, gpu)]) == []


def test_result_of_another_gpu_is_a_finding_and_is_not_compared() -> None:
    host = fleet_host(gpu_count=3)
    fleet_result = analyze([with_gpu(host, 2, host.gpus[0])])

    assert [finding.kind for finding in fleet_result.findings] == ["wrong-gpu"]
    assert {comparison.subject.gpu for comparison in fleet_result.comparisons} == {0, 1}
    assert fleet_result.hosts[0].gpus[2].error.startswith("its result is that of another GPU")
    assert fleet_result.warnings == ()
    assert fleet_result.complete


VALUES = st.lists(st.floats(1e-6, 1e15), max_size=12)
TOLERANCES = st.floats(0, 0.5)


def brute_force_limit(
    values: Sequence[float], index: int, *, higher_is_better: bool, tolerance: float
) -> float:
    """Compute the limit of one value by the definition, without numpy."""
    peers = [value for i, value in enumerate(values) if i != index]
    middle = median(peers)
    mad = median([abs(peer - middle) for peer in peers])
    distance = max(tolerance * middle, MAX_SCORE * SIGMA_PER_MAD * mad)
    return middle - distance if higher_is_better else middle + distance


def outliers(values: Sequence[float], *, higher_is_better: bool = True) -> list[int]:
    statistics = compare_with_peers(values, higher_is_better=higher_is_better, tolerance=0.07)
    return [i for i, (_, _, _, is_outlier) in enumerate(statistics) if is_outlier]


@given(VALUES, st.booleans(), TOLERANCES)
def test_limits_equal_brute_force(
    values: list[float], higher_is_better: bool, tolerance: float
) -> None:
    statistics = compare_with_peers(values, higher_is_better=higher_is_better, tolerance=tolerance)

    if len(values) < 2:
        assert statistics == []
        return
    for i, (peer_median, _, limit, _) in enumerate(statistics):
        expected = brute_force_limit(
            values, i, higher_is_better=higher_is_better, tolerance=tolerance
        )
        assert limit == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert peer_median == pytest.approx(median(values[:i] + values[i + 1 :]))


@given(VALUES, st.booleans(), st.integers(-20, 20))
def test_outliers_do_not_depend_on_unit(
    values: list[float], higher_is_better: bool, exponent: int
) -> None:
    scaled = [value * 2.0**exponent for value in values]

    assert outliers(values, higher_is_better=higher_is_better) == outliers(
        scaled, higher_is_better=higher_is_better
    )


@given(st.permutations(range(8)), VALUES.filter(lambda values: len(values) >= 8))
def test_outliers_do_not_depend_on_order(order: list[int], values: list[float]) -> None:
    values = values[:8]

    assert {values[i] for i in outliers(values)} == {
        values[order[i]] for i in outliers([values[i] for i in order])
    }


@given(
    st.lists(st.floats(0.99, 1.01), min_size=2, max_size=64),
    st.floats(0.1, 0.85),
    st.integers(0, 63),
)
def test_planted_slow_value_is_the_only_outlier(
    healthy: list[float], slow: float, position: int
) -> None:
    position %= len(healthy) + 1
    values = [*healthy[:position], slow, *healthy[position:]]

    # With two healthy values, each has the slow value and one healthy value as peers.
    assert outliers(values) == [position]


@given(st.lists(st.floats(0.97, 1.03), max_size=64), st.booleans())
def test_values_within_the_tolerance_have_no_outlier(
    values: list[float], higher_is_better: bool
) -> None:
    assert outliers(values, higher_is_better=higher_is_better) == []


@given(st.integers(3, 40), st.floats(0.2, 0.8))
def test_slow_minority_is_named(count: int, slow: float) -> None:
    slow_count = (count - 1) // 2
    values = [slow] * slow_count + [1.0] * (count - slow_count)

    assert outliers(values) == list(range(slow_count))


def test_wide_spread_of_peers_widens_the_limit() -> None:
    assert outliers([100, 101, 99, 100, 90]) == [4]
    assert outliers([100, 110, 90, 105, 95, 84]) == []


def test_value_at_the_limit_is_no_outlier() -> None:
    assert outliers([100, 100, 100, 93]) == []
    assert outliers([100, 100, 100, 92.9]) == [3]
    assert outliers([100, 100, 100, 107.1], higher_is_better=False) == [3]
