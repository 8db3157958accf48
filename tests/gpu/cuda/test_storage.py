from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cudakit.gpu.cuda.storage import explain_refusal, find_crash, uses_p2pdma

DRIVE = os.makedev(259, 1)
MESSAGE = "cuFileHandleRegister failed: 5027"


def test_refused_file_is_explained_by_missing_database_of_udev(tmp_path: Path) -> None:
    reason = explain_refusal(MESSAGE, DRIVE, tmp_path)

    assert reason.startswith(
        f"{tmp_path}/b259:1 of udev's database does not have ID_FS_USAGE and ID_FS_TYPE"
    )
    assert "docker run -v /run/udev:/run/udev:ro" in reason


def test_refused_file_is_explained_by_missing_property(tmp_path: Path) -> None:
    (tmp_path / "b259:1").write_text("I:12\nE:ID_FS_USAGE=filesystem\n")

    assert "does not have ID_FS_TYPE of the drive" in explain_refusal(MESSAGE, DRIVE, tmp_path)


def test_refused_file_of_known_drive_has_message_of_cufile(tmp_path: Path) -> None:
    (tmp_path / "b259:1").write_text("E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\n")

    assert explain_refusal(MESSAGE, DRIVE, tmp_path) == MESSAGE


def test_refused_file_without_block_device_is_explained(tmp_path: Path) -> None:
    reason = explain_refusal(MESSAGE, os.makedev(0, 27), tmp_path)

    assert reason.startswith(MESSAGE)
    assert "no block device" in reason


@pytest.mark.parametrize("text", ["", "ID_FS_USAGE=filesystem\nID_FS_TYPE=ext4\n"])
def test_text_without_property_lines_is_no_property(tmp_path: Path, text: str) -> None:
    (tmp_path / "b259:1").write_text(text)

    assert "ID_FS_USAGE and ID_FS_TYPE" in explain_refusal(MESSAGE, DRIVE, tmp_path)


@pytest.mark.parametrize(
    ("configuration", "is_used"),
    [
        ('{ "properties": {\n  "use_pci_p2pdma": true, // without nvidia-fs\n} }', True),
        ('{ "properties": {\n  "use_pci_p2pdma": false,\n} }', False),
        ('{ "properties": {\n  // "use_pci_p2pdma": true,\n} }', False),
        ("", False),
    ],
)
def test_configuration_enables_p2pdma(tmp_path: Path, configuration: str, is_used: bool) -> None:
    path = tmp_path / "cufile.json"
    path.write_text(configuration)

    assert uses_p2pdma({"CUFILE_ENV_PATH_JSON": str(path)}) == is_used


def test_variable_enables_p2pdma_without_a_configuration(tmp_path: Path) -> None:
    missing_path = str(tmp_path / "missing.json")

    assert not uses_p2pdma({"CUFILE_ENV_PATH_JSON": missing_path})
    assert uses_p2pdma({"CUFILE_ENV_PATH_JSON": missing_path, "CUFILE_USE_PCIP2PDMA": "true"})


def test_crash_of_cufile_is_reported_with_the_last_error_of_its_log() -> None:
    program = """
import os, signal
with open("cufile.log", "w") as log:
    log.write(" 23-11-2026 15:13 [pid=5] NOTICE  cufio-drv:851 running in compatible mode\\n")
    log.write(" 23-11-2026 15:13 [pid=5] ERROR  cufio-fs:79 mount option not found: /dev/vda\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""

    assert find_crash([sys.executable, "-c", program]) == (
        "crashes (SIGKILL) when it opens the file: mount option not found: /dev/vda"
    )


def test_crash_of_cufile_without_a_log_is_reported_by_its_signal() -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"

    assert find_crash([sys.executable, "-c", program]) == "crashes (SIGKILL) when it opens the file"


def test_cufile_that_hangs_is_reported() -> None:
    program = "import time; time.sleep(60)"

    assert find_crash([sys.executable, "-c", program], 1) == "did not open the file within 1 s"


@pytest.mark.parametrize("status", [0, 1])
def test_process_that_ends_itself_is_no_crash(status: int) -> None:
    assert find_crash([sys.executable, "-c", f"raise SystemExit({status})"]) == ""
