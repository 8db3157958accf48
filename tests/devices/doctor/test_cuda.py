""""""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from devices.doctor.machines import (
    FAIL,
    LIBCUDA,
    OK,
    SYSTEM,
    UNKNOWN,
    WARN,
    Machine,
    cuda,
    failed_cuda,
    gpu,
    nvml,
    run_check,
    without_driver,
)

from cudakit.gpu.api.facts import CudaView
from cudakit.gpu.driver_errors import remedy_of
from cudakit.units import Unavailable

# --- CK005: does CUDA start? -----------------------------------------------------------------------


def test_cuinit_success_reports_version_and_device_count(machine: Machine) -> None:
    finding = run_check("CK005", machine())

    assert finding.summary == "CUDA 13.0 starts and sees 1 device"
    assert finding.evidence["libcuda"] == LIBCUDA


@pytest.mark.parametrize(
    "code", [3, 34, 46, 100, 101, 102, 304, 802, 803, 804, 805, 806, 807, 808, 809, 999]
)
def test_known_cuinit_error_has_its_remedy(machine: Machine, code: int) -> None:
    finding = run_check("CK005", machine(cuda=failed_cuda(code)))

    assert finding.status is FAIL
    assert f"({code})" in finding.summary
    assert finding.fix == (remedy_of(code),)
    assert remedy_of(code)


def test_cuinit_without_memory_names_limits_of_address_space(machine: Machine) -> None:
    finding = run_check("CK005", machine(cuda=failed_cuda(2)))

    assert "ulimit -v" in finding.fix[0]


def test_unknown_cuinit_error_has_text_of_driver(machine: Machine) -> None:
    finding = run_check("CK005", machine(cuda=failed_cuda(4321)))

    assert finding.summary == "cuInit fails with CUDA_ERROR_4321 (4321): in the driver's words"


def test_hidden_devices_are_left_to_visibility_check(
    machine: Machine,
) -> None:
    hidden = failed_cuda(100, visible_devices="", order=("GPU-1",), hidden=(gpu(),))

    assert run_check("CK005", machine(cuda=hidden)).status is UNKNOWN
    assert run_check("CK014", machine(cuda=hidden)).status is FAIL


def test_missing_libcuda_fails(tmp_path: Path) -> None:
    finding = run_check("CK005", without_driver(tmp_path, SYSTEM))

    assert finding.summary == "libcuda.so.1 cannot be loaded"
    assert finding.fix[0].startswith("install the driver's CUDA library")


def test_missing_libcuda_in_container_names_capability(tmp_path: Path) -> None:
    finding = run_check("CK005", without_driver(tmp_path, SYSTEM | {"/.dockerenv": ""}))

    assert "NVIDIA_DRIVER_CAPABILITIES" in finding.fix[0]


def test_hanging_driver_fails(machine: Machine) -> None:
    finding = run_check(
        "CK005", machine(cuda=Unavailable("the CUDA driver did not answer within 30 s"))
    )

    assert finding.status is FAIL
    assert "did not answer within 30 s" in finding.summary


def test_no_device_without_error_fails(machine: Machine) -> None:
    assert run_check("CK005", machine(cuda=cuda(devices=(), order=()))).status is FAIL


ALL_UUIDS = tuple(str(gpu(position).uuid) for position in range(3))


def view_of_gpus(value: str | None, *positions: int) -> CudaView:
    """Return CUDA's view of three GPUs, of which those at ``positions`` are visible."""
    visible = tuple(replace(gpu(position), index=index) for index, position in enumerate(positions))
    hidden = tuple(
        replace(gpu(position), index=-1) for position in range(3) if position not in positions
    )
    return cuda(visible_devices=value, devices=visible, hidden=hidden, order=ALL_UUIDS)


# --- CK014: CUDA_VISIBLE_DEVICES -------------------------------------------------------------------


def test_visible_devices_unset_is_ok(machine: Machine) -> None:
    assert run_check("CK014", machine()).status is OK


def test_visible_devices_list_reports_count(machine: Machine) -> None:
    finding = run_check("CK014", machine(cuda=view_of_gpus("2,0", 2, 0)))

    assert finding.summary == "CUDA_VISIBLE_DEVICES=2,0: 2 of 3 devices are visible"


def test_visible_devices_with_invalid_entry_warns(machine: Machine) -> None:
    finding = run_check("CK014", machine(cuda=view_of_gpus("0,7,1", 0)))

    assert finding.status is WARN
    assert "no device has index 7" in finding.summary
    assert finding.evidence["visible devices"] == "1 of 3"


@pytest.mark.parametrize("value", ["", "-1", "0,0", "GPU-ffff"])
def test_visible_devices_hiding_all_fails(machine: Machine, value: str) -> None:
    finding = run_check("CK014", machine(cuda=view_of_gpus(value)))

    assert finding.status is FAIL
    assert finding.fix[0] == "unset CUDA_VISIBLE_DEVICES"


def test_visible_devices_is_unknown_without_cuda(machine: Machine) -> None:
    machine_without_cuda = machine(
        cuda=Unavailable("no libcuda"), variables={"CUDA_VISIBLE_DEVICES": "0"}
    )

    assert run_check("CK014", machine_without_cuda).status is UNKNOWN


def test_variable_that_is_not_set_hides_no_device_with_or_without_cuda(machine: Machine) -> None:
    for cuda_view in (cuda(), Unavailable("no libcuda")):
        finding = run_check("CK014", machine(cuda=cuda_view))

        assert finding.summary == "CUDA_VISIBLE_DEVICES is not set, so it hides no device"


# --- CK015: the order ------------------------------------------------------------------------------


def three(*positions: int, value: str | None = None) -> dict[str, Any]:
    return {
        "nvml": nvml(*(gpu(position) for position in range(3))),
        "cuda": view_of_gpus(value, *positions),
    }


def test_device_order_of_nvidia_smi_is_ok(machine: Machine) -> None:
    assert run_check("CK015", machine(**three(0, 1, 2))).status is OK


def test_device_order_unlike_nvidia_smi_warns(machine: Machine) -> None:
    finding = run_check("CK015", machine(**three(2, 0, 1)))

    assert finding.status is WARN
    assert finding.evidence["cuda:0"] == "GPU 2 of nvidia-smi"
    assert finding.fix == ("export CUDA_DEVICE_ORDER=PCI_BUS_ID",)


def test_device_order_set_by_variable_is_ok(machine: Machine) -> None:
    assert run_check("CK015", machine(**three(2, 0, value="2,0"))).status is OK


def test_device_order_unknown_to_cuda_warns(machine: Machine) -> None:
    odd = machine(variables={"CUDA_DEVICE_ORDER": "PCI"})

    assert (
        run_check("CK015", odd).summary == "CUDA_DEVICE_ORDER=PCI is not valid, so CUDA ignores it"
    )


@pytest.mark.parametrize("silent", ["nvml", "cuda"])
def test_device_order_is_unknown_without_both_libraries(machine: Machine, silent: str) -> None:
    assert run_check("CK015", machine(**{silent: Unavailable("no")})).status is UNKNOWN


# --- CK041 to CK044: the self-test ----------------------------------------------------------------


STEPS = {"CK041": "context", "CK042": "compile", "CK043": "kernel", "CK044": "copy"}


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    error: str = ""
    hint: str = ""
    details: Mapping[str, str] = field(default_factory=lambda: {"cuda:0": "16 MiB exact"})


@pytest.mark.parametrize(("name", "step"), STEPS.items())
def test_successful_step_reports_observation(machine: Machine, name: str, step: str) -> None:
    finding = run_check(name, machine(self_test=(Step(step),)))

    assert finding.status is OK
    assert finding.summary.endswith("(16 MiB exact)")


@pytest.mark.parametrize(
    ("gpus", "text"), [(["cuda:0"], "cuda:0"), (["cuda:0", "cuda:1"], "each of the 2 GPUs")]
)
@pytest.mark.parametrize(("name", "step"), STEPS.items())
def test_successful_step_names_its_gpus(
    machine: Machine, name: str, step: str, gpus: list[str], text: str
) -> None:
    details = dict.fromkeys(gpus, "16 MiB exact")

    finding = run_check(name, machine(self_test=(Step(step, details=details),)))

    assert f" {text} " in finding.summary


@pytest.mark.parametrize(("name", "step"), STEPS.items())
def test_failed_step_has_hint_as_fix(machine: Machine, name: str, step: str) -> None:
    finding = run_check(name, machine(self_test=(Step(step, "cuda:0: it broke", "repair it"),)))

    assert finding.status is FAIL
    assert (finding.summary, finding.fix) == ("cuda:0: it broke", ("repair it",))


def test_steps_after_failed_one_are_unknown(machine: Machine) -> None:
    stopped = machine(self_test=(Step("context", "no memory"),))

    assert run_check("CK042", stopped).summary == "an earlier step of the self-test failed"
    assert run_check("CK042", stopped).status is UNKNOWN


def test_steps_are_unknown_without_self_test(machine: Machine) -> None:
    machine_without_self_test = machine(self_test=Unavailable("the GPU is simulated"))

    assert run_check("CK041", machine_without_self_test).summary == "the GPU is simulated"
