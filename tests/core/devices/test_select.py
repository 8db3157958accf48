from __future__ import annotations

from dataclasses import replace

import pytest
from core.devices.machines import (
    GIB,
    MadeMachine,
    crossed,
    cuda,
    gpu,
    looked,
    moving,
    nvml,
    seen,
    uuid,
)

from cudakit.core.devices.select import SelectSpec, filter_devices, label, select
from cudakit.errors import EnvironmentUnusable, UsageError
from cudakit.units import Unavailable

# --- by name ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "nvml_index"),
    [
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
def test_a_device_is_meant_by_any_of_its_names(selector: str, nvml_index: int) -> None:
    (device,) = filter_devices(looked(crossed()), [selector])

    assert device.nvml_index == nvml_index


@pytest.mark.parametrize(
    "selector",
    ["cuda:3", "nvml:9", "GPU-", "GPU-f", "0", "1", "gpu:0", "0001:25:00.0", "", "cuda:"],
)
def test_what_means_no_device_is_refused_with_the_list_of_all(selector: str) -> None:
    with pytest.raises(UsageError, match="means no device") as failure:
        filter_devices(looked(crossed()), [selector])

    assert all(uuid(number) in failure.value.hint for number in range(3))


def test_what_means_several_is_refused_with_the_list_of_those() -> None:
    twins = [replace(gpu(at), uuid=f"GPU-abcd{at}") for at in range(2)]
    result = looked(MadeMachine(nvml(*twins, gpu(2)), cuda()))

    with pytest.raises(UsageError, match="means 2 devices") as failure:
        filter_devices(result, ["GPU-abcd"])
    assert "GPU-abcd0" in failure.value.hint
    assert uuid(2) not in failure.value.hint


def test_several_names_keep_the_order_of_the_machine_and_mean_each_device_once() -> None:
    found = filter_devices(looked(crossed()), ["nvml:2", "cuda:0", "nvml:1"])

    assert [device.nvml_index for device in found] == [1, 2]


def test_no_name_means_all() -> None:
    assert len(filter_devices(looked(crossed()), [])) == 3


def test_a_number_of_nvmls_means_the_gpu_and_not_its_mig_instance() -> None:
    part = replace(gpu(0), index=0, uuid="MIG-0a0a", parent=0)
    result = looked(MadeMachine(nvml(gpu(0, mig_mode=True), part), cuda()))

    assert filter_devices(result, ["nvml:0"])[0].parent is None
    assert filter_devices(result, ["MIG-0a"])[0].parent == 0


def test_a_label_names_a_device_in_every_way() -> None:
    device = looked(crossed()).devices[0]

    assert label(device) == f"cuda:2 = nvml:0 = {uuid(0)} (NVIDIA Card 0)"


# --- by what is free -------------------------------------------------------------------------------


def with_free(*gibibytes: int) -> MadeMachine:
    looks = {
        at: [moving(memory_free_bytes=free * GIB, utilization_gpu_percent=10 * at)]
        for at, free in enumerate(gibibytes)
    }
    return crossed(looks=looks)


def picked(machine: MadeMachine, spec: SelectSpec) -> str:
    result = looked(machine)
    return select(result, result.devices, spec).visible_devices


def test_the_device_with_most_free_memory_is_named_by_uuid() -> None:
    assert picked(with_free(10, 70, 40), SelectSpec()) == uuid(1)


def test_several_are_given_from_the_freest_on() -> None:
    assert picked(with_free(10, 70, 40), SelectSpec(count=2)) == f"{uuid(1)},{uuid(2)}"


def test_what_is_equally_free_keeps_its_order() -> None:
    assert picked(with_free(40, 40, 40), SelectSpec(count=3)) == ",".join(map(uuid, range(3)))


def test_too_little_memory_and_too_much_use_rule_a_device_out() -> None:
    spec = SelectSpec(min_free_bytes=20 * GIB, max_utilization_percent=15)

    assert picked(with_free(10, 30, 70), spec) == uuid(1)


def test_too_few_that_fit_end_with_a_reason_for_each() -> None:
    spec = SelectSpec(count=2, min_free_bytes=50 * GIB)

    with pytest.raises(
        EnvironmentUnusable, match=r"2 devices asked for with at least 50\.0 GiB"
    ) as e:
        picked(with_free(10, 70, 40), spec)
    assert e.value.message.endswith("1 of 3 fit")
    assert f"{uuid(0)} (NVIDIA Card 0): 10.0 GiB free" in e.value.hint
    assert uuid(1) not in e.value.hint


def test_what_cuda_does_not_show_is_not_chosen() -> None:
    view = cuda(seen(0, 1), hidden=(seen(-1, 0),), visible_devices="1")
    machine = MadeMachine(nvml(gpu(0), gpu(1)), view)

    assert picked(machine, SelectSpec()) == uuid(1)
    with pytest.raises(EnvironmentUnusable) as failure:
        picked(machine, SelectSpec(count=2))
    assert "hidden by CUDA_VISIBLE_DEVICES=1" in failure.value.hint


def test_unknown_memory_is_not_taken_for_none_nor_for_enough() -> None:
    unknown = moving(memory_free_bytes=Unavailable("no permission"))
    machine = MadeMachine(nvml(gpu(0)), cuda(seen(0, 0)), {0: [unknown]})

    assert picked(machine, SelectSpec()) == uuid(0)
    with pytest.raises(EnvironmentUnusable) as failure:
        picked(machine, SelectSpec(min_free_bytes=1))
    assert "free memory unknown: no permission" in failure.value.hint


def test_a_device_that_prohibits_cuda_is_not_chosen() -> None:
    machine = MadeMachine(nvml(gpu(0, compute_mode="prohibited")), cuda(seen(0, 0)))

    with pytest.raises(EnvironmentUnusable) as failure:
        picked(machine, SelectSpec())
    assert "prohibits CUDA" in failure.value.hint


def test_more_than_one_mig_instance_is_more_than_a_process_gets() -> None:
    parts = [replace(gpu(0), index=at, uuid=f"MIG-{at}", parent=0) for at in range(2)]
    shown = [replace(seen(at, 0), uuid=f"MIG-{at}") for at in range(2)]
    machine = MadeMachine(nvml(*parts), cuda(*shown))

    assert picked(machine, SelectSpec()) == "MIG-0"
    with pytest.raises(EnvironmentUnusable, match="no more than one MIG instance"):
        picked(machine, SelectSpec(count=2))
