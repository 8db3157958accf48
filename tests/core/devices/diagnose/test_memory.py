from __future__ import annotations

from typing import Any

import pytest
from core.devices.diagnose.machines import FAIL, OK, UNKNOWN, WARN, Machine, gpu, judged, seen

from cudakit.units import Unavailable

NONE = Unavailable("not supported by this device")


@pytest.mark.parametrize("name", ["CK027", "CK028"])
def test_memory_without_errors_is_well(machine: Machine, name: str) -> None:
    assert judged(name, machine()).status is OK


@pytest.mark.parametrize("name", ["CK027", "CK028"])
def test_without_nvml_memory_is_not_judged(machine: Machine, name: str) -> None:
    found = judged(name, machine(nvml=Unavailable("silent")))

    assert found.status is UNKNOWN
    assert found.summary == "NVML does not answer (CK003)"


# --- CK027: ECC ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"ecc_dram_uncorrected_volatile": 2}, FAIL, "GPU 1 has had memory errors"),
        ({"ecc_sram_uncorrected_volatile": 1}, FAIL, "GPU 1 has had memory errors"),
        ({"ecc_dram_uncorrected_aggregate": 1}, WARN, "earlier in its life"),
        ({"ecc_sram_threshold_exceeded": True}, FAIL, "exceed the limit for replacement"),
    ],
)
def test_errors_that_could_not_be_corrected_name_the_gpu(
    machine: Machine, fields: dict[str, Any], status: object, words: str
) -> None:
    found = judged("CK027", machine(**seen(gpu(0), gpu(1, **fields))))

    assert found.status is status
    assert words in found.summary
    assert list(found.evidence) == ["GPU 1"]


def test_gpus_without_ecc_count_nothing(machine: Machine) -> None:
    fields: dict[str, Any] = {
        "ecc_sram_uncorrected_volatile": NONE,
        "ecc_dram_uncorrected_volatile": NONE,
        "ecc_dram_uncorrected_aggregate": NONE,
    }

    found = judged("CK027", machine(**seen(gpu(0, **fields))))

    assert found.summary == "no GPU counts memory errors (it has no ECC, or has it off)"


def test_counters_that_move_come_from_telemetry(machine: Machine) -> None:
    moved = seen(gpu(0), ecc_dram_uncorrected_volatile=3)

    assert judged("CK027", machine(**moved)).status is FAIL


# --- CK028: repairs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"remapped_rows_pending": True}, WARN, "replaced at the next reset"),
        ({"retired_pages_pending": True}, WARN, "replaced at the next reset"),
        ({"remapped_rows_failed": True}, FAIL, "no spare rows left"),
        ({"recovery_action": "reset the GPU"}, FAIL, "asks for recovery: reset the GPU"),
    ],
)
def test_memory_that_waits_for_repair_says_what_it_needs(
    machine: Machine, fields: dict[str, Any], status: object, words: str
) -> None:
    found = judged("CK028", machine(**seen(gpu(0, **fields))))

    assert found.status is status
    assert words in found.summary


def test_repairs_that_were_made_are_counted(machine: Machine) -> None:
    rows = seen(gpu(0, remapped_rows_correctable=1, remapped_rows_uncorrectable=2))
    pages = seen(
        gpu(
            0,
            remapped_rows_correctable=NONE,
            retired_pages_single_bit=3,
            retired_pages_double_bit=1,
        )
    )

    assert judged("CK028", machine(**rows)).evidence == {"GPU 0": "3 rows remapped"}
    assert judged("CK028", machine(**pages)).evidence == {"GPU 0": "4 pages retired"}
