from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cudakit.stacks import Frame, Stack
from cudakit.trace.events import Event, Launch, Mark
from cudakit.trace.spool import Batch, Losses, Spool, SpoolWriter
from cudakit.trace.trace_file import Clock, unpack

WRITTEN_END_OFFSET = 24


def mark(index: int) -> Event:
    return Event(Mark(name=f"mark {index}"), seq=index)


def spool_writer(directory: Path, *, max_file_bytes: int = 1 << 20) -> SpoolWriter:
    return SpoolWriter(directory, clock=Clock.VIRTUAL, max_file_bytes=max_file_bytes)


def names(batches: list[Batch]) -> list[str]:
    return [
        event.body.name
        for batch in batches
        for event in unpack(batch.records, batch.strings)
        if isinstance(event.body, Mark | Launch)
    ]


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    with Spool(tmp_path) as spool:
        yield spool


@pytest.fixture
def discarding_spool(tmp_path: Path) -> Iterator[Spool]:
    with Spool(tmp_path, discard=True) as spool:
        yield spool


def read(spool: Spool) -> list[str]:
    return names(list(spool.batches()))


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def run_in_fork(run: Callable[[], None]) -> int:
    process = os.fork()
    if not process:
        try:
            run()
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    return process


def test_process_without_events_leaves_no_file(tmp_path: Path, spool: Spool) -> None:
    spool_writer(tmp_path)

    assert files(tmp_path) == set()
    assert read(spool) == []


def test_event_is_readable_once_written(tmp_path: Path, spool: Spool) -> None:
    writer = spool_writer(tmp_path)
    for index in range(3):
        writer.write(mark(index))

        (batch,) = spool.batches()

        assert names([batch]) == [f"mark {index}"]
        assert batch.process == os.getpid()
    assert read(spool) == []


def test_long_trace_continues_in_further_files(tmp_path: Path, spool: Spool) -> None:
    writer = spool_writer(tmp_path, max_file_bytes=1000)
    stacks: list[Stack] = [(Frame("step", "train.py", line),) for line in range(1, 31)]
    for index, stack in enumerate(stacks):
        writer.write(Event(Launch(1, f"k{index % 7}"), site=writer.stack(stack)))

    (*batches,) = spool.batches()

    assert f"{os.getpid()}-000003.trace" in files(tmp_path)
    assert names(batches) == [f"k{index % 7}" for index in range(30)]
    sites = [int(site) for batch in batches for site in batch.records["site"]]
    assert [batches[-1].stacks[site] for site in sites] == stacks


def test_discarding_spool_deletes_files_after_reading(
    tmp_path: Path, discarding_spool: Spool
) -> None:
    writer = spool_writer(tmp_path, max_file_bytes=300)
    marks_read = []
    for index in range(20):
        writer.write(mark(index))
        marks_read += read(discarding_spool)
        nonempty_files = [path.name for path in tmp_path.iterdir() if path.stat().st_size]
        assert len(nonempty_files) == 1

    assert marks_read == [f"mark {index}" for index in range(20)]


def test_name_of_a_discarded_file_is_not_reused(tmp_path: Path, discarding_spool: Spool) -> None:
    first_writer = spool_writer(tmp_path, max_file_bytes=100)
    for index in range(3):
        first_writer.write(mark(index))
    assert read(discarding_spool) == ["mark 0", "mark 1", "mark 2"]

    spool_writer(tmp_path).write(mark(7))
    first_writer.write(mark(3))

    assert sorted(read(discarding_spool)) == ["mark 3", "mark 7"]
    assert discarding_spool.error_messages == []


def test_two_traces_of_one_process_are_separate_chains(tmp_path: Path, spool: Spool) -> None:
    writers = [spool_writer(tmp_path), spool_writer(tmp_path)]
    for index, writer in enumerate(writers):
        writer.write(mark(index))

    batches = sorted(spool.batches(), key=lambda batch: batch.trace_number)

    assert [(batch.process, batch.trace_number) for batch in batches] == [
        (os.getpid(), 0),
        (os.getpid(), 1),
    ]
    assert sorted(names(batches)) == ["mark 0", "mark 1"]


def test_forked_process_writes_its_own_trace(tmp_path: Path, spool: Spool) -> None:
    writer = spool_writer(tmp_path)
    site = writer.stack((Frame("step", "train.py", 3),))
    writer.write(mark(0))

    child = run_in_fork(lambda: writer.write(Event(Launch(1, "k"), site=site)))
    writer.write(mark(1))

    batches_by_process = {batch.process: batch for batch in spool.batches()}
    assert names([batches_by_process[os.getpid()]]) == ["mark 0", "mark 1"]
    assert names([batches_by_process[child]]) == ["k"]
    # The index of a stack in the parent is valid in the child.
    assert batches_by_process[child].stacks[site][0].name == "step"


def test_exec_begins_another_trace(tmp_path: Path, spool: Spool) -> None:
    writer = spool_writer(tmp_path)
    writer.write(mark(0))
    assert read(spool) == ["mark 0"]
    writer.write(mark(1))
    other_directory = tmp_path / "other"
    other_directory.mkdir()
    spool_writer(other_directory).write(mark(2))
    (path,) = other_directory.iterdir()
    path.replace(tmp_path / path.name)  # the new program of an exec writes its file in this way

    batches = list(spool.batches())

    assert names(batches) == ["mark 1", "mark 2"]
    assert [batch.trace_number for batch in batches] == [0, 1]


def test_spool_reads_a_file_up_to_the_written_end_in_its_header(
    tmp_path: Path, spool: Spool
) -> None:
    writer = spool_writer(tmp_path)
    writer.write(mark(0))
    (path,) = tmp_path.iterdir()
    size_bytes = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(1 << 16)
        file.seek(WRITTEN_END_OFFSET)
        file.write(struct.pack("<Q", size_bytes))

    assert read(spool) == ["mark 0"]


def test_file_without_complete_header_is_read_later(tmp_path: Path, spool: Spool) -> None:
    spool_writer(tmp_path).write(mark(0))
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes(b"")
    assert read(spool) == []

    path.write_bytes(content)

    assert read(spool) == ["mark 0"]


def test_damaged_trace_does_not_block_others(tmp_path: Path, spool: Spool) -> None:
    (tmp_path / "1-000000.trace").write_bytes(b"PK" + bytes(60))
    spool_writer(tmp_path).write(mark(0))

    assert read(spool) == ["mark 0"]
    assert read(spool) == []
    assert len(spool.error_messages) == 1
    assert "is not a trace" in spool.error_messages[0]


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_event_is_lost_at_abrupt_exit(tmp_path: Path, spool: Spool, end: str) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from cudakit.trace.events import Event, Mark\n"
        "from cudakit.trace.trace_file import Clock\n"
        "from cudakit.trace.spool import SpoolWriter\n"
        "SpoolWriter(Path(sys.argv[1]), clock=Clock.VIRTUAL).write(Event(Mark('last words')))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", script + end, str(tmp_path)], check=False, capture_output=True
    )

    assert ended.stderr == b""
    assert ended.returncode in (0, -signal.SIGKILL)
    assert read(spool) == ["last words"]


def test_files_of_ended_processes_are_closed(tmp_path: Path, discarding_spool: Spool) -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    for index in range(5):
        run_in_fork(lambda index=index: spool_writer(tmp_path).write(mark(index)))  # type: ignore[misc]
    assert len(read(discarding_spool)) == 5

    assert len(os.listdir("/proc/self/fd")) == open_files
    assert not any(path.stat().st_size for path in tmp_path.iterdir())


def test_unwritable_spool_does_not_fail_the_program(tmp_path: Path) -> None:
    writer = spool_writer(tmp_path / "gone")

    writer.write(mark(0))

    assert writer.stack((Frame("f", "x.py", 1),)) == 0
    writer.write(mark(1))


def test_events_after_a_failed_write_are_counted_as_lost(tmp_path: Path) -> None:
    losses = Losses(tmp_path)
    writer = spool_writer(tmp_path, max_file_bytes=100)
    writer.write(mark(0))
    (tmp_path / f"{os.getpid()}-000001.trace").mkdir()

    writer.write(mark(1))
    writer.write(mark(2))

    (loss,) = losses.read_all()
    assert (loss.process, loss.count) == (os.getpid(), 2)
    losses.close()


def test_file_whose_pid_is_too_long_is_ignored(tmp_path: Path) -> None:
    (tmp_path / f"{'9' * 30}-000000.trace").write_bytes(b"x" * 99)

    spool = Spool(tmp_path)
    assert (read(spool), spool.error_messages) == ([], [])


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1-000000.trace")
    (tmp_path / "2-000000.trace").symlink_to("/dev/zero")

    spool = Spool(tmp_path)
    assert (read(spool), spool.error_messages) == ([], [])


def ended_process() -> int:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    return child


@pytest.mark.parametrize("end", [-1, -100])
def test_truncated_trace_of_ended_process_is_damaged(tmp_path: Path, end: int) -> None:
    writer = spool_writer(tmp_path)
    writer.write(mark(1))
    writer.write(mark(2))
    writer.close()
    (trace_path,) = tmp_path.iterdir()
    content, process = trace_path.read_bytes(), ended_process()
    trace_path.unlink()
    (tmp_path / f"{process}-000000.trace").write_bytes(content[:end])

    spool = Spool(tmp_path)
    assert read(spool) == ["mark 1"]
    (message,) = spool.error_messages
    assert message.startswith(f"the trace of process {process} is truncated")


def test_abandoned_spool_is_deleted_and_recording_ends(tmp_path: Path) -> None:
    directory = tmp_path / "spool"
    directory.mkdir()
    losses = Losses(directory)
    writer = spool_writer(directory, max_file_bytes=100)
    writer.write(mark(1))
    assert directory.exists()

    losses.close()  # the operating system closes the file if the supervisor is killed
    writer.write(mark(2))
    writer.write(mark(3))
    assert not directory.exists()
