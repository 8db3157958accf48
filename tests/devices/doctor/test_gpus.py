""""""

from __future__ import annotations

from typing import Any

import pytest
from devices.doctor.machines import (
    FAIL,
    OK,
    UNKNOWN,
    WARN,
    Machine,
    both_views,
    cuda,
    failed_cuda,
    gpu,
    instance,
    nvml,
    run_check,
)

from cudakit.gpu.api.facts import DeviceFacts
from cudakit.units import Unavailable

WAITING = {"fabric_state": "in progress"}
READY = {"fabric_state": "completed", "fabric_status": "success"}


NONE = Unavailable("not supported by this device")


# --- CK006: is the fabric ready? -------------------------------------------------------------------


def test_fabric_is_ok_without_nvswitch(machine: Machine) -> None:
    assert run_check("CK006", machine()).summary == "no GPU needs an NVSwitch fabric"


def fabric(*states: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return both_views(*(gpu(index, **state) for index, state in enumerate(states))) | changes


def test_fabric_completed_is_ok(machine: Machine) -> None:
    finding = run_check("CK006", machine(**fabric(READY, READY)))

    assert finding.status is OK
    assert finding.evidence == dict.fromkeys(("GPU 0", "GPU 1"), "completed, success")


def test_fabric_blocking_cuda_fails_with_service(machine: Machine) -> None:
    waiting = machine(**fabric(WAITING, WAITING, cuda=failed_cuda(802)))

    finding = run_check("CK006", waiting)

    assert finding.status is FAIL
    assert finding.evidence["nv-fabricmanager"] == "not running here"
    assert "nvidia-fabricmanager" in finding.fix[0]


def test_fabric_incomplete_on_one_gpu_warns(machine: Machine) -> None:
    finding = run_check("CK006", machine(**fabric(READY, WAITING)))

    assert finding.status is WARN
    assert "GPU 1 cannot reach other GPUs" in finding.summary


def test_fabric_is_ok_for_single_gpu(machine: Machine) -> None:
    assert run_check("CK006", machine(**fabric(WAITING))).status is OK


def test_fabric_is_unknown_without_nvml(machine: Machine) -> None:
    assert run_check("CK006", machine(nvml=Unavailable("silent"))).status is UNKNOWN
    assert run_check("CK006", machine(nvml=nvml(gpu()))).status is OK


# --- CK017: MIG ------------------------------------------------------------------------------------


def test_mig_disabled_is_ok(machine: Machine) -> None:
    assert run_check("CK017", machine()).summary == "no GPU is in MIG mode"


def test_mig_with_instances_is_ok(machine: Machine) -> None:
    divided = both_views(
        gpu(0, mig_mode=True, mig_mode_pending=True), instance(0, 0), instance(1, 0)
    )

    assert run_check("CK017", machine(**divided)).evidence == {"GPU 0": "2 instances"}


@pytest.mark.parametrize(("others", "status"), [((), FAIL), ((gpu(1),), WARN)])
def test_mig_without_instances_is_reported(
    machine: Machine, others: tuple[Any, ...], status: object
) -> None:
    empty = both_views(gpu(0, mig_mode=True, mig_mode_pending=True), *others)

    finding = run_check("CK017", machine(**empty))

    assert finding.status is status
    assert "GPU 0: MIG mode is on without any instance" in finding.summary


def test_pending_change_of_mig_mode_warns(machine: Machine) -> None:
    finding = run_check("CK017", machine(**both_views(gpu(0, mig_mode_pending=True))))

    assert finding.status is WARN
    assert finding.evidence == {"GPU 0": "off, on after a reset"}


# --- CK018: compute mode ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modes", "status"),
    [
        (("default", "default"), OK),
        (("exclusive process", "default"), WARN),
        (("prohibited", "default"), WARN),
        (("prohibited", "prohibited"), FAIL),
    ],
)
def test_compute_mode_decides_status(
    machine: Machine, modes: tuple[str, ...], status: object
) -> None:
    gpus = both_views(*(gpu(index, compute_mode=mode) for index, mode in enumerate(modes)))

    assert run_check("CK018", machine(**gpus)).status is status


def test_compute_mode_that_only_cuda_reports_is_checked(machine: Machine) -> None:
    changes = {
        "nvml": nvml(gpu(compute_mode=NONE)),
        "cuda": cuda(gpu(compute_mode="exclusive process")),
    }

    assert run_check("CK018", machine(**changes)).status is WARN


@pytest.mark.parametrize(
    ("name", "field_names", "summary"),
    [
        ("CK018", ("compute_mode",), "no GPU reports its compute mode"),
        (
            "CK028",
            (
                "remapped_rows_failed",
                "remapped_rows_pending",
                "retired_pages_pending",
                "repair_channel_pending",
                "unrepairable_memory",
                "recovery_action",
            ),
            "no GPU reports the state of memory repairs",
        ),
        ("CK030", ("clock_event_reasons",), "no GPU reports whether it is throttled"),
    ],
)
def test_check_without_reported_state_says_so(
    machine: Machine, name: str, field_names: tuple[str, ...], summary: str
) -> None:
    not_reported = dict.fromkeys(field_names, NONE)

    finding = run_check(name, machine(**both_views(gpu(0, **not_reported))))

    assert (finding.status, finding.summary) == (UNKNOWN, summary)


# --- CK027 and CK028: memory ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["CK027", "CK028"])
def test_memory_without_errors_is_ok(machine: Machine, name: str) -> None:
    assert run_check(name, machine()).status is OK


@pytest.mark.parametrize("name", ["CK027", "CK028"])
def test_memory_is_unknown_without_nvml(machine: Machine, name: str) -> None:
    finding = run_check(name, machine(nvml=Unavailable("silent")))

    assert finding.status is UNKNOWN
    assert finding.summary == "NVML does not answer (CK003)"


# --- CK027: ECC ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "expected_text"),
    [
        ({"ecc_dram_uncorrected_volatile": 2}, FAIL, "GPU 1: uncorrectable memory errors since"),
        ({"ecc_sram_uncorrected_volatile": 1}, FAIL, "GPU 1: uncorrectable memory errors since"),
        ({"ecc_dram_uncorrected_aggregate": 1}, WARN, "before the driver was last loaded"),
        ({"ecc_sram_threshold_exceeded": True}, FAIL, "exceeds the limit for replacement"),
    ],
)
def test_uncorrected_memory_errors_name_gpu(
    machine: Machine, fields: dict[str, Any], status: object, expected_text: str
) -> None:
    finding = run_check("CK027", machine(**both_views(gpu(0), gpu(1, **fields))))

    assert finding.status is status
    assert expected_text in finding.summary
    assert list(finding.evidence) == ["GPU 1"]


def test_memory_errors_of_gpu_without_ecc_are_unknown(machine: Machine) -> None:
    fields: dict[str, Any] = {
        "ecc_sram_uncorrected_volatile": NONE,
        "ecc_dram_uncorrected_volatile": NONE,
        "ecc_dram_uncorrected_aggregate": NONE,
    }

    finding = run_check("CK027", machine(**both_views(gpu(0, **fields))))

    assert (
        finding.summary == "no GPU reports counts of memory errors, for example because ECC is off"
    )


def test_ecc_counters_are_read_from_telemetry(machine: Machine) -> None:
    moved = both_views(gpu(0), ecc_dram_uncorrected_volatile=3)

    assert run_check("CK027", machine(**moved)).status is FAIL


# --- CK028: repairs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "expected_text"),
    [
        ({"remapped_rows_pending": True}, WARN, "in use until the next reset"),
        ({"retired_pages_pending": True}, WARN, "in use until the next reset"),
        ({"remapped_rows_failed": True}, FAIL, "no spare rows are left"),
        ({"recovery_action": "reset the GPU"}, FAIL, "requests a recovery action: reset the GPU"),
    ],
)
def test_pending_memory_repair_has_fix(
    machine: Machine, fields: dict[str, Any], status: object, expected_text: str
) -> None:
    finding = run_check("CK028", machine(**both_views(gpu(0, **fields))))

    assert finding.status is status
    assert expected_text in finding.summary


def test_finished_memory_repairs_are_counted(machine: Machine) -> None:
    rows = both_views(gpu(0, remapped_rows_correctable=1, remapped_rows_uncorrectable=2))
    pages = both_views(
        gpu(
            0,
            remapped_rows_correctable=NONE,
            retired_pages_single_bit=3,
            retired_pages_double_bit=1,
        )
    )

    assert run_check("CK028", machine(**rows)).evidence == {"GPU 0": "3 rows remapped"}
    assert run_check("CK028", machine(**pages)).evidence == {"GPU 0": "4 pages retired"}


# --- CK029 to CK032: speed ------------------------------------------------------------------------


ALL = ("CK029", "CK030", "CK031", "CK032")


def fields_of_one_gpu(**fields: Any) -> dict[str, Any]:
    return both_views(gpu(0, **fields))


@pytest.mark.parametrize("name", ALL)
def test_gpu_at_full_speed_is_ok(machine: Machine, name: str) -> None:
    assert run_check(name, machine()).status is OK


@pytest.mark.parametrize("name", ALL)
def test_gpu_without_readings_cannot_be_checked(machine: Machine, name: str) -> None:
    silent = both_views(DeviceFacts(0, "GPU-1", "0000:01:00.0", {"power_limit_enforced_w": NONE}))

    assert run_check(name, machine(**silent)).status is UNKNOWN


@pytest.mark.parametrize("name", ALL)
def test_speed_is_unknown_without_nvml(machine: Machine, name: str) -> None:
    assert run_check(name, machine(nvml=Unavailable("silent"))).status is UNKNOWN


# --- CK029: PCIe -----------------------------------------------------------------------------------


def test_pcie_link_slow_while_idle_is_ok(machine: Machine) -> None:
    finding = run_check("CK029", machine(**fields_of_one_gpu(pcie_generation=1)))

    assert finding.status is OK
    assert "idle links run slower, which is normal" in finding.summary


def test_pcie_link_slow_under_load_warns(machine: Machine) -> None:
    finding = run_check(
        "CK029", machine(**fields_of_one_gpu(pcie_generation=3, utilization_gpu_percent=90))
    )

    assert finding.status is WARN
    assert finding.evidence == {"GPU 0": "generation 3 x16, maximum generation 5 x16, busy"}


def test_pcie_link_with_fewer_lanes_warns_even_while_idle(machine: Machine) -> None:
    finding = run_check("CK029", machine(**fields_of_one_gpu(pcie_width=8)))

    assert finding.status is WARN
    assert "fewer lanes than GPU and slot support" in finding.summary


# --- CK030: throttling -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reasons", "status"),
    [
        (("idle",), OK),
        (("software power cap",), OK),
        ((), OK),
        (("hardware slowdown", "hardware thermal slowdown"), WARN),
        (("software thermal slowdown",), WARN),
        (("hardware power brake slowdown",), WARN),
    ],
)
def test_throttling_warns_for_heat_and_power_only(
    machine: Machine, reasons: tuple[str, ...], status: object
) -> None:
    assert (
        run_check("CK030", machine(**fields_of_one_gpu(clock_event_reasons=reasons))).status
        is status
    )


# --- CK031: power limit ----------------------------------------------------------------------------


def test_power_limit_below_default_warns_with_command(machine: Machine) -> None:
    finding = run_check("CK031", machine(**fields_of_one_gpu(power_limit_enforced_w=450.0)))

    assert finding.status is WARN
    assert finding.evidence == {"GPU 0": "450 W, default 700 W"}
    assert finding.fix == ("sudo nvidia-smi -i 0 -pl 700",)


def test_power_limit_within_rounding_is_default(machine: Machine) -> None:
    assert (
        run_check("CK031", machine(**fields_of_one_gpu(power_limit_enforced_w=699.5))).status is OK
    )


# --- CK032: persistence ----------------------------------------------------------------------------


def test_persistence_mode_off_warns(machine: Machine) -> None:
    finding = run_check("CK032", machine(**fields_of_one_gpu(persistence_mode=False)))

    assert finding.status is WARN
    assert "nvidia-persistenced" in finding.fix[0]


def test_persistence_mode_off_is_ok_with_display(machine: Machine) -> None:
    with_display = fields_of_one_gpu(persistence_mode=False, display_active=True)

    assert run_check("CK032", machine(**with_display)).status is OK
