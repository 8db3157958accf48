from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpu.run_context.trees import tree

from cudakit.gpu.api.run_context import Host
from cudakit.gpu.run_context.files import SYSTEM, Files
from cudakit.gpu.run_context.host import is_privileged, process_names, read_host, read_limits
from cudakit.units import Unavailable


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
