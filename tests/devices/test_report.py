""""""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from devices.machines import (
    GIB,
    NO_CUDA,
    NO_NVML,
    FakeMachine,
    cuda,
    cuda_gpu,
    gpu,
    nvml,
    read_devices,
    telemetry_of,
    three_gpus,
)

from cudakit.devices.query import open_query
from cudakit.devices.report import (
    WATCHED_FIELDS,
    field_columns,
    field_list,
    field_table,
    field_value,
    report,
)
from cudakit.devices.result import DevicesResult, field_registry, fields_by_name
from cudakit.gpu.api.facts import Link, Process, Telemetry
from cudakit.report.document import (
    Bytes,
    Columns,
    Count,
    Document,
    Facts,
    Note,
    Rate,
    Seconds,
    Section,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable


def overview(document: Document) -> list[dict[str, Any]]:
    """Return the rows of the first table by the names of its columns."""
    first = next(node for node in document.nodes if isinstance(node, Table))
    names = [column.name for column in first.columns]
    return [dict(zip(names, map(words, row), strict=True)) for row in first.rows]


def words(value: Value) -> str:
    return "n/a" if isinstance(value, Unavailable) else str(getattr(value, "value", value))


def notes(document: Document) -> list[Note]:
    return [node for node in document.nodes if isinstance(node, Note)]


def section(document: Document, title: str) -> Section:
    return next(n for n in document.nodes if isinstance(n, Section) and n.title == title)


def alone(*, telemetry: Telemetry | None = None, **fields: Any) -> DevicesResult:
    telemetry_reads = {0: [telemetry or telemetry_of()]}
    return read_devices(FakeMachine(nvml(gpu(0, **fields)), cuda(cuda_gpu(0, 0)), telemetry_reads))


# --- the table -------------------------------------------------------------------------------------


def test_row_has_indices_and_state() -> None:
    (row,) = overview(report(alone()))

    assert row == {
        "CUDA": "0",
        "NVML": "0",
        "PCI": "05:00.0",
        "name": "Card 0",
        "memory": "10.0 / 80.0 GiB",
        "util": "30%",
        "temp": "50 °C",
        "power": "300 / 700 W",
        "cc": "9.0",
    }


def test_row_has_cuda_nvml_and_pci_index() -> None:
    rows = overview(report(read_devices(three_gpus())))

    assert [(row["CUDA"], row["NVML"], row["PCI"]) for row in rows] == [
        ("2", "0", "05:00.0"),
        ("0", "1", "15:00.0"),
        ("1", "2", "25:00.0"),
    ]


@pytest.mark.parametrize(
    ("fields", "memory"),
    [
        ({"memory_used_bytes": 0}, "0.0 / 80.0 GiB"),
        ({"memory_used_bytes": 1}, "<0.1 / 80.0 GiB"),
        ({"memory_used_bytes": 80 * GIB}, "80.0 / 80.0 GiB"),
        ({"memory_used_bytes": Unavailable("no")}, "n/a / 80.0 GiB"),
    ],
)
def test_used_memory_is_in_unit_of_total(fields: dict[str, Any], memory: str) -> None:
    (row,) = overview(report(alone(telemetry=telemetry_of(**fields))))

    assert row["memory"] == memory


def test_total_memory_is_from_cuda_if_nvml_lacks_it() -> None:
    view = cuda(cuda_gpu(0, 0, usable_memory_bytes=60 * GIB))
    unknown = Unavailable("not supported by this device")
    machine = FakeMachine(
        nvml(gpu(0, memory_total_bytes=unknown)),
        view,
        {0: [telemetry_of(memory_used_bytes=unknown)]},
    )

    assert overview(report(read_devices(machine)))[0]["memory"] == "n/a / 60.0 GiB"


def test_unavailable_value_is_never_zero() -> None:
    unknown = {name: Unavailable("no permission") for name in telemetry_of().fields}
    (row,) = overview(report(alone(telemetry=Telemetry(1, unknown))))

    assert (row["util"], row["temp"], row["power"]) == ("n/a", "n/a", "n/a")


def test_mig_instance_has_index_of_its_gpu_first() -> None:
    instance = replace(gpu(0), index=3, uuid="MIG-3", parent=0)
    rows = overview(report(read_devices(FakeMachine(nvml(gpu(0), instance), NO_CUDA))))

    assert [row["NVML"] for row in rows] == ["0", "0/3"]


def test_hidden_device_is_faint_with_reason() -> None:
    view = cuda(cuda_gpu(0, 1), hidden=(cuda_gpu(-1, 0),), visible_devices="1")
    document = report(read_devices(FakeMachine(nvml(gpu(0), gpu(1)), view)))

    first = document.nodes[0]
    assert isinstance(first, Table)
    assert first.faint_rows == {0}
    assert notes(document) == [Note("info", "nvml:0: hidden by CUDA_VISIBLE_DEVICES=1")]


def test_note_of_several_devices_appears_once() -> None:
    hot = telemetry_of(clock_event_reasons=("software power cap",))
    machine = three_gpus(telemetry_reads={0: [hot], 2: [hot]})

    assert notes(report(read_devices(machine))) == [
        Note("warn", "cuda:2, cuda:1: throttled: power limit")
    ]


def test_title_marks_simulated_gpus() -> None:
    assert report(alone()).title == "GPUs of this machine, driver 580.159.04, CUDA 13.0"
    simulated = report(read_devices(three_gpus(simulated=True)))
    assert simulated.title.startswith("Simulated GPUs")


def test_title_omits_unknown_versions() -> None:
    assert report(read_devices(FakeMachine(NO_NVML, cuda(cuda_gpu(0, 0))))).title == (
        "GPUs of this machine, CUDA 13.0"
    )
    assert report(read_devices(FakeMachine(nvml(gpu(0)), NO_CUDA))).title == (
        "GPUs of this machine, driver 580.159.04"
    )


# --- watching --------------------------------------------------------------------------------------


def watched(activity_read: Telemetry | Unavailable) -> Document:
    machine = FakeMachine(nvml(gpu(0)), cuda(cuda_gpu(0, 0)), activity_read=activity_read)
    return report(open_query(machine).read(names=WATCHED_FIELDS, activity=True), with_activity=True)


def test_activity_columns_have_sm_tensor_and_dram_use() -> None:
    activity_read = {
        "sm_activity_percent": 77.04,
        "sm_occupancy_percent": 11.4,
        "tensor_activity_percent": 74.8,
        "dram_bandwidth_percent": 13.6,
    }
    (row,) = overview(watched(Telemetry(1, activity_read)))

    assert (row["SM"], row["occupancy"], row["tensor"], row["DRAM"]) == (
        "77%",
        "11%",
        "75%",
        "14%",
    )


def test_coarse_utilization_is_marked_if_activity_is_missing() -> None:
    document = watched(Unavailable("the GPU does not measure it"))
    (row,) = overview(document)

    assert (row["SM"], row["tensor"]) == ("~30%", "n/a")
    first = document.nodes[0]
    assert isinstance(first, Table)
    assert first.caption.startswith("~ marks the share of time")


# --- more ------------------------------------------------------------------------------------------


def test_processes_have_type_sm_utilization_memory_and_runtime() -> None:
    elsewhere = Unavailable("another container")
    process_list = (
        Process(41, "compute", GIB, "python train.py", "ada", 93, 61.7),
        Process(
            7, "graphics", Unavailable("WDDM"), elsewhere, elsewhere, Unavailable("MIG"), elsewhere
        ),
    )
    machine = FakeMachine(nvml(gpu(0)), cuda(cuda_gpu(0, 0)), process_list=process_list)
    devices_found = section(report(read_devices(machine, processes=True)), "Processes")

    rows, *reasons = devices_found.nodes
    assert isinstance(rows, Table)
    assert [tuple(map(words, row)) for row in rows.rows] == [
        ("0", "0", "41", "C", "ada", "93%", str(GIB), "62", "python train.py"),
        ("0", "0", "7", "G", "n/a", "n/a", "n/a", "n/a", "n/a"),
    ]
    assert [note.text for note in reasons if isinstance(note, Note)] == [
        "command and runtime of pid 7 not available: another container",
        "SM utilization of pid 7 not available: MIG",
        "memory of pid 7 not available: WDDM",
    ]


def test_missing_processes_have_a_reason() -> None:
    machine = FakeMachine(
        nvml(gpu(0)), cuda(cuda_gpu(0, 0)), process_list=Unavailable("no permission")
    )

    devices_found = section(report(read_devices(machine, processes=True)), "Processes")
    assert devices_found.nodes == (Note("info", "cuda:0: processes not available: no permission"),)


def matrices(view: Any, *links: Link) -> tuple[Any, ...]:
    machine = FakeMachine(nvml(gpu(0), gpu(1), links=links), view)
    return section(report(read_devices(machine, topology=True)), "Topology").nodes


def test_topology_has_matrices_of_links_and_peer_access() -> None:
    view = cuda(
        cuda_gpu(0, 1), cuda_gpu(1, 0), peer_access=((0, 1), (1, 0)), peer_atomics=((0, 1), (1, 0))
    )
    links, access = matrices(view, Link(0, 1, "NV18", 18, "ok", "ok", "ok"))

    assert [column.name for column in links.columns][:3] == [
        "link",
        "cuda:1 nvml:0",
        "cuda:0 nvml:1",
    ]
    assert [words(cell) for cell in links.rows[0][:3]] == ["cuda:1 nvml:0", "-", "NV18"]
    assert links.caption == "NV18: 18 NVLinks"
    assert [words(cell) for cell in access.rows[1]] == ["cuda:0 nvml:1", "yes + atomics", "-"]


def test_disagreement_of_nvml_and_cuda_is_in_matrix_and_note() -> None:
    view = cuda(cuda_gpu(0, 0), cuda_gpu(1, 1))
    _, access, note = matrices(view, Link(0, 1, "SYS", 0, "ok", "ok", "ok"))

    assert words(access.rows[0][2]) == "NVML yes, CUDA no"
    assert note.level == "warn"
    assert "IOMMU" in note.remedies[0]


def test_answer_of_one_library_names_the_library() -> None:
    _, access = matrices(NO_CUDA, Link(0, 1, "SYS", 0, "ok", "ok", "ok"))

    assert words(access.rows[0][2]) == "yes (NVML)"


def test_one_gpu_has_no_topology() -> None:
    machine = FakeMachine(nvml(gpu(0)), cuda(cuda_gpu(0, 0)))

    (note,) = section(report(read_devices(machine, topology=True)), "Topology").nodes
    assert isinstance(note, Note)
    assert "fewer than two GPUs" in note.text


def test_long_report_has_driver_then_every_field_by_group() -> None:
    document = report(alone(), with_all_fields=True)
    driver, properties = (node for node in document.nodes if isinstance(node, Section))

    assert driver.title == "Driver"
    labels = {
        label
        for instance in properties.nodes
        if isinstance(instance, Section)
        for facts in instance.nodes
        if isinstance(facts, Facts)
        for label, _ in facts.rows
    }
    expected = {
        name
        for name, field in field_registry().items()
        if field.kind != "activity" and field.group != "MIG instance"
    }
    assert labels == expected


# --- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("memory_used_bytes", 5, Bytes(5)),
        ("slowed_by_power_cap_ns", 1_500_000_000, Seconds(1.5)),
        ("pcie_sent_bytes_per_s", 2.0, Rate(2.0, "B")),
        ("power_draw_w", 692.454, Text("692.5 W")),
        ("clock_sm_mhz", 1980, Text("1980 MHz")),
        ("ecc_mode", True, Text("yes")),
        ("ecc_mode", False, Text("no")),
        ("clock_event_reasons", ("idle", "sync boost"), Text("idle, sync boost")),
        ("clock_event_reasons", (), Text("none")),
        ("clocks_memory_supported_mhz", (3201, 2201), Text("3201 MHz, 2201 MHz")),
        ("cuda_cores", 16896, Count(16896)),
        ("pci_device_id", "0x233510de", Text("0x233510de")),
        ("serial", Unavailable("no permission"), Unavailable("no permission")),
    ],
)
def test_field_is_shown_in_its_unit(name: str, value: Any, expected: Value) -> None:
    assert field_value(value, field_registry()[name]) == expected


# --- chosen fields ---------------------------------------------------------------------------------


def arrays(result: DevicesResult, *names: str) -> dict[str, list[Any]]:
    (node,) = field_columns(fields_by_name(names), result).nodes
    assert isinstance(node, Columns)
    return {name: np.asarray(array).tolist() for name, array in node.arrays.items()}


def test_selected_fields_are_typed_columns() -> None:
    devices_found = arrays(alone(), "name", "temperature_gpu_c", "power_draw_w", "mig_mode")

    assert devices_found == {
        "name": ["NVIDIA Card 0"],
        "temperature_gpu_c": [50],
        "power_draw_w": [300.0],
        "mig_mode": ["false"],
    }


def test_missing_value_of_one_device_keeps_numeric_column() -> None:
    unknown = telemetry_of(temperature_gpu_c=Unavailable("no"), power_draw_w=Unavailable("no"))
    result = read_devices(three_gpus(telemetry_reads={1: [unknown]}))

    (node,) = field_columns(fields_by_name(["temperature_gpu_c", "power_draw_w"]), result).nodes
    assert isinstance(node, Columns)
    assert node.arrays["temperature_gpu_c"].tolist() == [50, None, 50]
    assert np.isnan(node.arrays["power_draw_w"][1])


def test_table_of_fields_has_reasons_and_faint_rows() -> None:
    view = cuda(cuda_gpu(0, 1), hidden=(cuda_gpu(-1, 0),), visible_devices="1")
    result = read_devices(FakeMachine(nvml(gpu(0), gpu(1)), view))
    (node,) = field_table(fields_by_name(["cuda_index", "temperature_gpu_c"]), result).nodes

    assert isinstance(node, Table)
    assert [column.kind for column in node.columns] == ["text", "number"]
    assert isinstance(node.rows[0][0], Unavailable)
    assert node.faint_rows == {0}


def test_list_of_fields_explains_each_field_once() -> None:
    sections = field_list(field_registry().values()).nodes
    tables = [
        node for instance in sections if isinstance(instance, Section) for node in instance.nodes
    ]
    rows = {
        label: value for node in tables if isinstance(node, Facts) for label, value in node.rows
    }

    assert set(rows) == set(field_registry())
    assert rows["uuid"] == Text(
        "UUID, the same in every library (nvmlDeviceGetUUID, cuDeviceGetUuid)"
    )
    assert "Total GPU memory, in bytes (nvmlDeviceGetMemoryInfo" in str(rows["memory_total_bytes"])
