from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench.fleet.example_fleet import fleet_host, suite_of

from cudakit.bench.fleet.result import FleetGpu, FleetHost, FleetRecords, HostFacts
from cudakit.bench.load import load_result
from cudakit.errors import InputError, UsageError
from cudakit.report.json import render
from cudakit.units import Unavailable


def write(records: FleetRecords, host: FleetHost) -> None:
    records.create()
    records.write_host(host.facts)
    for gpu in host.gpus:
        records.write_suite(host.name, gpu.index, render(gpu.suite))


def test_results_are_read_as_written(tmp_path: Path) -> None:
    hosts = [fleet_host("node-b", 2), fleet_host("node-a", 3)]
    records = FleetRecords(tmp_path / "new" / "results")
    for host in hosts:
        write(records, host)
    read_hosts = records.read()

    assert [host.name for host in read_hosts] == ["node-a", "node-b"]
    assert read_hosts[1].facts == hosts[0].facts
    assert [gpu.index for gpu in read_hosts[0].gpus] == [0, 1, 2]
    for read_gpu, gpu in zip(read_hosts[1].gpus, hosts[0].gpus, strict=True):
        assert json.loads(render(read_gpu.suite)) == json.loads(render(gpu.suite))
        assert (read_gpu.model, read_gpu.uuid) == (gpu.model, gpu.uuid)


def test_file_of_a_gpu_is_a_result_that_can_be_compared(tmp_path: Path) -> None:
    records = FleetRecords(tmp_path)
    write(records, fleet_host(gpu_count=1))

    assert load_result(tmp_path / "node-a" / "gpu0.json").bench == "suite"


def test_files_without_facts_suffice(tmp_path: Path) -> None:
    write(FleetRecords(tmp_path), fleet_host(gpu_count=2))
    (tmp_path / "node-a" / "host.json").unlink()
    (tmp_path / "notes").mkdir()
    (tmp_path / "node-a" / "gpu1.json.orig").write_text("")
    (host,) = FleetRecords(tmp_path).read()

    assert host.facts == HostFacts("node-a")
    assert len(host.gpus) == 2


def test_gpu_without_file_is_not_measured(tmp_path: Path) -> None:
    write(FleetRecords(tmp_path), fleet_host(gpu_count=3))
    (tmp_path / "node-a" / "gpu1.json").unlink()
    (host,) = FleetRecords(tmp_path).read()

    assert host.gpus[1] == FleetGpu(1, suite=Unavailable("not measured"))


def test_error_of_a_gpu_is_read(tmp_path: Path) -> None:
    records = FleetRecords(tmp_path)
    write(records, fleet_host(gpu_count=2))
    records.write_error("node-a", 1, "the process of the suite died", "see the logs")
    (host,) = records.read()

    assert (host.gpus[1].error, host.gpus[1].hint) == (
        "the process of the suite died",
        "see the logs",
    )
    assert not records.has_result(host.facts, 1, quick=True)


def test_host_with_an_error_has_no_missing_gpus(tmp_path: Path) -> None:
    records = FleetRecords(tmp_path)
    records.write_host(HostFacts("node-a", gpu_count=8, error="no answer within 60 s"))
    (host,) = records.read()

    assert host.gpus == ()


@pytest.mark.parametrize(
    ("quick", "simulated", "is_reused"),
    [(True, False, True), (False, False, False), (True, True, False)],
)
def test_result_of_another_suite_is_not_reused(
    tmp_path: Path, quick: bool, simulated: bool, is_reused: bool
) -> None:
    records = FleetRecords(tmp_path)
    host = fleet_host(gpu_count=1)
    write(records, host)

    facts = replace(host.facts, simulated=simulated)
    assert records.has_result(facts, 0, quick=quick) == is_reused


def test_result_of_a_gpu_that_was_replaced_is_not_reused(tmp_path: Path) -> None:
    records, host = FleetRecords(tmp_path), fleet_host(gpu_count=2)
    write(records, host)
    new_uuids = (host.facts.gpu_uuids[0], "GPU-new")

    facts = replace(host.facts, gpu_uuids=new_uuids)
    assert records.has_result(facts, 0, quick=True)
    assert not records.has_result(facts, 1, quick=True)
    assert records.has_result(replace(facts, gpu_uuids=()), 1, quick=True)


def test_incomplete_or_damaged_result_is_not_reused(tmp_path: Path) -> None:
    records, host = FleetRecords(tmp_path), fleet_host(gpu_count=1)
    suite = suite_of(host.gpus[0])
    write(records, host)
    records.write_suite(
        "node-a", 0, render(replace(suite, bench=replace(suite.bench, complete=False)))
    )
    assert not records.has_result(host.facts, 0, quick=True)

    records.write_suite("node-a", 0, render(suite)[:1000])
    assert not records.has_result(host.facts, 0, quick=True)
    assert not records.has_result(host.facts, 7, quick=True)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gpu0.json", "{", "gpu0.json is not valid JSON"),
        ("gpu0.json", "{}", "it has no schema 'cudakit.suite/1'"),
        ("gpu0.json", "[1]", "gpu0.json is not a result of cudakit bench suite"),
        ("gpu0.json", '{"schema": "cudakit.suite/2"}', "gpu0.json has the schema"),
        ("gpu0.json", '{"schema": "cudakit.suite/1"}', "gpu0.json is damaged"),
        (
            "host.json",
            '{"schema": "cudakit.suite/1"}',
            "host.json is a result of cudakit bench suite",
        ),
        ("host.json", '{"schema": "cudakit.fleet-host/1", "name": 3}', "host.json is damaged"),
    ],
)
def test_damaged_file_is_an_error_of_its_gpu_or_host(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / "node-a").mkdir()
    (tmp_path / "node-a" / name).write_text(text)

    (host,) = FleetRecords(tmp_path).read()
    (error,) = {host.facts.error, *(gpu.error for gpu in host.gpus)} - {""}

    assert message in error
    assert (len(host.gpus) == 1) == (name == "gpu0.json")


def test_directory_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        FleetRecords(tmp_path / "none").read()
    with pytest.raises(InputError, match="contains no results of a fleet"):
        FleetRecords(tmp_path).read()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file is not a directory") as error:
        FleetRecords(tmp_path / "file").read()
    assert error.value.hint.startswith("name a directory with HOST/gpuN.json files")


def test_directory_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(UsageError, match="cannot create"):
        FleetRecords(tmp_path / "file" / "results").create()
    with pytest.raises(UsageError, match="file is not a directory"):
        FleetRecords(tmp_path / "file").create()


@pytest.mark.parametrize("name", ["../../outside", "/etc", ".hidden", "a b\n"])
def test_host_name_does_not_leave_the_directory(tmp_path: Path, name: str) -> None:
    records = FleetRecords(tmp_path / "results")
    records.create()
    records.write_host(HostFacts(name))
    (host,) = records.read()

    assert host.name == name
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    document = json.loads(next((tmp_path / "results").glob("*/host.json")).read_text())
    assert document["name"] == name
