"""Lost events are counted without new disk space; a lock shows whether the supervisor is alive."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from cudakit.trace.spool import Loss, Losses, delete_abandoned, is_abandoned, report_loss

DISK_FULL = OSError(errno.ENOSPC, "No space left on device")


def test_last_reported_count_of_each_process_is_kept(tmp_path: Path) -> None:
    losses = Losses(tmp_path)
    assert list(losses.read_all()) == []

    report_loss(tmp_path, 1, DISK_FULL)
    report_loss(tmp_path, 1200, DISK_FULL)

    (loss,) = losses.read_all()
    assert loss == Loss(os.getpid(), 1200, errno.ENOSPC)
    assert str(loss) == (
        f"1,200 events of process {os.getpid()} could not be recorded: No space left on device"
    )
    losses.close()


def test_reporting_a_loss_needs_no_new_disk_space(tmp_path: Path) -> None:
    losses = Losses(tmp_path)
    (file,) = tmp_path.iterdir()
    status_before = file.stat()

    report_loss(tmp_path, 7, DISK_FULL)

    assert (file.stat().st_size, file.stat().st_blocks) == (
        status_before.st_size,
        status_before.st_blocks,
    )
    losses.close()


def test_loss_without_supervisor_is_ignored(tmp_path: Path) -> None:
    report_loss(tmp_path, 1, DISK_FULL)
    report_loss(tmp_path / "gone", 1, DISK_FULL)


def test_spool_is_abandoned_once_its_supervisor_has_ended(tmp_path: Path) -> None:
    assert not is_abandoned(tmp_path)
    losses = Losses(tmp_path)
    assert not is_abandoned(tmp_path)
    losses.close()
    assert is_abandoned(tmp_path)


def test_only_abandoned_spools_are_deleted(tmp_path: Path) -> None:
    for name in ("cudakit-spool-live", "cudakit-spool-left", "cudakit-spool-new", "other"):
        (tmp_path / name).mkdir()
    live_losses = Losses(tmp_path / "cudakit-spool-live")
    for name in ("cudakit-spool-left", "other"):
        Losses(tmp_path / name).close()

    delete_abandoned(tmp_path)

    remaining_names = {path.name for path in tmp_path.iterdir()}
    assert remaining_names == {"cudakit-spool-live", "cudakit-spool-new", "other"}
    live_losses.close()
