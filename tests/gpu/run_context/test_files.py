from __future__ import annotations

import os
from pathlib import Path

import pytest

from cudakit.gpu.run_context.files import Files


@pytest.fixture
def tree(tmp_path: Path) -> Files:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/name").write_text("first\nsecond\n")
    (tmp_path / "etc/link").symlink_to("name")
    return Files(tmp_path)


def test_file_is_read_by_absolute_path(tree: Files) -> None:
    assert tree.text("/etc/name") == "first\nsecond"
    assert tree.names("/etc") == ("link", "name")
    assert tree.exists("/etc/name")


def test_link_resolves_to_absolute_path(tree: Files) -> None:
    assert tree.resolve("/etc/link") == "/etc/name"
    assert tree.resolve("/etc/nowhere") == "/etc/nowhere"


def test_absent_file_has_no_text(tree: Files) -> None:
    assert tree.text("/etc/absent") is None
    assert tree.text("/etc") is None
    assert tree.names("/absent") == ()
    assert not tree.exists("/absent")


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
