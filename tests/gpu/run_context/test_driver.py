from __future__ import annotations

from pathlib import Path

import pytest
from gpu.run_context.trees import tree

from cudakit.gpu.api.run_context import Driver, KernelModule, Mount
from cudakit.gpu.run_context.driver import device_nodes, kernel_log, read_driver
from cudakit.gpu.run_context.files import Files
from cudakit.units import Unavailable

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build"


def test_device_nodes_of_the_driver_are_opened_and_others_ignored(tmp_path: Path) -> None:
    files = tree(tmp_path, dev__nvidia0="", dev__null="")
    (tmp_path / "dev/nvidia-caps").mkdir()
    (tmp_path / "dev/nvidiactl").symlink_to("gone")

    errors = {node.path: node.error for node in device_nodes(files)}

    assert errors == {"/dev/nvidia0": "", "/dev/nvidiactl": "ENOENT"}


def test_kernel_log_messages_have_no_prefix(tmp_path: Path) -> None:
    files = tree(tmp_path, dev__kmsg="6,1,200,-;Linux version\n3,2,300,-;NVRM: Xid (PCI:0): 79\n")

    assert kernel_log(files) == ("Linux version", "NVRM: Xid (PCI:0): 79")


def test_unreadable_kernel_log_is_unavailable_with_its_error(tmp_path: Path) -> None:
    assert kernel_log(Files(tmp_path)) == Unavailable(
        "the kernel log cannot be read (ENOENT on /dev/kmsg)"
    )


def test_driver_without_files_is_empty() -> None:
    driver = read_driver(Files(None), {}, "")

    assert isinstance(driver.kernel_log, Unavailable)
    assert driver == Driver(kernel_log=driver.kernel_log, udev_database=False)


def test_loaded_kernel_modules_are_recognised_by_name(tmp_path: Path) -> None:
    files = tree(
        tmp_path,
        proc__driver__nvidia__version=OPEN,
        proc__modules="nouveau 2500 1 - Live\nnvidia_fake 1 0 - Live\n",
    )
    (tmp_path / "lib/modules/6.8.0-60").mkdir(parents=True)
    (tmp_path / "lib/modules/6.8.0-60/modules.dep").write_text("updates/dkms/nvidia.ko.zst:\n")

    driver = read_driver(files, {}, "6.8.0-60")

    assert driver.module == KernelModule("580.159.04", is_open=True)
    assert (driver.module_installed, driver.nouveau_loaded) == (True, True)
    assert not read_driver(files, {}, "6.8.0-61").module_installed


@pytest.mark.parametrize(
    ("variables", "is_found"), [({}, False), ({"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}, True)]
)
def test_mps_pipes_are_found_in_directory_of_variable(
    tmp_path: Path, variables: dict[str, str], is_found: bool
) -> None:
    files = tree(tmp_path, run__mps__control="")

    assert read_driver(files, variables, "").mps_pipes is is_found


def test_nvidia_fs_and_the_file_systems_it_supports_are_recorded(tmp_path: Path) -> None:
    files = tree(
        tmp_path,
        **{
            "proc__driver__nvidia-fs__version": "version: 2.25.7\n",
            "proc__mounts": "proc /proc proc rw 0 0\n/dev/nvme0n1 /data ext4 rw 0 0\nbroken\n",
        },
    )

    driver = read_driver(files, {}, "6.8.0")

    assert driver.nvidia_fs == "2.25.7"
    assert driver.mounts == (Mount("/data", "ext4"),)
