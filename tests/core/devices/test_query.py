from __future__ import annotations

from dataclasses import replace

import pytest
from core.devices.machines import (
    GIB,
    NO_CUDA,
    NO_NVML,
    MadeMachine,
    crossed,
    cuda,
    gpu,
    looked,
    moving,
    nvml,
    one,
    seen,
    uuid,
)

from cudakit.core.devices.fields import registry
from cudakit.core.devices.query import open_query
from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.api.facts import DeviceFacts, Process, Telemetry
from cudakit.units import Unavailable

# --- which is which --------------------------------------------------------------------------------


def test_devices_are_merged_by_uuid_and_never_by_number() -> None:
    result = looked(crossed())

    assert [(d.nvml_index, d.cuda_index) for d in result.devices] == [(0, 2), (1, 0), (2, 1)]
    assert [d.nvml_index for d in result.visible] == [1, 2, 0]


def test_a_uuid_may_be_written_in_capitals() -> None:
    loud = replace(seen(0, 0), uuid=uuid(0).upper())

    assert one(looked(MadeMachine(nvml(gpu(0)), cuda(loud)))).cuda_index == 0


def test_without_a_uuid_the_pci_address_tells() -> None:
    nameless = [replace(seen(at, 1 - at), uuid=Unavailable("old driver")) for at in range(2)]
    result = looked(MadeMachine(nvml(gpu(0), gpu(1)), cuda(*nameless)))

    assert [device.cuda_index for device in result.devices] == [1, 0]
    assert result.devices[0].uuid == uuid(0)


def test_the_only_gpu_of_both_is_one_gpu_even_where_they_agree_on_nothing() -> None:
    ours = DeviceFacts(0, "GPU-aaaa", Unavailable("no bus"), {"name": "Orin (nvgpu)"})
    theirs = DeviceFacts(0, "GPU-bbbb", "0000:00:00.0", {"name": "Orin"})
    device = one(looked(MadeMachine(nvml(ours), cuda(theirs))))

    assert (device.nvml_index, device.cuda_index, device.uuid) == (0, 0, "GPU-aaaa")
    assert device.pci_bus_id == "0000:00:00.0"


def test_two_different_gpus_stay_two() -> None:
    result = looked(MadeMachine(nvml(gpu(0), gpu(1)), cuda(seen(0, 7))))

    assert [(d.nvml_index, d.cuda_index) for d in result.devices[2:]] == [
        (Unavailable("NVML does not know the device"), 0)
    ]
    assert result.devices[0].cuda_index == Unavailable("CUDA does not show the device")


def test_what_one_of_both_cannot_say_is_taken_from_the_other() -> None:
    ours = gpu(0, name=Unavailable("no permission"), serial="1")
    fields = one(looked(MadeMachine(nvml(ours), cuda(seen(0, 0))))).fields

    assert (fields["name"], fields["serial"]) == ("NVIDIA Card 0", "1")
    assert fields["multiprocessor_count"] == 132


def test_a_mig_instance_is_found_by_its_own_uuid_and_its_gpu_is_not_shown_to_cuda() -> None:
    whole = gpu(0, mig_mode=True)
    parts = [
        replace(gpu(0), index=at, uuid=f"MIG-{at}", parent=0, pci_bus_id=whole.pci_bus_id)
        for at in range(2)
    ]
    shown = replace(seen(0, 0), uuid="MIG-1")
    result = looked(MadeMachine(nvml(whole, *parts), cuda(shown)))

    assert [device.cuda_index for device in result.devices] == [
        Unavailable("CUDA does not show the device"),
        Unavailable("CUDA does not show the device"),
        0,
    ]
    assert result.devices[0].notes == ("divided by MIG: CUDA sees its instances",)


# --- hidden, absent and lost -----------------------------------------------------------------------


def test_a_hidden_device_keeps_its_row_and_says_what_hides_it() -> None:
    view = cuda(seen(0, 1), hidden=(seen(-1, 0),), visible_devices="1")
    hidden, shown = looked(MadeMachine(nvml(gpu(0), gpu(1)), view)).devices

    reason = "hidden by CUDA_VISIBLE_DEVICES=1"
    assert (hidden.hidden, hidden.cuda_index) == (True, Unavailable(reason))
    assert hidden.notes == (reason,)
    assert (shown.hidden, shown.cuda_index) == (False, 0)


def test_an_empty_variable_hides_all_and_is_told_as_empty() -> None:
    error = (100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected")
    view = cuda(hidden=(seen(-1, 0),), visible_devices="", error=error)
    result = looked(MadeMachine(nvml(gpu(0)), view))

    assert one(result).cuda_index == Unavailable("hidden: CUDA_VISIBLE_DEVICES is empty")
    assert result.notes == (
        "CUDA does not start: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected",
        "CUDA_VISIBLE_DEVICES is empty: it hides every device",
    )


def test_without_cuda_there_is_nvml_and_every_field_of_cuda_says_why_not() -> None:
    result = looked(MadeMachine(nvml(gpu(0)), NO_CUDA))

    device = one(result)
    assert result.cuda == device.cuda_index == device.fields["warp_size"] == NO_CUDA
    assert device.fields["memory_total_bytes"] == 80 * GIB
    assert any(note.startswith("NVML only") for note in result.notes)


def test_without_nvml_there_is_cuda_and_every_field_of_nvml_says_why_not() -> None:
    result = looked(MadeMachine(NO_NVML, cuda(seen(0, 0))))

    device = one(result)
    assert result.driver_version == device.fields["power_draw_w"] == NO_NVML
    assert device.fields["multiprocessor_count"] == 132
    assert device.cuda_index == 0
    assert any(note.startswith("CUDA only") for note in result.notes)


def test_with_neither_the_command_ends_and_names_the_simulator() -> None:
    with pytest.raises(EnvironmentUnusable, match=r"NVML.*; .*CUDA") as failure:
        looked(MadeMachine(NO_NVML, NO_CUDA))

    assert "--gpu sim" in failure.value.hint


def test_a_driver_without_gpus_is_told_from_no_driver() -> None:
    error = (100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected")

    with pytest.raises(EnvironmentUnusable, match="NVML sees none; CUDA: CUDA_ERROR_NO_DEVICE"):
        looked(MadeMachine(nvml(), cuda(error=error)))


def test_cuda_that_does_not_start_leaves_its_error_and_the_devices_of_nvml() -> None:
    error = (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "unsupported display driver / cuda driver")
    result = looked(MadeMachine(nvml(gpu(0)), cuda(error=error)))

    assert one(result).cuda_index == Unavailable("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")
    assert not isinstance(result.cuda, Unavailable)
    assert result.cuda.error is not None
    assert result.cuda.error.code == 803


def test_a_lost_device_says_so_and_none_of_its_fields_is_zero() -> None:
    lost = Unavailable("the GPU is lost: it fell off the bus")
    device = one(looked(MadeMachine(nvml(gpu(0)), cuda(seen(0, 0)), {0: [lost]})))

    assert device.lost
    assert device.notes == (lost.reason,)
    assert device.fields["power_draw_w"] == lost
    assert device.fields["name"] == "NVIDIA Card 0"


# --- fields ----------------------------------------------------------------------------------------


def test_every_field_of_the_registry_is_there_as_a_value_or_with_a_reason() -> None:
    fields = one(looked(MadeMachine(nvml(gpu(0)), cuda(seen(0, 0))))).fields

    expected = {
        name
        for name, field in registry().items()
        if field.kind in ("fact", "telemetry") and field.group != "MIG instance"
    }
    assert fields.keys() == expected
    assert fields["serial"] == Unavailable("NVML did not say")


def test_names_limit_fields_but_not_notes() -> None:
    slowed = moving(clock_event_reasons=("idle", "hardware thermal slowdown"))
    machine = MadeMachine(nvml(gpu(0)), cuda(seen(0, 0)), {0: [slowed]})
    device = one(open_query(machine).read(names=["clock_event_reasons", "name"]))

    assert device.fields.keys() == {"clock_event_reasons", "name"}
    assert device.notes == ("slowed: hardware thermal slowdown",)


def test_activity_is_read_only_where_it_is_asked_for() -> None:
    doing = Telemetry(1, {"sm_activity_percent": 50.0})
    machine = MadeMachine(nvml(gpu(0)), cuda(seen(0, 0)), doing=doing)
    query = open_query(machine)

    assert "sm_activity_percent" not in one(query.read()).fields
    assert one(query.read(activity=True)).fields["sm_activity_percent"] == 50.0


def test_activity_that_a_gpu_does_not_count_says_why() -> None:
    machine = MadeMachine(nvml(gpu(0)), cuda(seen(0, 0)))

    fields = one(open_query(machine).read(activity=True)).fields
    assert fields["tensor_activity_percent"] == Unavailable("the GPU does not count it")


def test_what_moves_is_read_anew_each_time() -> None:
    looks = [moving(power_draw_w=1.0), moving(power_draw_w=2.0)]
    query = open_query(MadeMachine(nvml(gpu(0)), cuda(seen(0, 0)), {0: looks}))

    assert [one(query.read()).fields["power_draw_w"] for _ in looks] == [1.0, 2.0]


def test_processes_are_listed_where_they_are_asked_for_but_not_twice_under_mig() -> None:
    users = (Process(7, "compute", 1, "python", "ada"),)
    part = replace(gpu(0), index=0, uuid="MIG-0", parent=0)
    machine = MadeMachine(nvml(gpu(0, mig_mode=True), part), cuda(), users=users)

    assert looked(machine).devices[0].processes is None
    whole, instance = looked(machine, processes=True).devices
    assert whole.processes == Unavailable("divided by MIG: its instances say")
    assert instance.processes == users


def test_a_simulated_machine_is_called_simulated() -> None:
    assert looked(crossed(simulated=True)).simulated
    assert not looked(crossed()).simulated


# --- notes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"compute_mode": "prohibited"}, "compute mode: prohibited"),
        ({"integrated": True}, "integrated: it shares the memory of the host"),
        ({"remapped_rows_pending": True}, "reset it to replace memory rows"),
        ({"remapped_rows_failed": True}, "memory rows cannot be replaced"),
        ({"recovery_action": "reset the GPU"}, "the driver asks: reset the GPU"),
        (
            {"ecc_dram_uncorrected_volatile": 2, "ecc_sram_uncorrected_volatile": 1},
            "3 uncorrectable ECC errors",
        ),
    ],
)
def test_what_is_unusual_is_noted(fields: dict[str, object], note: str) -> None:
    device = one(looked(MadeMachine(nvml(gpu(0, **fields)), cuda(seen(0, 0)))))  # type: ignore[arg-type]

    assert device.notes == (note,)


def test_what_is_usual_is_not_noted() -> None:
    usual = moving(
        clock_event_reasons=("idle", "application clocks setting"), recovery_action="none"
    )
    healthy = gpu(0, compute_mode="default", remapped_rows_pending=False, integrated=False)
    machine = MadeMachine(nvml(healthy), cuda(seen(0, 0)), {0: [usual]})

    assert one(looked(machine)).notes == ()
