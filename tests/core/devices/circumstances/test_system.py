from __future__ import annotations

from pathlib import Path

import pytest

from cudakit.core.devices.circumstances import system
from cudakit.core.devices.circumstances.files import Files
from cudakit.units import Unavailable

NOTHING = Files(None)


def tree(root: Path, **contents: str) -> Files:
    for path, text in contents.items():
        place = root / path.replace("__", "/").lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return Files(root)


def test_nodes_of_the_driver_are_tried_and_others_left_alone(tmp_path: Path) -> None:
    files = tree(tmp_path, dev__nvidia0="", dev__null="")
    (tmp_path / "dev/nvidia-caps").mkdir()
    (tmp_path / "dev/nvidiactl").symlink_to("gone")

    found = {node.path: node.error for node in system.device_nodes(files)}

    assert found == {"/dev/nvidia0": "", "/dev/nvidiactl": "ENOENT"}


def test_processes_are_known_by_name(tmp_path: Path) -> None:
    files = tree(tmp_path, proc__1__comm="init\n", proc__77__comm="nsys\n", proc__self__comm="me\n")

    assert system.process_names(files) == {"init", "nsys"}


def test_the_kernels_messages_come_without_their_numbers(tmp_path: Path) -> None:
    files = tree(tmp_path, dev__kmsg="6,1,200,-;Linux version\n3,2,300,-;NVRM: Xid (PCI:0): 79\n")

    assert system.kernel_log(files) == ("Linux version", "NVRM: Xid (PCI:0): 79")


def test_a_log_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    assert system.kernel_log(Files(tmp_path)) == Unavailable(
        "the kernel's log cannot be read (ENOENT on /dev/kmsg)"
    )


def test_where_files_are_not_looked_at_nothing_is_known() -> None:
    assert isinstance(system.kernel_log(NOTHING), Unavailable)
    assert isinstance(system.shared_memory_bytes(NOTHING), Unavailable)
    assert list(system.device_nodes(NOTHING)) == []


def test_shared_memory_has_the_size_of_its_file_system(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)

    size = system.shared_memory_bytes(Files(tmp_path))

    assert isinstance(size, int)
    assert size > 0
    assert isinstance(system.shared_memory_bytes(Files(tmp_path / "dev")), Unavailable)


@pytest.mark.parametrize(
    ("status", "privileged"),
    [("CapEff:\t000001ffffffffff", True), ("CapEff:\t00000000a80425fb", False), ("", False)],
)
def test_privilege_is_a_bit_of_the_effective_set(
    tmp_path: Path, status: str, privileged: bool
) -> None:
    assert system.is_privileged(tree(tmp_path, proc__self__status=status)) is privileged


@pytest.mark.parametrize(
    ("contents", "environment", "kind"),
    [
        ({}, {}, ""),
        ({".dockerenv": ""}, {}, "docker"),
        ({"run__.containerenv": ""}, {}, "podman"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes"),
        ({"proc__1__cgroup": "12:devices:/kubepods/besteffort"}, {}, "Kubernetes"),
        ({"proc__1__cgroup": "0::/init.scope"}, {"container": "lxc"}, "lxc"),
    ],
)
def test_a_container_is_known_by_what_its_runtime_leaves(
    tmp_path: Path, contents: dict[str, str], environment: dict[str, str], kind: str
) -> None:
    assert system.container(tree(tmp_path, **contents), environment) == kind


def test_wsl_and_jetson_are_known_by_their_files(tmp_path: Path) -> None:
    wsl = tree(tmp_path / "wsl", proc__sys__kernel__osrelease="5.15-microsoft-standard-WSL2\n")
    jetson = tree(tmp_path / "jetson", etc__nv_tegra_release="# R36 (release)\n")

    assert (system.is_wsl(wsl), system.is_jetson(wsl)) == (True, False)
    assert (system.is_wsl(jetson), system.is_jetson(jetson)) == (False, True)


def test_the_limits_of_this_process_are_sizes_or_none() -> None:
    limits = system.limits()

    assert limits.locked_memory_bytes is None or limits.locked_memory_bytes >= 0
