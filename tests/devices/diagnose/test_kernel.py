from __future__ import annotations

from pathlib import Path

import pytest
from devices.diagnose.machines import (
    FAIL,
    OK,
    SYSTEM,
    UNKNOWN,
    WARN,
    Machine,
    changed,
    cuda,
    files,
    gpu,
    nvml,
    on_bus,
    run_check,
    without_driver,
)

from cudakit.gpu.api.facts import DeviceFacts
from cudakit.gpu.api.run_context import DeviceNode
from cudakit.units import Unavailable

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
