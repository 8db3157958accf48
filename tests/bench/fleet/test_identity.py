from __future__ import annotations

from dataclasses import replace

from bench.fleet.example_fleet import fleet_host, suite_of

from cudakit.bench.fleet.analysis import analyze
from cudakit.bench.fleet.identity import wrong_gpu_findings
from cudakit.bench.fleet.result import FleetGpu, FleetHost, Subject


def with_gpu(host: FleetHost, index: int, gpu: FleetGpu) -> FleetHost:
    """Return a host whose GPU at an index has the result of another GPU."""
    gpus = list(host.gpus)
    gpus[index] = replace(gpu, index=index)
    return replace(host, gpus=tuple(gpus))


def without_uuids(host: FleetHost) -> FleetHost:
    """Return a host whose facts do not have the UUIDs of its GPUs."""
    return replace(host, facts=replace(host.facts, gpu_uuids=()))


def test_results_of_distinct_gpus_have_no_finding() -> None:
    assert wrong_gpu_findings([fleet_host("node-a"), fleet_host("node-b")]) == ()


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
    assert wrong_gpu_findings(hosts) == ()


def test_gpu_without_uuid_has_no_finding() -> None:
    host = without_uuids(fleet_host(gpu_count=2))
    gpu = replace(host.gpus[0], uuid="")

    assert wrong_gpu_findings([with_gpu(with_gpu(host, 0, gpu), 1, gpu)]) == ()


def test_result_of_another_gpu_is_a_finding_and_is_not_compared() -> None:
    host = fleet_host(gpu_count=3)
    fleet_result = analyze([with_gpu(host, 2, host.gpus[0])])

    assert [finding.kind for finding in fleet_result.findings] == ["wrong-gpu"]
    assert {comparison.subject.gpu for comparison in fleet_result.comparisons} == {0, 1}
    assert fleet_result.hosts[0].gpus[2].error.startswith("its result is that of another GPU")
    assert fleet_result.warnings == ()
    assert fleet_result.complete
