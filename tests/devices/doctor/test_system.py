""""""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from devices.doctor.machines import (
    FAIL,
    OK,
    SYSTEM,
    UNKNOWN,
    WARN,
    Machine,
    failed_cuda,
    files,
    healthy_machine,
    run_check,
    without_driver,
)

from cudakit.devices.doctor.check import Status
from cudakit.gpu.api.facts import SHARED_MEMORY, Library, Limits, Mount, RunContext
from cudakit.gpu.machine import open_machine
from cudakit.gpu.run_context import gather_all
from cudakit.units import Unavailable

# --- CK016: the container --------------------------------------------------------------------------


def contained(root: Path, **environment: str) -> RunContext:
    return without_driver(root, SYSTEM | {"/.dockerenv": ""}, variables=environment)


def test_container_check_is_ok_outside_container(machine: Machine) -> None:
    assert run_check("CK016", machine()).summary == "not in a container"


def test_container_with_working_cuda_is_ok(machine: Machine, tmp_path: Path) -> None:
    files(tmp_path, {"/.dockerenv": ""})
    odd = machine(variables={"NVIDIA_VISIBLE_DEVICES": "void"})

    assert run_check("CK016", odd).status is OK


@pytest.mark.parametrize(
    ("environment", "expected_text"),
    [
        ({"NVIDIA_DRIVER_CAPABILITIES": "graphics"}, "does not contain compute and utility"),
        ({"NVIDIA_DRIVER_CAPABILITIES": "compute"}, "does not contain utility"),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, "gives the container no GPU"),
        ({"NVIDIA_VISIBLE_DEVICES": ""}, "=(empty) gives the container no GPU"),
    ],
)
def test_container_variable_excluding_gpu_fails(
    tmp_path: Path, environment: dict[str, str], expected_text: str
) -> None:
    finding = run_check("CK016", contained(tmp_path, **environment))

    assert finding.status is FAIL
    assert expected_text in finding.summary


@pytest.mark.parametrize("capabilities", ["all", "", "compute,utility,video"])
def test_container_capabilities_with_compute_and_utility_are_ok(
    tmp_path: Path, capabilities: str
) -> None:
    finding = run_check("CK016", contained(tmp_path, NVIDIA_DRIVER_CAPABILITIES=capabilities))

    assert finding.status is OK


# --- CK019: MPS ------------------------------------------------------------------------------------


def test_mps_not_in_use_is_ok(machine: Machine) -> None:
    assert run_check("CK019", machine()).summary == "MPS is not in use"


def test_mps_with_pipes_is_ok(machine: Machine, tmp_path: Path) -> None:
    files(tmp_path, {"/run/mps/control": ""})
    served = machine(variables={"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"})

    assert run_check("CK019", served).summary == "an MPS daemon runs with /run/mps"


def test_mps_directory_without_pipes_warns(machine: Machine) -> None:
    without_daemon = machine(variables={"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"})

    assert run_check("CK019", without_daemon).status is WARN


def test_mps_daemon_unreachable_fails(machine: Machine) -> None:
    finding = run_check("CK019", machine(cuda=failed_cuda(805)))

    assert finding.status is FAIL
    assert finding.fix[0] == "nvidia-cuda-mps-control -d"


# --- CK036: WSL ------------------------------------------------------------------------------------


def wsl(root: Path, *real: str, **changes: Any) -> RunContext:
    release = {"/proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2"}
    copies = tuple(Library("libcuda.so.1", path, path, "system") for path in real)
    return without_driver(root, release, **{"libraries": copies, **changes})


def test_wsl_check_is_ok_outside_wsl(machine: Machine) -> None:
    assert run_check("CK036", machine()).summary == "not in WSL"


def test_wsl_check_is_not_performed_on_simulated_wsl() -> None:
    context = gather_all(open_machine("sim:wsl"), variables={}, search_path=())

    assert context.host.is_wsl
    assert run_check("CK036", context).summary == "the machine is simulated"


def test_wsl_with_windows_driver_is_ok(tmp_path: Path) -> None:
    files(tmp_path, {"/usr/lib/wsl/lib/libcuda.so.1": ""})

    assert run_check("CK036", wsl(tmp_path, "/usr/lib/wsl/drivers/nv/libcuda.so.1.1")).status is OK


def test_wsl_with_linux_driver_fails(tmp_path: Path) -> None:
    finding = run_check("CK036", wsl(tmp_path, "/usr/lib/x86_64-linux-gnu/libcuda.so.535.1"))

    assert finding.status is FAIL
    assert "apt purge" in finding.fix[0]


def test_wsl_without_libcuda_fails(tmp_path: Path) -> None:
    assert "install the NVIDIA driver in Windows" in run_check("CK036", wsl(tmp_path)).fix[0]


def test_wsl_with_unlisted_libraries_is_unknown(tmp_path: Path) -> None:
    assert run_check("CK036", wsl(tmp_path, libraries=Unavailable("no"))).status is UNKNOWN


LOCKED = 'RmProfilingAdminOnly: 1\nRegistryDwords: ""'


# --- CK025: does another tool hold CUPTI? ----------------------------------------------------------


def test_cupti_without_other_tool_is_ok(machine: Machine) -> None:
    assert run_check("CK025", machine()).status is OK
    assert run_check("CK025", machine(processes=Unavailable("hidden"))).status is OK


def test_injected_tool_warns(machine: Machine) -> None:
    injected = machine(variables={"CUDA_INJECTION64_PATH": "/opt/tool/libinject.so"})

    finding = run_check("CK025", injected)

    assert finding.status is WARN
    assert finding.evidence == {"CUDA_INJECTION64_PATH": "/opt/tool/libinject.so"}


@pytest.mark.parametrize(
    ("process", "fix"),
    [("nv-hostengine", "dcgmi profile --pause"), ("nsys", "end nsys before you profile")],
)
def test_running_tool_warns_with_way_to_pause(machine: Machine, process: str, fix: str) -> None:
    finding = run_check("CK025", machine(processes=frozenset({"bash", process})))

    assert finding.status is WARN
    assert finding.fix[0].startswith(fix)


# --- CK026: may counters be read? ------------------------------------------------------------------


def test_counters_for_all_users_are_ok(machine: Machine) -> None:
    assert run_check("CK026", machine()).summary == "every user can read performance counters"


def test_counters_for_administrators_need_privilege(tmp_path: Path) -> None:
    locked = files(tmp_path / "locked", SYSTEM | {"/proc/driver/nvidia/params": LOCKED})

    assert run_check("CK026", healthy_machine(locked)).status is WARN
    assert run_check("CK026", healthy_machine(locked, privileged=True)).status is OK


def test_counters_are_unknown_without_driver_parameters(tmp_path: Path) -> None:
    assert run_check("CK026", healthy_machine(files(tmp_path, {}))).status is UNKNOWN


# --- CK034 and CK035: memory ----------------------------------------------------------------------


def test_unlimited_memory_is_ok(machine: Machine) -> None:
    assert run_check("CK034", machine()).status is OK
    assert run_check("CK035", machine()).status is OK


def test_unknown_limits_are_unknown(machine: Machine) -> None:
    unknown = machine(shared_memory_bytes=Unavailable("none"), limits=Unavailable("none"))

    assert run_check("CK034", unknown).status is UNKNOWN
    assert run_check("CK035", unknown).status is UNKNOWN


# --- CK034: shared memory --------------------------------------------------------------------------


def test_shared_memory_of_docker_default_warns(machine: Machine, tmp_path: Path) -> None:
    files(tmp_path, {"/.dockerenv": ""})

    finding = run_check("CK034", machine(shared_memory_bytes=64 << 20))

    assert finding.status is WARN
    assert finding.evidence == {SHARED_MEMORY: "64.0 MiB"}
    assert finding.fix[0].startswith("docker run --ipc=host")


def test_small_shared_memory_outside_container_has_mount_fix(machine: Machine) -> None:
    assert run_check("CK034", machine(shared_memory_bytes=64 << 20)).fix[0].startswith("sudo mount")


# --- CK035: limits ---------------------------------------------------------------------------------


def test_limited_address_space_warns(machine: Machine) -> None:
    finding = run_check("CK035", machine(limits=Limits(64 << 30, None)))

    assert finding.status is WARN
    assert (
        "the address space is limited to 64.0 GiB: CUDA may fail with out of memory"
        in finding.summary
    )


def test_strict_overcommit_warns(tmp_path: Path) -> None:
    strict = files(tmp_path, SYSTEM | {"/proc/sys/vm/overcommit_memory": "2"})

    assert "vm.overcommit_memory is 2" in run_check("CK035", healthy_machine(strict)).summary


def test_locked_memory_limit_warns_with_infiniband_only(machine: Machine, tmp_path: Path) -> None:
    little = Limits(None, 64 << 10)

    assert run_check("CK035", machine(limits=little)).status is OK
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert "InfiniBand (mlx5_0) needs more" in run_check("CK035", machine(limits=little)).summary


# --- CK037: compiled extensions -------------------------------------------------------------------


def test_missing_extension_warns_with_consequence_and_fix(machine: Machine) -> None:
    finding = run_check("CK037", machine(missing_extensions=("memory/load/_pickled",)))

    assert finding.status is WARN
    assert finding.summary == "cudakit was installed without 1 compiled extension"
    assert "Python reader" in finding.evidence["memory/load/_pickled"]
    assert "C compiler" in finding.fix[0]


def test_installed_extensions_are_ok(machine: Machine) -> None:
    assert run_check("CK037", machine()).status is OK


def test_gpudirect_storage_without_nvidia_fs_is_in_compatibility_mode(machine: Machine) -> None:
    context = machine()
    context = replace(context, driver=replace(context.driver, udev_database=True))
    finding = run_check("CK038", context)

    assert finding.status is Status.OK
    assert "reads through host memory" in finding.summary


@pytest.mark.parametrize(("version", "status"), [("", Status.OK), ("2.25", Status.WARN)])
def test_cufile_refuses_files_without_database_of_udev(
    machine: Machine, version: str, status: Status
) -> None:
    context = machine()
    driver = replace(context.driver, nvidia_fs=version, udev_database=False)
    finding = run_check("CK038", replace(context, driver=driver))

    assert finding.status is status
    assert "udev's database /run/udev" in finding.summary
    assert "missing" in finding.summary
    assert finding.evidence["udev's database"] == "missing"


def test_missing_gpudirect_storage_and_database_matter_to_cufile_only(machine: Machine) -> None:
    context = machine()
    driver = replace(context.driver, nvidia_fs="", udev_database=False)

    assert run_check("CK038", replace(context, driver=driver)).summary == (
        "GPUDirect Storage is not set up and udev's database /run/udev is missing; only programs that use "
        "cuFile need them"
    )


@pytest.mark.parametrize(
    ("mounts", "status"), [((), Status.WARN), ((Mount("/data", "ext4"),), Status.OK)]
)
def test_gpudirect_storage_needs_a_supported_file_system(
    machine: Machine, mounts: tuple[Mount, ...], status: Status
) -> None:
    context = machine()
    driver = replace(context.driver, nvidia_fs="2.25", mounts=mounts, udev_database=True)
    context = replace(context, driver=driver)

    assert run_check("CK038", context).status is status
