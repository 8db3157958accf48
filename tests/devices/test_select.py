from __future__ import annotations

from dataclasses import replace

import pytest
from devices.machines import (
    GIB,
    FakeMachine,
    cuda,
    cuda_gpu,
    gpu,
    nvml,
    read_devices,
    telemetry_of,
    three_gpus,
    uuid,
)

from cudakit.devices.select import SelectSpec, filter_devices, label, select
from cudakit.errors import EnvironmentUnusable, UsageError
from cudakit.units import Unavailable

# --- by name ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "nvml_index"),
    [
        ("0", 1),
        ("2", 0),
        ("cuda:0", 1),
        ("CUDA:2", 0),
        ("nvml:1", 1),
        (uuid(2), 2),
        (uuid(2).upper(), 2),
        (uuid(2)[:7], 2),
        (uuid(2)[4:12], 2),
        ("0000:25:00.0", 2),
        ("00000000:25:00.0", 2),
        ("25:00.0", 2),
        ("25:00", 2),
    ],
)
def test_device_is_selected_by_any_of_its_names(selector: str, nvml_index: int) -> None:
    (device,) = filter_devices(read_devices(three_gpus()), [selector])

    assert device.nvml_index == nvml_index


@pytest.mark.parametrize(
    "selector",
    ["cuda:3", "nvml:9", "GPU-f", "3", "12", "gpu:0", "0001:25:00.0", "", "cuda:"],
)
def test_selector_without_match_is_refused_with_all_devices(selector: str) -> None:
    with pytest.raises(UsageError, match="no device matches") as failure:
        filter_devices(read_devices(three_gpus()), [selector])

    assert all(uuid(number) in failure.value.hint for number in range(3))


def test_ambiguous_selector_is_refused_with_its_matches() -> None:
    similar = [replace(gpu(index), uuid=f"GPU-abcd{index}") for index in range(2)]
    result = read_devices(FakeMachine(nvml(*similar, gpu(2)), cuda()))

    with pytest.raises(UsageError, match="2 devices match") as failure:
        filter_devices(result, ["GPU-abcd"])
    assert "GPU-abcd0" in failure.value.hint
    with pytest.raises(UsageError, match="3 devices match 'GPU-'"):
        filter_devices(result, ["GPU-"])
    assert uuid(2) not in failure.value.hint


def test_several_selectors_return_each_device_once_in_order() -> None:
    devices_found = filter_devices(read_devices(three_gpus()), ["nvml:2", "cuda:0", "nvml:1"])

    assert [device.nvml_index for device in devices_found] == [1, 2]


def test_no_selector_returns_all_devices() -> None:
    assert len(filter_devices(read_devices(three_gpus()), [])) == 3


def test_nvml_number_selects_gpu_not_mig_instance() -> None:
    instance = replace(gpu(0), index=0, uuid="MIG-0a0a", parent=0)
    result = read_devices(FakeMachine(nvml(gpu(0, mig_mode=True), instance), cuda()))

    assert filter_devices(result, ["nvml:0"])[0].parent is None
    assert filter_devices(result, ["MIG-0a"])[0].parent == 0


def test_label_contains_all_numbers_of_device() -> None:
    device = read_devices(three_gpus()).devices[0]

    assert label(device) == f"cuda:2 = nvml:0 = {uuid(0)} (NVIDIA Card 0)"


# --- by what is free -------------------------------------------------------------------------------


def with_free(*gibibytes: int) -> FakeMachine:
    telemetry_reads = {
        index: [telemetry_of(memory_free_bytes=free * GIB, utilization_gpu_percent=10 * index)]
        for index, free in enumerate(gibibytes)
    }
    return three_gpus(telemetry_reads=telemetry_reads)


def selected_uuids(machine: FakeMachine, spec: SelectSpec) -> str:
    result = read_devices(machine)
    return select(result, result.devices, spec).visible_devices


def test_select_returns_uuid_of_device_with_most_free_memory() -> None:
    assert selected_uuids(with_free(10, 70, 40), SelectSpec()) == uuid(1)


def test_selected_devices_are_sorted_by_free_memory() -> None:
    assert (
        selected_uuids(with_free(10, 70, 40), SelectSpec(device_count=2)) == f"{uuid(1)},{uuid(2)}"
    )


def test_equal_free_memory_keeps_order() -> None:
    assert selected_uuids(with_free(40, 40, 40), SelectSpec(device_count=3)) == ",".join(
        map(uuid, range(3))
    )


def test_limits_on_memory_and_use_exclude_devices() -> None:
    spec = SelectSpec(min_free_bytes=20 * GIB, max_utilization_percent=15)

    assert selected_uuids(with_free(10, 30, 70), spec) == uuid(1)


def test_too_few_matches_are_refused_with_reasons() -> None:
    spec = SelectSpec(device_count=2, min_free_bytes=50 * GIB)

    with pytest.raises(
        EnvironmentUnusable, match=r"2 devices with at least 50\.0 GiB free memory requested"
    ) as e:
        selected_uuids(with_free(10, 70, 40), spec)
    assert e.value.message.endswith(", but only 1 of 3 devices can be selected")
    assert f"{uuid(0)} (NVIDIA Card 0): 10.0 GiB free" in e.value.hint
    assert uuid(1) not in e.value.hint


def test_device_hidden_from_cuda_is_not_selected() -> None:
    view = cuda(cuda_gpu(0, 1), hidden=(cuda_gpu(-1, 0),), visible_devices="1")
    machine = FakeMachine(nvml(gpu(0), gpu(1)), view)

    assert selected_uuids(machine, SelectSpec()) == uuid(1)
    with pytest.raises(EnvironmentUnusable) as failure:
        selected_uuids(machine, SelectSpec(device_count=2))
    assert "hidden by CUDA_VISIBLE_DEVICES=1" in failure.value.hint


def test_unknown_free_memory_satisfies_no_limit() -> None:
    unknown = telemetry_of(memory_free_bytes=Unavailable("no permission"))
    machine = FakeMachine(nvml(gpu(0)), cuda(cuda_gpu(0, 0)), {0: [unknown]})

    assert selected_uuids(machine, SelectSpec()) == uuid(0)
    with pytest.raises(EnvironmentUnusable) as failure:
        selected_uuids(machine, SelectSpec(min_free_bytes=1))
    assert "free memory is unknown: no permission" in failure.value.hint


def test_device_in_prohibited_mode_is_not_selected() -> None:
    machine = FakeMachine(nvml(gpu(0, compute_mode="prohibited")), cuda(cuda_gpu(0, 0)))

    with pytest.raises(EnvironmentUnusable) as failure:
        selected_uuids(machine, SelectSpec())
    assert "compute mode is prohibited" in failure.value.hint


def test_several_mig_instances_are_refused() -> None:
    instances = [replace(gpu(0), index=index, uuid=f"MIG-{index}", parent=0) for index in range(2)]
    visible = [replace(cuda_gpu(index, 0), uuid=f"MIG-{index}") for index in range(2)]
    machine = FakeMachine(nvml(*instances), cuda(*visible))

    assert selected_uuids(machine, SelectSpec()) == "MIG-0"
    with pytest.raises(EnvironmentUnusable, match="only one MIG instance"):
        selected_uuids(machine, SelectSpec(device_count=2))
