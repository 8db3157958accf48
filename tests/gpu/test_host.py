""""""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpu.trees import tree

from cudakit.gpu.api.facts import Driver, Host, KernelModule, Mount
from cudakit.gpu.host import (
    SYSTEM,
    Files,
    device_nodes,
    is_privileged,
    kernel_log,
    process_names,
    read_driver,
    read_host,
    read_limits,
)
from cudakit.units import Unavailable


@pytest.fixture
def files(tmp_path: Path) -> Files:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/name").write_text("first\nsecond\n")
    (tmp_path / "etc/link").symlink_to("name")
    return Files(tmp_path)


def test_file_is_read_by_absolute_path(files: Files) -> None:
    assert files.text("/etc/name") == "first\nsecond"
    assert files.names("/etc") == ("link", "name")
    assert files.exists("/etc/name")


def test_link_resolves_to_absolute_path(files: Files) -> None:
    assert files.resolve("/etc/link") == "/etc/name"
    assert files.resolve("/etc/nowhere") == "/etc/nowhere"


def test_absent_file_has_no_text(files: Files) -> None:
    assert files.text("/etc/absent") is None
    assert files.text("/etc") is None
    assert files.names("/absent") == ()
    assert not files.exists("/absent")


def test_files_without_root_are_absent() -> None:
    files = Files(None)

    assert files.text("/etc/os-release") is None
    assert files.names("/") == ()
    assert not files.exists("/")
    assert files.resolve("/lib") == "/lib"
    assert files.locate("/dev/kmsg") is None


def test_invalid_utf8_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"a\xffb\n")

    assert Files(tmp_path).text("/raw") == "a\ufffdb"


def test_long_file_is_read_completely(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("line\n" * 100_000)

    assert (Files(tmp_path).text("/long") or "").count("line") == 100_000


def test_kernel_release_is_readable() -> None:
    # Large reads of files under /proc/sys fail.
    assert Files(Path("/")).text("/proc/sys/kernel/osrelease") == os.uname().release


@pytest.mark.parametrize(
    ("minor", "is_in_memory"), [(27, True), (28, True), (0, False), (99, False)]
)
def test_file_system_in_memory_is_found_by_its_device_number(
    tmp_path: Path, minor: int, is_in_memory: bool
) -> None:
    mounts = tmp_path / "proc/self/mountinfo"
    mounts.parent.mkdir(parents=True)
    mounts.write_text(
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "30 25 0:27 / /dev/shm rw,relatime shared:3 - tmpfs tmpfs rw\n"
        "31 25 0:28 / /mnt rw - ramfs none rw\n"
    )

    assert Files(tmp_path).is_in_memory(os.makedev(0, minor)) is is_in_memory


def test_host_facts_are_read_from_the_files_of_the_system(tmp_path: Path) -> None:
    files = tree(
        tmp_path,
        proc__cpuinfo="processor\t: 0\nmodel name\t: Xeon 8480C\nmodel name\t: another\n",
        proc__meminfo="MemTotal: 9 kB\nMemAvailable:    2048 kB\n",
        proc__sys__kernel__osrelease="6.8.0-60-generic\n",
        proc__sys__vm__overcommit_memory="2\n",
        sys__class__infiniband__mlx5_0="",
    )
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text('ID="ubuntu"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n')

    host = read_host(files, {})

    assert (host.cpu, host.kernel) == ("Xeon 8480C", "6.8.0-60-generic")
    assert (host.distribution, host.distribution_id) == ("Ubuntu 24.04.3 LTS", "ubuntu")
    assert (host.overcommit_memory, host.infiniband) == ("2", ("mlx5_0",))
    assert host.available_bytes == 2 << 20


def test_available_memory_is_limited_by_the_control_groups(tmp_path: Path) -> None:
    files = tree(
        tmp_path,
        proc__meminfo="MemAvailable:    2048 kB\n",
        proc__self__cgroup="0::/pod/job\n",
    )
    for name, limit, used in (("pod", "1500000", "500000"), ("pod/job", "max", "400000")):
        group = tmp_path / "sys/fs/cgroup" / name
        group.mkdir(parents=True)
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text(used)

    assert read_host(files, {}).available_bytes == 1_000_000


def test_host_without_files_is_unknown() -> None:
    host = read_host(Files(None), {})

    assert host.summary() == {}
    assert isinstance(host.available_bytes, Unavailable)
    assert isinstance(host.shared_memory_bytes, Unavailable)


def test_summary_of_the_running_host_names_cpu_system_and_kernel() -> None:
    host = read_host(SYSTEM, {})

    assert host.summary().items() >= {"system": "Linux", "kernel": os.uname().release}.items()
    assert isinstance(host.available_bytes, int)


def test_host_summary_omits_unknown_values() -> None:
    assert Host(cpu="", system="Linux").summary() == {"system": "Linux"}


def test_running_processes_are_listed_by_name(tmp_path: Path) -> None:
    files = tree(tmp_path, proc__1__comm="init\n", proc__77__comm="nsys\n", proc__self__comm="me\n")

    assert process_names(files) == {"init", "nsys"}


def test_shared_memory_has_the_size_of_its_file_system(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)

    size = read_host(Files(tmp_path), {}).shared_memory_bytes

    assert isinstance(size, int)
    assert size > 0
    assert isinstance(read_host(Files(tmp_path / "dev"), {}).shared_memory_bytes, Unavailable)


@pytest.mark.parametrize(
    ("status", "privileged"),
    [("CapEff:\t000001ffffffffff", True), ("CapEff:\t00000000a80425fb", False), ("", False)],
)
def test_privilege_is_cap_sys_admin_in_effective_set(
    tmp_path: Path, status: str, privileged: bool
) -> None:
    assert is_privileged(tree(tmp_path, proc__self__status=status)) is privileged


@pytest.mark.parametrize(
    ("contents", "variables", "kind"),
    [
        ({}, {}, ""),
        ({".dockerenv": ""}, {}, "docker"),
        ({"run__.containerenv": ""}, {}, "podman"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes"),
        ({"proc__1__cgroup": "12:devices:/kubepods/besteffort"}, {}, "Kubernetes"),
        ({"proc__1__cgroup": "0::/init.scope"}, {"container": "lxc"}, "lxc"),
    ],
)
def test_container_is_recognised_by_the_files_of_its_runtime(
    tmp_path: Path, contents: dict[str, str], variables: dict[str, str], kind: str
) -> None:
    assert read_host(tree(tmp_path, **contents), variables).container == kind


def test_wsl_and_jetson_are_recognised_by_their_files(tmp_path: Path) -> None:
    wsl = read_host(
        tree(tmp_path / "wsl", proc__sys__kernel__osrelease="5.15-microsoft-standard-WSL2\n"), {}
    )
    jetson = read_host(tree(tmp_path / "orin", etc__nv_tegra_release="# R36 (release)\n"), {})

    assert (wsl.is_wsl, wsl.is_jetson) == (True, False)
    assert (jetson.is_wsl, jetson.is_jetson) == (False, True)


def test_limits_of_this_process_are_sizes_or_none() -> None:
    limits = read_limits()

    assert limits.locked_memory_bytes is None or limits.locked_memory_bytes >= 0


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
