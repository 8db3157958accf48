from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from core.devices.diagnose.machines import (
    FAIL,
    LIBCUDA,
    OK,
    SYSTEM,
    UNKNOWN,
    WARN,
    Machine,
    broken_cuda,
    cuda,
    gpu,
    judged,
    nvml,
    seen,
    without_driver,
)

from cudakit.core.devices.diagnose.cuda import CAUSES
from cudakit.units import Unavailable

WAITING = {"fabric_state": "in progress"}
READY = {"fabric_state": "completed", "fabric_status": "success"}


# --- CK005: does CUDA start? -----------------------------------------------------------------------


def test_cuda_that_starts_tells_its_version_and_how_many_devices_it_sees(machine: Machine) -> None:
    found = judged("CK005", machine())

    assert found.summary == "CUDA 13.0 starts and sees 1 device"
    assert found.evidence["libcuda"] == LIBCUDA


@pytest.mark.parametrize("code", CAUSES)
def test_each_known_error_of_cuinit_brings_its_causes(machine: Machine, code: int) -> None:
    found = judged("CK005", machine(cuda=broken_cuda(code)))

    assert found.status is FAIL
    assert f"({code})" in found.summary
    assert found.fix == CAUSES[code]


def test_an_unknown_error_is_told_in_the_drivers_words(machine: Machine) -> None:
    found = judged("CK005", machine(cuda=broken_cuda(4321)))

    assert found.summary == "cuInit fails with CUDA_ERROR_4321 (4321): in the driver's words"


def test_devices_that_a_variable_hides_are_told_of_by_the_check_of_the_variable(
    machine: Machine,
) -> None:
    hidden = broken_cuda(100, visible_devices="", order=("GPU-1",), hidden=(gpu(),))

    assert judged("CK005", machine(cuda=hidden)).status is UNKNOWN
    assert judged("CK014", machine(cuda=hidden)).status is FAIL


def test_a_missing_libcuda_asks_for_the_drivers_libraries(tmp_path: Path) -> None:
    found = judged("CK005", without_driver(tmp_path, SYSTEM))

    assert found.summary == "libcuda.so.1 cannot be loaded"
    assert found.fix[0].startswith("install the driver's CUDA library")


def test_in_a_container_a_missing_libcuda_is_a_missing_capability(tmp_path: Path) -> None:
    found = judged("CK005", without_driver(tmp_path, SYSTEM | {"/.dockerenv": ""}))

    assert "NVIDIA_DRIVER_CAPABILITIES" in found.fix[0]


def test_a_driver_that_hangs_is_a_failure(machine: Machine) -> None:
    found = judged("CK005", machine(cuda=Unavailable("the CUDA driver did not answer within 30 s")))

    assert found.status is FAIL
    assert "did not answer within 30 s" in found.summary


def test_no_device_without_an_error_is_a_failure_too(machine: Machine) -> None:
    assert judged("CK005", machine(cuda=cuda(devices=(), order=()))).status is FAIL


# --- CK006: is the fabric ready? -------------------------------------------------------------------


def test_machines_without_nvswitch_wait_for_nothing(machine: Machine) -> None:
    assert judged("CK006", machine()).summary == "no GPU waits for an NVSwitch fabric"


def fabric(*states: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return seen(*(gpu(at, **state) for at, state in enumerate(states))) | changes


def test_a_fabric_that_is_set_up_is_ready(machine: Machine) -> None:
    found = judged("CK006", machine(**fabric(READY, READY)))

    assert found.status is OK
    assert found.evidence == dict.fromkeys(("GPU 0", "GPU 1"), "completed, success")


def test_a_fabric_that_keeps_cuda_from_starting_names_the_service(machine: Machine) -> None:
    waiting = machine(**fabric(WAITING, WAITING, cuda=broken_cuda(802)))

    found = judged("CK006", waiting)

    assert found.status is FAIL
    assert found.evidence["nv-fabricmanager"] == "does not run here"
    assert "nvidia-fabricmanager" in found.fix[0]


def test_a_gpu_that_did_not_register_lacks_its_peers(machine: Machine) -> None:
    found = judged("CK006", machine(**fabric(READY, WAITING)))

    assert found.status is WARN
    assert "GPU 1 cannot reach its peers" in found.summary


def test_a_gpu_alone_needs_no_fabric(machine: Machine) -> None:
    assert judged("CK006", machine(**fabric(WAITING))).status is OK


def test_without_nvml_the_fabric_is_not_known(machine: Machine) -> None:
    assert judged("CK006", machine(nvml=Unavailable("silent"))).status is UNKNOWN
    assert judged("CK006", machine(nvml=nvml(gpu()))).status is OK
