from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from allocator.device import GIB, MIB, Device

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory
from cudakit.errors import UsageError
from cudakit.gpu.api.facts import Process
from cudakit.torch_rules.oom import OomReport
from cudakit.units import Unavailable


def run_out(allocator: DeviceCachingAllocator) -> OutOfMemory:
    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(64 * GIB)
    return caught.value


def test_snapshot_is_written_before_the_error_is_raised(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    path = tmp_path / "oom.pickle"
    allocator.record_history()
    allocator.save_on_out_of_memory(path)
    ptr = allocator.alloc(700)
    error = run_out(allocator)
    snapshot = pickle.loads(path.read_bytes())  # noqa: S301

    assert [entry["action"] for entry in snapshot["device_traces"][0]][-1] == "oom"
    assert snapshot["segments"][0]["address"] == ptr
    assert not hasattr(error, "__notes__")
    assert os.listdir(tmp_path) == ["oom.pickle"]


def test_save_on_out_of_memory_replaces_the_file_and_can_be_turned_off(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    path = tmp_path / "oom.pickle"
    allocator.save_on_out_of_memory(path)
    run_out(allocator)
    allocator.alloc(1)
    run_out(allocator)
    assert len(pickle.loads(path.read_bytes())["segments"]) == 1  # noqa: S301
    path.unlink()
    allocator.save_on_out_of_memory(None)
    run_out(allocator)

    assert not path.exists()


def test_failed_snapshot_on_out_of_memory_becomes_a_note(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    missing_directory = tmp_path / "gone"
    missing_directory.mkdir()
    allocator.save_on_out_of_memory(missing_directory / "oom.pickle")
    missing_directory.rmdir()
    (note,) = run_out(allocator).__notes__

    assert note.startswith("the observer save_on_out_of_memory failed: UsageError: cannot write")
    assert "No such file or directory" in note


def test_failed_write_leaves_no_file(allocator: DeviceCachingAllocator, tmp_path: Path) -> None:
    path = tmp_path / "oom.pickle"
    allocator.save_on_out_of_memory(path)
    path.mkdir()
    (note,) = run_out(allocator).__notes__

    assert "cannot write" in note
    assert os.listdir(tmp_path) == ["oom.pickle"]


def test_unwritable_path_is_refused_at_once(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="it is a directory"):
        allocator.save_on_out_of_memory(tmp_path)
    with pytest.raises(UsageError, match="there is no directory"):
        allocator.save_snapshot(tmp_path / "none" / "file")


def test_save_snapshot_writes_a_file(allocator: DeviceCachingAllocator, tmp_path: Path) -> None:
    allocator.save_snapshot(tmp_path / "now.pickle")

    snapshot = pickle.loads((tmp_path / "now.pickle").read_bytes())  # noqa: S301
    assert snapshot == allocator.snapshot()


def test_failing_observer_becomes_a_note(
    allocator: DeviceCachingAllocator,
) -> None:
    def failing(_: OomReport) -> None:
        raise RuntimeError("requested by the test")

    reports: list[OomReport] = []
    allocator.on_out_of_memory(failing)
    allocator.on_out_of_memory(reports.append)
    error = run_out(allocator)

    assert reports == [error.report]
    assert len(error.__notes__) == 1
    assert "failing failed: RuntimeError: requested by the test" in str(error.__notes__)


def test_process_query_runs_without_the_guard() -> None:
    allocator = DeviceCachingAllocator(Device())

    def processes() -> tuple[Process, ...]:
        allocator.statistics()  # this call would raise an error if the guard were held
        unavailable = Unavailable("in another container")
        return (Process(os.getpid(), "compute", 3 * GIB, unavailable, unavailable),)

    allocator.ask_processes(processes)

    assert "this process has 3.00 GiB memory in use." in run_out(allocator).message


def test_failing_process_query_is_reported_as_unavailable() -> None:
    allocator = DeviceCachingAllocator(Device())

    def processes() -> tuple[Process, ...]:
        raise OSError("no NVML")

    allocator.ask_processes(processes)
    error = run_out(allocator)

    assert "is in use outside of this allocator" in error.message
    assert error.report is not None
    assert error.report.processes == Unavailable("no NVML")


def test_allocator_works_after_out_of_memory() -> None:
    allocator = DeviceCachingAllocator(Device(64 * MIB))
    allocator.on_out_of_memory(lambda _: allocator.empty_cache())
    run_out(allocator)

    assert allocator.alloc(60 * MIB)
