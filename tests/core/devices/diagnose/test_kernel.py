from __future__ import annotations

from pathlib import Path

import pytest
from core.devices.diagnose.machines import (
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
    judged,
    nvml,
    on_bus,
    without_driver,
)

from cudakit.gpu.api.facts import DeviceFacts
from cudakit.gpu.api.run_context import DeviceNode
from cudakit.units import Unavailable

SILENT = Unavailable("does not answer")


def nodes(*names: str, error: str = "") -> tuple[DeviceNode, ...]:
    return tuple(DeviceNode(f"/dev/{name}", "crw-rw----", error) for name in names)


# --- CK002: may this process open the nodes? -------------------------------------------------------


def test_nodes_that_open_are_well(machine: Machine) -> None:
    assert judged("CK002", machine()).status is OK


def test_nodes_do_not_matter_where_cuda_works(machine: Machine) -> None:
    assert judged("CK002", machine(device_nodes=())).status is OK


def test_a_container_without_nodes_was_started_without_gpu(tmp_path: Path) -> None:
    found = judged("CK002", without_driver(tmp_path, SYSTEM | {"/.dockerenv": ""}))

    assert found.status is FAIL
    assert found.fix[0].startswith("docker run --gpus all")


def test_missing_nodes_are_made_by_nvidia_modprobe(tmp_path: Path) -> None:
    bare = without_driver(tmp_path, SYSTEM, device_nodes=nodes("nvidiactl", "nvidia0"))

    assert judged("CK002", bare).fix == ("sudo nvidia-modprobe -u -c 0",)
    assert "/dev/nvidia-uvm is not there" in judged("CK002", bare).summary


@pytest.mark.parametrize(
    ("error", "extra", "words"),
    [
        ("EPERM", {"/.dockerenv": ""}, "the container may not use its GPU any more"),
        ("EACCES", {}, "this user may not open /dev/nvidia0 (EACCES)"),
        ("EIO", {}, "/dev/nvidia0 cannot be opened (EIO)"),
    ],
)
def test_a_node_that_is_refused_tells_the_cause_by_its_error(
    tmp_path: Path, error: str, extra: dict[str, str], words: str
) -> None:
    shut = (*nodes("nvidiactl", "nvidia-uvm"), *nodes("nvidia0", error=error))

    found = judged("CK002", without_driver(tmp_path, SYSTEM | extra, device_nodes=shut))

    assert found.status is FAIL
    assert words in found.summary
    assert error in found.evidence["/dev/nvidia0"]


def test_wsl_reaches_the_driver_through_another_node(tmp_path: Path) -> None:
    release = {"/proc/sys/kernel/osrelease": "5.15-microsoft"}
    wsl = without_driver(tmp_path, SYSTEM | release, device_nodes=nodes("dxg", error="EACCES"))

    assert judged("CK002", wsl).summary == "/dev/dxg cannot be opened (EACCES)"
    assert judged("CK002", changed(wsl, device_nodes=nodes("dxg"))).status is OK


def test_nodes_of_a_simulated_gpu_are_not_judged(machine: Machine) -> None:
    assert judged("CK002", machine(simulated=True)).status is UNKNOWN


# --- CK007: does every GPU answer? -----------------------------------------------------------------


def test_gpus_of_the_bus_that_nvml_knows_are_well(machine: Machine, tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:00:00.0")

    assert judged("CK007", machine()).summary == "NVML knows every GPU of the PCI bus (1)"


def test_a_gpu_that_the_driver_does_not_start_is_named(machine: Machine, tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:00:00.0")
    on_bus(tmp_path, "0000:65:00.0")

    found = judged("CK007", machine())

    assert found.status is WARN
    assert found.evidence == {"0000:65:00.0": "nvidia"}


def test_a_container_may_have_some_of_the_gpus(machine: Machine, tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:00:00.0")
    on_bus(tmp_path, "0000:65:00.0")
    files(tmp_path, {"/.dockerenv": ""})

    assert judged("CK007", machine()).status is OK


def test_a_gpu_that_is_passed_on_to_a_virtual_machine_is_not_missed(
    machine: Machine, tmp_path: Path
) -> None:
    on_bus(tmp_path, "0000:00:00.0")
    on_bus(tmp_path, "0000:65:00.0", driver="vfio-pci")

    assert judged("CK007", machine()).status is OK


def test_a_gpu_that_reads_as_all_ones_has_fallen_off_the_bus(
    machine: Machine, tmp_path: Path
) -> None:
    on_bus(tmp_path, "0000:65:00.0", revision="0xff")

    assert "fallen off the bus: 0000:65:00.0" in judged("CK007", machine(nvml=SILENT)).summary


def test_a_gpu_that_nvml_lost_is_named(machine: Machine) -> None:
    lost = DeviceFacts(1, Unavailable("the GPU is lost"), Unavailable("the GPU is lost"), {})

    found = judged("CK007", machine(nvml=nvml(gpu(), lost), cuda=cuda()))

    assert found.status is FAIL
    assert found.evidence == {"GPU 1": "the GPU is lost"}


def test_without_nvml_and_a_bus_nothing_is_known(machine: Machine) -> None:
    assert judged("CK007", machine(nvml=SILENT)).status is UNKNOWN


# --- CK033: the kernel log ------------------------------------------------------------------------


LINE = "NVRM: Xid (PCI:0000:65:00): {}, pid=1234, name=python3, Ch 00000008"


def test_a_log_without_xids_is_well(machine: Machine) -> None:
    assert judged("CK033", machine()).status is OK


def test_a_log_that_may_not_be_read_is_not_judged(machine: Machine) -> None:
    found = judged("CK033", machine(kernel_log=Unavailable("EPERM on /dev/kmsg")))

    assert found.status is UNKNOWN
    assert found.summary == "EPERM on /dev/kmsg"


@pytest.mark.parametrize(
    ("number", "status"),
    [(31, WARN), (63, WARN), (79, FAIL), (48, FAIL), (154, WARN), (9999, WARN)],
)
def test_an_xid_is_judged_by_whose_doing_it_mostly_is(
    machine: Machine, number: int, status: object
) -> None:
    assert judged("CK033", machine(kernel_log=(LINE.format(number),))).status is status


def test_xids_are_counted_by_gpu_and_number(machine: Machine) -> None:
    log = (LINE.format(31), LINE.format(31), LINE.format(79), "usb 1-1: new device")

    found = judged("CK033", machine(kernel_log=log))

    assert found.evidence == {
        "Xid 31 on 0000:65:00": "2×, a kernel used an address that is not mapped",
        "Xid 79 on 0000:65:00": "1×, the GPU fell off the bus",
    }
    assert found.status is FAIL
