""""""

from __future__ import annotations

from dataclasses import replace

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
    one,
    read_devices,
    telemetry_of,
    three_gpus,
    uuid,
)
from hypothesis import given
from hypothesis import strategies as st

from cudakit.devices.query import open_query, visibility
from cudakit.devices.result import Pair, field_registry
from cudakit.errors import EnvironmentUnusable, GpuUnavailable
from cudakit.gpu.api.facts import CudaView, DeviceFacts, Link, Process, Telemetry
from cudakit.units import Unavailable

# --- which is which --------------------------------------------------------------------------------


def test_devices_are_matched_by_uuid_not_by_number() -> None:
    result = read_devices(three_gpus())

    assert [(d.nvml_index, d.cuda_index) for d in result.devices] == [(0, 2), (1, 0), (2, 1)]
    assert [d.nvml_index for d in result.visible] == [1, 2, 0]


def test_uuids_are_compared_ignoring_case() -> None:
    loud = replace(cuda_gpu(0, 0), uuid=uuid(0).upper())

    assert one(read_devices(FakeMachine(nvml(gpu(0)), cuda(loud)))).cuda_index == 0


def test_devices_without_uuid_are_matched_by_pci_address() -> None:
    nameless = [
        replace(cuda_gpu(index, 1 - index), uuid=Unavailable("old driver")) for index in range(2)
    ]
    result = read_devices(FakeMachine(nvml(gpu(0), gpu(1)), cuda(*nameless)))

    assert [device.cuda_index for device in result.devices] == [1, 0]
    assert result.devices[0].uuid == uuid(0)


def test_single_gpu_of_both_libraries_is_one_device() -> None:
    ours = DeviceFacts(0, "GPU-aaaa", Unavailable("no bus"), {"name": "Orin (nvgpu)"})
    theirs = DeviceFacts(0, "GPU-bbbb", "0000:00:00.0", {"name": "Orin"})
    device = one(read_devices(FakeMachine(nvml(ours), cuda(theirs))))

    assert (device.nvml_index, device.cuda_index, device.uuid) == (0, 0, "GPU-aaaa")
    assert device.pci_bus_id == "0000:00:00.0"


def test_different_gpus_are_not_merged() -> None:
    result = read_devices(FakeMachine(nvml(gpu(0), gpu(1)), cuda(cuda_gpu(0, 7))))

    assert [(d.nvml_index, d.cuda_index) for d in result.devices[2:]] == [
        (Unavailable("NVML does not report the device"), 0)
    ]
    assert result.devices[0].cuda_index == Unavailable("CUDA does not see the device")


def test_unavailable_field_is_taken_from_other_library() -> None:
    ours = gpu(0, name=Unavailable("no permission"), serial="1")
    fields = one(read_devices(FakeMachine(nvml(ours), cuda(cuda_gpu(0, 0))))).fields

    assert (fields["name"], fields["serial"]) == ("NVIDIA Card 0", "1")
    assert fields["multiprocessor_count"] == 132


def test_mig_instance_is_matched_by_own_uuid() -> None:
    mig_gpu = gpu(0, mig_mode=True)
    instances = [
        replace(gpu(0), index=index, uuid=f"MIG-{index}", parent=0, pci_bus_id=mig_gpu.pci_bus_id)
        for index in range(2)
    ]
    visible = replace(cuda_gpu(0, 0), uuid="MIG-1")
    result = read_devices(FakeMachine(nvml(mig_gpu, *instances), cuda(visible)))

    assert [device.cuda_index for device in result.devices] == [
        Unavailable("CUDA does not see the device"),
        Unavailable("CUDA does not see the device"),
        0,
    ]
    assert result.devices[0].notes == ("MIG mode is on: a CUDA process sees one MIG instance only",)


# --- hidden, absent and lost -----------------------------------------------------------------------


def test_hidden_device_is_listed_with_reason() -> None:
    view = cuda(cuda_gpu(0, 1), hidden=(cuda_gpu(-1, 0),), visible_devices="1")
    hidden, visible = read_devices(FakeMachine(nvml(gpu(0), gpu(1)), view)).devices

    reason = "hidden by CUDA_VISIBLE_DEVICES=1"
    assert (hidden.hidden, hidden.cuda_index) == (True, Unavailable(reason))
    assert hidden.notes == (reason,)
    assert (visible.hidden, visible.cuda_index) == (False, 0)


def test_empty_variable_hides_all_devices() -> None:
    error = (100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected")
    view = cuda(hidden=(cuda_gpu(-1, 0),), visible_devices="", error=error)
    result = read_devices(FakeMachine(nvml(gpu(0)), view))

    assert one(result).cuda_index == Unavailable("hidden: CUDA_VISIBLE_DEVICES is empty")
    assert result.notes == (
        "CUDA does not start: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected",
        "CUDA_VISIBLE_DEVICES is empty, which hides every device",
    )


def test_cuda_fields_are_unavailable_without_cuda() -> None:
    result = read_devices(FakeMachine(nvml(gpu(0)), NO_CUDA))

    device = one(result)
    assert result.cuda == device.cuda_index == device.fields["warp_size"] == NO_CUDA
    assert device.fields["memory_total_bytes"] == 80 * GIB
    assert any(note.startswith("no CUDA indices") for note in result.notes)


def test_nvml_fields_are_unavailable_without_nvml() -> None:
    result = read_devices(FakeMachine(NO_NVML, cuda(cuda_gpu(0, 0))))

    device = one(result)
    assert result.driver_version == device.fields["power_draw_w"] == NO_NVML
    assert device.fields["multiprocessor_count"] == 132
    assert device.cuda_index == 0
    assert any(note.startswith("no clocks, power") for note in result.notes)


def test_query_without_any_gpu_is_refused_with_hint() -> None:
    with pytest.raises(GpuUnavailable) as failure:
        read_devices(FakeMachine(NO_NVML, NO_CUDA))

    assert failure.value.message == NO_CUDA.reason
    assert "cudakit doctor finds the cause" in failure.value.hint


def test_driver_without_gpus_differs_from_no_driver() -> None:
    error = (100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected")

    with pytest.raises(EnvironmentUnusable, match="NVML reports none; CUDA: CUDA_ERROR_NO_DEVICE"):
        read_devices(FakeMachine(nvml(), cuda(error=error)))


def test_failed_cuinit_is_reported_with_devices_of_nvml() -> None:
    error = (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "unsupported display driver / cuda driver")
    result = read_devices(FakeMachine(nvml(gpu(0)), cuda(error=error)))

    assert one(result).cuda_index == Unavailable("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")
    assert not isinstance(result.cuda, Unavailable)
    assert result.cuda.error is not None
    assert result.cuda.error.code == 803


def test_lost_device_has_reasons_instead_of_zeros() -> None:
    lost = Unavailable("the GPU has fallen off the bus")
    device = one(read_devices(FakeMachine(nvml(gpu(0)), cuda(cuda_gpu(0, 0)), {0: [lost]})))

    assert device.lost
    assert device.notes == (lost.reason,)
    assert device.fields["power_draw_w"] == lost
    assert device.fields["name"] == "NVIDIA Card 0"


# --- fields ----------------------------------------------------------------------------------------


def test_every_registered_field_has_value_or_reason() -> None:
    fields = one(read_devices(FakeMachine(nvml(gpu(0)), cuda(cuda_gpu(0, 0))))).fields

    expected = {
        name
        for name, field in field_registry().items()
        if field.kind in ("fact", "telemetry") and field.group != "MIG instance"
    }
    assert fields.keys() == expected
    assert fields["serial"] == Unavailable("NVML did not report it")
    assert fields["max_grid_dim_x"] == Unavailable("CUDA did not report it")


def test_names_limit_fields_but_not_notes() -> None:
    slowed = telemetry_of(clock_event_reasons=("idle", "hardware thermal slowdown"))
    machine = FakeMachine(nvml(gpu(0)), cuda(cuda_gpu(0, 0)), {0: [slowed]})
    device = one(open_query(machine).read(names=["clock_event_reasons", "name"]))

    assert device.fields.keys() == {"clock_event_reasons", "name"}
    assert device.notes == ("throttled: hardware thermal slowdown",)


def test_activity_is_read_on_request_only() -> None:
    activity_read = Telemetry(1, {"sm_activity_percent": 50.0})
    machine = FakeMachine(nvml(gpu(0)), cuda(cuda_gpu(0, 0)), activity_read=activity_read)
    query = open_query(machine)

    assert "sm_activity_percent" not in one(query.read()).fields
    assert one(query.read(activity=True)).fields["sm_activity_percent"] == 50.0


def test_unsupported_activity_has_reason() -> None:
    machine = FakeMachine(nvml(gpu(0)), cuda(cuda_gpu(0, 0)))

    fields = one(open_query(machine).read(activity=True)).fields
    assert fields["tensor_activity_percent"] == Unavailable("the GPU does not measure it")


def test_telemetry_is_read_on_each_call() -> None:
    telemetry_reads = [telemetry_of(power_draw_w=1.0), telemetry_of(power_draw_w=2.0)]
    query = open_query(FakeMachine(nvml(gpu(0)), cuda(cuda_gpu(0, 0)), {0: telemetry_reads}))

    assert [one(query.read()).fields["power_draw_w"] for _ in telemetry_reads] == [1.0, 2.0]


def test_processes_are_listed_on_request_and_once_under_mig() -> None:
    process_list = (Process(7, "compute", 1, "python", "ada"),)
    instance = replace(gpu(0), index=0, uuid="MIG-0", parent=0)
    machine = FakeMachine(nvml(gpu(0, mig_mode=True), instance), cuda(), process_list=process_list)

    assert read_devices(machine).devices[0].processes is None
    mig_gpu, instance = read_devices(machine, processes=True).devices
    assert mig_gpu.processes == Unavailable("the GPU is in MIG mode; see its instances")
    assert instance.processes == process_list


def test_result_of_simulated_machine_is_marked() -> None:
    assert read_devices(three_gpus(simulated=True)).simulated
    assert not read_devices(three_gpus()).simulated


# --- notes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"compute_mode": "prohibited"}, "compute mode: prohibited"),
        ({"integrated": True}, "integrated GPU: it uses the memory of the host"),
        ({"remapped_rows_pending": True}, "reset the GPU to remap memory rows"),
        ({"remapped_rows_failed": True}, "memory rows cannot be remapped"),
        ({"recovery_action": "reset the GPU"}, "the driver requests: reset the GPU"),
        (
            {"ecc_dram_uncorrected_volatile": 2, "ecc_sram_uncorrected_volatile": 1},
            "3 uncorrectable ECC errors",
        ),
    ],
)
def test_unusual_state_has_note(fields: dict[str, object], note: str) -> None:
    device = one(read_devices(FakeMachine(nvml(gpu(0, **fields)), cuda(cuda_gpu(0, 0)))))  # type: ignore[arg-type]

    assert device.notes == (note,)


def test_normal_state_has_no_note() -> None:
    usual = telemetry_of(
        clock_event_reasons=("idle", "application clocks setting"), recovery_action="none"
    )
    healthy = gpu(0, compute_mode="default", remapped_rows_pending=False, integrated=False)
    machine = FakeMachine(nvml(healthy), cuda(cuda_gpu(0, 0)), {0: [usual]})

    assert one(read_devices(machine)).notes == ()


def link(first: int, second: int, *, path: str = "NV18", access: str = "ok") -> Link:
    return Link(first, second, path, 18, access, access, access)


def pairs(view: CudaView | Unavailable, *links: Link, gpus: int = 2) -> tuple[Pair, ...]:
    known = nvml(*map(gpu, range(gpus)), links=links)
    return read_devices(FakeMachine(known, view), topology=True).pairs or ()


def test_pair_has_link_of_nvml_and_access_of_cuda() -> None:
    # CUDA numbers them the other way round.
    view = cuda(
        cuda_gpu(0, 1), cuda_gpu(1, 0), peer_access=((0, 1), (1, 0)), peer_atomics=((0, 1), (1, 0))
    )
    (pair,) = pairs(view, link(0, 1))

    assert (pair.first, pair.second, pair.path, pair.nvlinks) == (0, 1, "NV18", 18)
    assert (pair.cuda_access, pair.cuda_atomics, pair.disagreement) == (True, True, None)


def test_peer_access_in_one_direction_is_no_access() -> None:
    (pair,) = pairs(cuda(cuda_gpu(0, 0), cuda_gpu(1, 1), peer_access=((0, 1),)), link(0, 1))

    assert pair.cuda_access is False


def test_disagreement_nvml_reports_access_and_cuda_does_not() -> None:
    (pair,) = pairs(cuda(cuda_gpu(0, 0), cuda_gpu(1, 1)), link(0, 1))

    assert pair.disagreement == ("NVML 0 and 1: NVML reports peer access, CUDA does not")


def test_disagreement_cuda_reports_access_and_nvml_does_not() -> None:
    view = cuda(cuda_gpu(0, 0), cuda_gpu(1, 1), peer_access=((0, 1), (1, 0)))
    (pair,) = pairs(view, link(0, 1, access="the chipset does not support it"))

    assert pair.disagreement is not None
    assert "CUDA reports peer access" in pair.disagreement


def test_unavailable_access_is_no_disagreement() -> None:
    for view in (NO_CUDA, cuda(cuda_gpu(0, 0))):
        (pair,) = pairs(view, link(0, 1))

        assert isinstance(pair.cuda_access, Unavailable)
        assert pair.disagreement is None


def test_hidden_gpu_has_unavailable_cuda_access() -> None:
    view = cuda(cuda_gpu(0, 1), hidden=(cuda_gpu(-1, 0),), visible_devices="1")
    (pair,) = pairs(view, link(0, 1))

    assert pair.cuda_access == Unavailable("not both devices are visible to CUDA")


def test_pair_without_link_is_listed() -> None:
    first, second, third = pairs(NO_CUDA, link(0, 1), gpus=3)

    assert first.path == "NV18"
    assert second.path == third.path == Unavailable("NVML does not report it")


def test_mig_instances_are_in_no_pair() -> None:
    instance = replace(gpu(0), index=0, uuid="MIG-0", parent=0)
    view = nvml(gpu(0), instance, gpu(1), links=(link(0, 1),))

    result = read_devices(FakeMachine(view, NO_CUDA), topology=True)
    assert result.pairs is not None
    assert [(pair.first, pair.second) for pair in result.pairs] == [(0, 1)]


def test_pairs_are_absent_without_nvml_or_request() -> None:
    assert read_devices(FakeMachine(NO_NVML, cuda(cuda_gpu(0, 0))), topology=True).pairs == ()
    assert read_devices(FakeMachine(nvml(gpu(0)), NO_CUDA)).pairs is None


FIRST = "GPU-51053698-363a-a59f-4199-60617802a154"
SECOND = "GPU-61972ae1-fe9a-6bfb-1a3c-4dd28da50fb9"

# Values, and the devices of two GPUs that driver 580.159.04 left visible; <0> and <1> are the UUIDs.
SEEN: list[tuple[str, tuple[int, ...]]] = [
    ("", ()),
    (" ", ()),
    ("0", (0,)),
    ("1", (1,)),
    ("0,1", (0, 1)),
    ("1,0", (1, 0)),
    ("2", ()),
    ("0,2,1", (0,)),
    ("-1", ()),
    ("1,-1,0", (1,)),
    # Twice is once too often: CUDA then does not start.
    ("1,0,1", ()),
    ("1,1,0", ()),
    ("0,1,0", ()),
    # Numbers are read as strtoul does, and what is behind them is passed over.
    (" 1", (1,)),
    ("\t1", (1,)),
    ("1 ,0", (1, 0)),
    ("01", (1,)),
    ("+1", (1,)),
    ("-0", (0,)),
    ("-0,1", (0, 1)),
    ("0x1", (0,)),
    ("1gpu2,0ampere", (1, 0)),
    ("1;0", (1,)),
    ("0.9,1", (0, 1)),
    ("4294967296", (0,)),
    ("4294967297", (1,)),
    ("99999999999999999999", ()),
    # An entry that is not a number ends the list.
    ("a", ()),
    ("1,a,0", (1,)),
    ("1,,0", (1,)),
    (",1", ()),
    # UUIDs, or as much of them as is not ambiguous.
    ("<0>", (0,)),
    ("<1>,<0>", (1, 0)),
    ("GPU-5", (0,)),
    ("GPU-6", (1,)),
    ("GPU-", ()),
    ("GPU-,<1>", ()),
    ("GPU-61972AE1-FE9A-6BFB-1A3C-4DD28DA50FB9", (1,)),
    ("gpu-61972ae1-fe9a-6bfb-1a3c-4dd28da50fb9", ()),
    ("<1>,<1>", ()),
    ("<1>, <0>", (1,)),
    ("<1> ,<0>", (1, 0)),
    (" <1>", ()),
    ("GPU-ffffffff,<0>", ()),
    ("<0>,GPU-ffffffff,<1>", (0,)),
    # The first entry decides of which kind all are.
    ("0,<1>", (0,)),
    ("<1>,0", (1,)),
    ("MIG-51053698-363a-a59f-4199-60617802a154", (0,)),
    ("MIG-51053698-363a-a59f-4199-60617802a154,<1>", (0, 1)),
]


@pytest.mark.parametrize(("value", "visible"), SEEN)
def test_rules_agree_with_observed_driver(value: str, visible: tuple[int, ...]) -> None:
    named = value.replace("<0>", FIRST).replace("<1>", SECOND)

    assert visibility(named, [FIRST, SECOND]).visible == visible


def test_unset_variable_leaves_all_devices() -> None:
    devices_found = visibility(None, [FIRST, SECOND])

    assert (devices_found.visible, devices_found.notes) == ((0, 1), ())


def test_negative_number_ends_list_as_in_programming_guide() -> None:
    # CUDA Programming Guide, "Environment variables": 0,2,-1,1 leaves 0 and 2.
    devices_found = visibility("0,2,-1,1", ["GPU-a", "GPU-b", "GPU-c"])

    assert devices_found.visible == (0, 2)
    assert devices_found.notes == (
        "CUDA_VISIBLE_DEVICES=0,2,-1,1: '-1' is negative, so CUDA ignores this and all later entries",
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "is empty, which hides every device"),
        ("0,5,1", "no device has index 5 (of 2), so CUDA ignores this and all later entries"),
        ("7", "no device has index 7 (of 2)"),
        ("x", "'x' is not a number"),
        ("0,0", "'0' repeats a device, so CUDA does not start"),
        (f"{FIRST},1", "'1' does not start with GPU- or MIG-"),
        ("GPU-abc", "no UUID starts with 'GPU-abc'"),
    ],
)
def test_ineffective_entry_has_note(value: str, reason: str) -> None:
    (note,) = visibility(value, [FIRST, SECOND]).notes

    assert note.endswith(reason)


def test_ambiguous_uuid_prefix_matches_none() -> None:
    devices_found = visibility("GPU-1", ["GPU-11", "GPU-12"])

    assert devices_found.visible == ()
    assert "2 UUIDs start with 'GPU-1'" in devices_found.notes[0]


@given(st.text(), st.integers(0, 4))
def test_any_value_leaves_distinct_existing_devices(value: str, count: int) -> None:
    visible = visibility(value, [f"GPU-{number}" for number in range(count)]).visible

    assert set(visible) <= set(range(count))
    assert len(visible) == len(set(visible))


@given(st.lists(st.integers(0, 7), unique=True, min_size=1))
def test_valid_numbers_keep_their_order_without_note(numbers: list[int]) -> None:
    devices_found = visibility(",".join(map(str, numbers)), [f"GPU-{index}" for index in range(8)])

    assert (devices_found.visible, devices_found.notes) == (tuple(numbers), ())
