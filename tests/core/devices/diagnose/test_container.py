from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from core.devices.diagnose.machines import (
    FAIL,
    OK,
    SYSTEM,
    UNKNOWN,
    WARN,
    Machine,
    broken_cuda,
    files,
    judged,
    without_driver,
)

from cudakit.gpu.api.run_context import Library, RunContext
from cudakit.units import Unavailable

# --- CK016: the container --------------------------------------------------------------------------


def contained(root: Path, **environment: str) -> RunContext:
    return without_driver(root, SYSTEM | {"/.dockerenv": ""}, variables=environment)


def test_outside_of_a_container_there_is_nothing_to_set(machine: Machine) -> None:
    assert judged("CK016", machine()).summary == "this is no container"


def test_a_container_in_which_all_works_is_well(machine: Machine, tmp_path: Path) -> None:
    files(tmp_path, {"/.dockerenv": ""})
    odd = machine(variables={"NVIDIA_VISIBLE_DEVICES": "void"})

    assert judged("CK016", odd).status is OK


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"NVIDIA_DRIVER_CAPABILITIES": "graphics"}, "leaves out compute and utility"),
        ({"NVIDIA_DRIVER_CAPABILITIES": "compute"}, "leaves out utility"),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, "gives the container no GPU"),
        ({"NVIDIA_VISIBLE_DEVICES": ""}, "=(empty) gives the container no GPU"),
    ],
)
def test_a_variable_that_keeps_the_gpu_out_fails(
    tmp_path: Path, environment: dict[str, str], words: str
) -> None:
    found = judged("CK016", contained(tmp_path, **environment))

    assert found.status is FAIL
    assert words in found.summary


@pytest.mark.parametrize("capabilities", ["all", "", "compute,utility,video"])
def test_capabilities_that_hold_both_are_well(tmp_path: Path, capabilities: str) -> None:
    found = judged("CK016", contained(tmp_path, NVIDIA_DRIVER_CAPABILITIES=capabilities))

    assert found.status is OK


# --- CK019: MPS ------------------------------------------------------------------------------------


def test_without_mps_there_is_nothing_to_reach(machine: Machine) -> None:
    assert judged("CK019", machine()).summary == "MPS is not in use"


def test_mps_whose_pipes_are_there_is_well(machine: Machine, tmp_path: Path) -> None:
    files(tmp_path, {"/run/mps/control": ""})
    served = machine(variables={"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"})

    assert judged("CK019", served).summary == "MPS serves /run/mps"


def test_a_directory_without_pipes_has_no_daemon(machine: Machine) -> None:
    left = machine(variables={"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"})

    assert judged("CK019", left).status is WARN


def test_cuda_that_cannot_reach_the_daemon_fails(machine: Machine) -> None:
    found = judged("CK019", machine(cuda=broken_cuda(805)))

    assert found.status is FAIL
    assert found.fix[0] == "nvidia-cuda-mps-control -d"


# --- CK036: WSL ------------------------------------------------------------------------------------


def wsl(root: Path, *real: str, **changes: Any) -> RunContext:
    release = {"/proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2"}
    copies = tuple(Library("libcuda.so.1", path, path, "system") for path in real)
    return without_driver(root, release, **{"libraries": copies, **changes})


def test_outside_of_wsl_there_is_nothing_to_say(machine: Machine) -> None:
    assert judged("CK036", machine()).summary == "this is not WSL"


def test_wsl_with_the_driver_of_windows_is_well(tmp_path: Path) -> None:
    files(tmp_path, {"/usr/lib/wsl/lib/libcuda.so.1": ""})

    assert judged("CK036", wsl(tmp_path, "/usr/lib/wsl/drivers/nv/libcuda.so.1.1")).status is OK


def test_a_linux_driver_inside_wsl_hides_that_of_windows(tmp_path: Path) -> None:
    found = judged("CK036", wsl(tmp_path, "/usr/lib/x86_64-linux-gnu/libcuda.so.535.1"))

    assert found.status is FAIL
    assert "apt purge" in found.fix[0]


def test_wsl_without_libcuda_needs_a_driver_in_windows(tmp_path: Path) -> None:
    assert "install the NVIDIA driver in Windows" in judged("CK036", wsl(tmp_path)).fix[0]


def test_wsl_whose_libraries_are_not_known_is_not_judged(tmp_path: Path) -> None:
    assert judged("CK036", wsl(tmp_path, libraries=Unavailable("no"))).status is UNKNOWN
