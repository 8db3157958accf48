""""""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from devices.doctor.machines import (
    DRIVER,
    FAIL,
    OK,
    SYSTEM,
    UNKNOWN,
    WARN,
    Machine,
    changed,
    cuda,
    failed_cuda,
    files,
    gpu,
    nvml,
    on_bus,
    run_check,
    without_driver,
)

from cudakit.gpu.api.facts import DeviceFacts, DeviceNode, Library
from cudakit.units import Unavailable

WSL = {"/proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2"}
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


# --- CK001: is it loaded? --------------------------------------------------------------------------


def test_version_file_proves_driver_and_kind(machine: Machine) -> None:
    finding = run_check("CK001", machine())

    assert finding.status is OK
    assert finding.summary == f"driver {DRIVER} is loaded (open kernel module)"


def test_proprietary_module_is_distinguished_from_open_one(tmp_path: Path) -> None:
    text = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023"
    )

    finding = run_check("CK001", without_driver(tmp_path, {"/proc/driver/nvidia/version": text}))

    assert finding.summary == "driver 535.129.03 is loaded (proprietary kernel module)"


def test_nvml_answer_proves_hidden_driver(tmp_path: Path) -> None:
    hidden = replace(without_driver(tmp_path, {}), nvml=nvml())

    assert run_check("CK001", hidden).status is OK


def test_machine_without_gpu_fails(tmp_path: Path) -> None:
    finding = run_check("CK001", without_driver(tmp_path, {}))

    assert finding.status is FAIL
    assert finding.evidence["PCI bus"] == "no NVIDIA GPU"


def test_nouveau_fails_with_command_of_distribution(tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:65:00.0", driver="nouveau")

    finding = run_check("CK001", without_driver(tmp_path, {"/etc/os-release": "ID=debian"}))

    assert finding.status is FAIL
    assert "nouveau" in finding.summary
    assert finding.fix[0] == "sudo apt install nvidia-driver"


def test_missing_module_for_kernel_fails(tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:65:00.0", driver="")

    finding = run_check("CK001", without_driver(tmp_path, {"/proc/sys/kernel/osrelease": "6.8.0"}))

    assert finding.summary == "no NVIDIA kernel module is installed for kernel 6.8.0"


@pytest.mark.parametrize(("byte", "fixes"), [("\x00", 1), ("\x01", 2)])
def test_unloaded_module_fails_and_names_secure_boot(tmp_path: Path, byte: str, fixes: int) -> None:
    on_bus(tmp_path, "0000:65:00.0", driver="")
    contents = {
        "/proc/sys/kernel/osrelease": "6.8.0",
        "/lib/modules/6.8.0/modules.dep": "updates/dkms/nvidia.ko.zst:",
        SECURE_BOOT: f"\x06\x00\x00\x00{byte}",
    }

    finding = run_check("CK001", without_driver(tmp_path, contents))

    assert finding.fix[0].startswith("sudo modprobe nvidia")
    assert len(finding.fix) == fixes


def test_missing_driver_in_container_names_host(tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:65:00.0", driver="")

    finding = run_check("CK001", without_driver(tmp_path, {"/.dockerenv": ""}))

    assert finding.summary == "the NVIDIA driver is not loaded on the host"


def test_missing_driver_in_wsl_names_windows(tmp_path: Path) -> None:
    finding = run_check("CK001", without_driver(tmp_path, WSL))

    assert finding.status is FAIL
    assert "in Windows (never in WSL)" in finding.fix[0]


# --- CK003: does NVML answer? ----------------------------------------------------------------------


def test_nvml_answer_reports_gpu_count(machine: Machine) -> None:
    assert run_check("CK003", machine()).summary == f"NVML 13.{DRIVER} answers and sees 1 GPU"


@pytest.mark.parametrize(
    ("reason", "extra", "fix"),
    [
        ("libnvidia-ml.so.1 (NVML) cannot be loaded", {}, "nvidia-utils"),
        ("libnvidia-ml.so.1 (NVML) cannot be loaded", {"/.dockerenv": ""}, "compute,utility"),
        ("driver and library are of different versions", {}, "CK004"),
        ("NVML cannot be initialized: Unknown Error", {"/.dockerenv": ""}, "CK002"),
    ],
)
def test_nvml_failure_has_fix_for_reason(
    tmp_path: Path, reason: str, extra: dict[str, str], fix: str
) -> None:
    silent = replace(without_driver(tmp_path, SYSTEM | extra), nvml=Unavailable(reason))

    finding = run_check("CK003", silent)

    assert finding.status is FAIL
    assert reason in finding.summary
    assert fix in finding.fix[0]


def test_checks_depending_on_driver_are_unknown_without_driver(tmp_path: Path) -> None:
    gone = without_driver(tmp_path, {})

    for name in ("CK002", "CK003", "CK004", "CK005", "CK007", "CK009", "CK026", "CK041"):
        assert run_check(name, gone).status is UNKNOWN
        assert run_check(name, gone).summary == "the driver is not loaded (CK001)"


def test_jetson_without_nvml_is_ok(tmp_path: Path) -> None:
    jetson = SYSTEM | {"/proc/device-tree/model": "NVIDIA Jetson AGX Orin\0"}

    assert run_check("CK003", without_driver(tmp_path, jetson, cuda=cuda())).status is OK


# --- CK004: is it of one version? ------------------------------------------------------------------


def test_equal_versions_are_ok(machine: Machine) -> None:
    finding = run_check("CK004", machine())

    assert finding.status is OK
    assert set(finding.evidence.values()) == {DRIVER}


def test_libraries_newer_than_module_fail_with_reboot(machine: Machine) -> None:
    updated = machine(
        nvml=Unavailable("have different versions"),
        cuda=failed_cuda(803, libcuda="/usr/lib/libcuda.so.580.200.01"),
        libraries=(
            Library(
                "libnvidia-ml.so.1", "/usr/lib/x", "/usr/lib/libnvidia-ml.so.580.200.01", "system"
            ),
        ),
    )

    finding = run_check("CK004", updated)

    assert finding.status is FAIL
    assert finding.evidence == {
        "kernel module": DRIVER,
        "libnvidia-ml": "580.200.01",
        "libcuda": "580.200.01",
    }
    assert finding.fix[0].startswith("reboot")


def test_cuda_compat_version_is_not_compared(machine: Machine) -> None:
    compat = machine(cuda=cuda(libcuda="/usr/local/cuda/compat/libcuda.so.595.45.04"))

    assert run_check("CK004", compat).status is OK


def test_library_without_version_is_not_compared(tmp_path: Path) -> None:
    wsl = without_driver(
        tmp_path, WSL, nvml=nvml(), cuda=cuda(libcuda="/usr/lib/wsl/libcuda.so.1.1")
    )

    assert run_check("CK004", wsl).status is UNKNOWN


def test_version_file_that_is_a_directory_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia/version").mkdir(parents=True)

    assert files(tmp_path, {}).text("/proc/driver/nvidia/version") is None


COMPAT = "/usr/local/cuda-13.2/compat/libcuda.so.{}"


def copy(source: str, path: str, soname: str = "libcudnn.so.9") -> Library:
    return Library(soname, f"{path}/{soname}", f"{path}/{soname}.19.0", source)


# --- CK008: which libcuda? -------------------------------------------------------------------------


def test_libcuda_of_driver_is_ok(machine: Machine) -> None:
    assert run_check("CK008", machine()).status is OK


def test_libcuda_stub_fails(machine: Machine) -> None:
    stub = failed_cuda(34, libcuda="/usr/local/cuda/lib64/stubs/libcuda.so")

    finding = run_check("CK008", machine(cuda=stub))

    assert finding.status is FAIL
    assert "directory stubs from LD_LIBRARY_PATH" in finding.fix[0]


@pytest.mark.parametrize(
    ("code", "expected_text"),
    [(803, "it does not suit this driver"), (804, "this GPU does not support it")],
)
def test_cuda_compat_refused_by_driver_fails(
    machine: Machine, code: int, expected_text: str
) -> None:
    finding = run_check(
        "CK008", machine(cuda=failed_cuda(code, libcuda=COMPAT.format("595.45.04")))
    )

    assert finding.status is FAIL
    assert expected_text in finding.summary


def test_cuda_compat_newer_than_driver_is_ok(machine: Machine) -> None:
    assert run_check("CK008", machine(cuda=cuda(libcuda=COMPAT.format("595.45.04")))).status is OK


def test_cuda_compat_older_than_driver_warns(machine: Machine) -> None:
    finding = run_check("CK008", machine(cuda=cuda(libcuda=COMPAT.format("570.86.10"))))

    assert finding.status is WARN
    assert "570.86.10 of cuda-compat is older than driver 580.159.04" in finding.summary


def test_other_copies_of_libcuda_are_evidence(machine: Machine) -> None:
    copies = (copy("system", "/opt/old", "libcuda.so.1"),)

    evidence = run_check("CK008", machine(libraries=copies)).evidence

    assert evidence["other copies"] == "/opt/old/libcuda.so.1.19.0"


def test_libcuda_origin_is_unknown_without_libcuda(machine: Machine) -> None:
    machine_without_self_test = machine(cuda=Unavailable("cannot be loaded"), libraries=())

    assert run_check("CK008", machine_without_self_test).status is UNKNOWN


SILENT = Unavailable("does not answer")


def nodes(*names: str, error: str = "") -> tuple[DeviceNode, ...]:
    return tuple(DeviceNode(f"/dev/{name}", "crw-rw----", error) for name in names)


# --- CK002: may this process open the nodes? -------------------------------------------------------


def test_device_nodes_that_open_are_ok(machine: Machine) -> None:
    assert run_check("CK002", machine()).status is OK


def test_device_nodes_are_ok_if_cuda_works(machine: Machine) -> None:
    assert run_check("CK002", machine(device_nodes=())).status is OK


def test_missing_device_nodes_in_container_name_docker_option(tmp_path: Path) -> None:
    finding = run_check("CK002", without_driver(tmp_path, SYSTEM | {"/.dockerenv": ""}))

    assert finding.status is FAIL
    assert finding.fix[0].startswith("docker run --gpus all")


def test_missing_device_nodes_name_nvidia_modprobe(tmp_path: Path) -> None:
    bare = without_driver(tmp_path, SYSTEM, device_nodes=nodes("nvidiactl", "nvidia0"))

    assert run_check("CK002", bare).fix == ("sudo nvidia-modprobe -u -c 0",)
    assert "/dev/nvidia-uvm does not exist" in run_check("CK002", bare).summary


@pytest.mark.parametrize(
    ("error", "extra", "expected_text"),
    [
        ("EPERM", {"/.dockerenv": ""}, "the container has no permission to use the GPU"),
        ("EACCES", {}, "no permission to open /dev/nvidia0 (EACCES)"),
        ("EIO", {}, "/dev/nvidia0 cannot be opened (EIO)"),
    ],
)
def test_refused_device_node_is_explained_by_errno(
    tmp_path: Path, error: str, extra: dict[str, str], expected_text: str
) -> None:
    shut = (*nodes("nvidiactl", "nvidia-uvm"), *nodes("nvidia0", error=error))

    finding = run_check("CK002", without_driver(tmp_path, SYSTEM | extra, device_nodes=shut))

    assert finding.status is FAIL
    assert expected_text in finding.summary
    assert error in finding.evidence["/dev/nvidia0"]


def test_device_node_of_wsl_is_checked(tmp_path: Path) -> None:
    release = {"/proc/sys/kernel/osrelease": "5.15-microsoft"}
    wsl = without_driver(tmp_path, SYSTEM | release, device_nodes=nodes("dxg", error="EACCES"))

    assert run_check("CK002", wsl).summary == "/dev/dxg cannot be opened (EACCES)"
    assert run_check("CK002", changed(wsl, device_nodes=nodes("dxg"))).status is OK


def test_device_nodes_are_unknown_if_simulated(machine: Machine) -> None:
    assert run_check("CK002", machine(simulated=True)).status is UNKNOWN


# --- CK007: GPUs on the PCI bus --------------------------------------------------------------------


def test_gpus_on_bus_known_to_nvml_are_ok(machine: Machine, tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:00:00.0")

    assert run_check("CK007", machine()).summary == "NVML reports every GPU on the PCI bus (1)"


def test_gpu_on_bus_unknown_to_nvml_warns(machine: Machine, tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:00:00.0")
    on_bus(tmp_path, "0000:65:00.0")

    finding = run_check("CK007", machine())

    assert finding.status is WARN
    assert finding.evidence == {"0000:65:00.0": "nvidia"}


def test_container_with_some_of_the_gpus_is_ok(machine: Machine, tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:00:00.0")
    on_bus(tmp_path, "0000:65:00.0")
    files(tmp_path, {"/.dockerenv": ""})

    assert run_check("CK007", machine()).status is OK


def test_gpu_passed_through_to_vm_is_ignored(machine: Machine, tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:00:00.0")
    on_bus(tmp_path, "0000:65:00.0", driver="vfio-pci")

    assert run_check("CK007", machine()).status is OK


def test_gpu_reading_all_ones_fails(machine: Machine, tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:65:00.0", revision="0xff")

    assert "fallen off the bus: 0000:65:00.0" in run_check("CK007", machine(nvml=SILENT)).summary


def test_gpu_lost_by_nvml_fails(machine: Machine) -> None:
    lost = DeviceFacts(1, Unavailable("the GPU is lost"), Unavailable("the GPU is lost"), {})

    finding = run_check("CK007", machine(nvml=nvml(gpu(), lost), cuda=cuda()))

    assert finding.status is FAIL
    assert finding.evidence == {"GPU 1": "the GPU is lost"}


def test_gpus_on_bus_are_unknown_if_bus_cannot_be_read(machine: Machine) -> None:
    finding = run_check("CK007", machine())

    assert (finding.status, finding.summary) == (UNKNOWN, "the PCI bus cannot be read here")


def test_gpus_are_unknown_without_nvml_and_bus(machine: Machine) -> None:
    assert run_check("CK007", machine(nvml=SILENT)).status is UNKNOWN


# --- CK033: the kernel log ------------------------------------------------------------------------


LINE = "NVRM: Xid (PCI:0000:65:00): {}, pid=1234, name=python3, Ch 00000008"


def test_log_without_xids_is_ok(machine: Machine) -> None:
    assert run_check("CK033", machine()).status is OK


def test_unreadable_log_is_unknown(machine: Machine) -> None:
    finding = run_check("CK033", machine(kernel_log=Unavailable("EPERM on /dev/kmsg")))

    assert finding.status is UNKNOWN
    assert finding.summary == "EPERM on /dev/kmsg"


@pytest.mark.parametrize(
    ("number", "status"),
    [(31, WARN), (63, WARN), (79, FAIL), (48, FAIL), (154, WARN), (9999, WARN)],
)
def test_xid_status_depends_on_usual_cause(machine: Machine, number: int, status: object) -> None:
    assert run_check("CK033", machine(kernel_log=(LINE.format(number),))).status is status


def test_xids_are_counted_by_gpu_and_number(machine: Machine) -> None:
    log = (LINE.format(31), LINE.format(31), LINE.format(79), "usb 1-1: new device")

    finding = run_check("CK033", machine(kernel_log=log))

    assert finding.evidence == {
        "Xid 31 on 0000:65:00": "2×, memory page fault: a kernel accessed an unmapped address",
        "Xid 79 on 0000:65:00": "1×, the GPU has fallen off the bus",
    }
    assert finding.status is FAIL
