"""Tests of a process that records itself; each test starts a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from record.recorded import build_library

PROGRAM = """
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from cudakit.record.recording import CudaRecording, Recording
from cudakit.trace.events import Event, Free
from cudakit.trace.trace_file import Clock
from cudakit.trace.spool import SpoolWriter

taken = []
def take(batch):
    taken.extend(batch.records["seq"].tolist())

with TemporaryDirectory(ignore_cleanup_errors=True) as name:
    writer = SpoolWriter(Path(name), clock=Clock.MONOTONIC)
"""


def run(code: str) -> None:
    text = PROGRAM + "\n".join(f"    {line}" for line in code.splitlines())
    result = subprocess.run(
        [sys.executable, "-P", "-c", text], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_drained_passes_all_events() -> None:
    run("""
recording = Recording(take, Path(name))
writer.write(Event(Free(1, 1), seq=7))
assert taken == []
with recording.drain():
    assert taken == [7]
    writer.write(Event(Free(1, 1), seq=8))
    assert taken == [7]
with recording.drain():
    assert taken == [7, 8]
""")


def test_trace_is_read_periodically() -> None:
    run("""
recording = Recording(take, Path(name), CudaRecording(is_recorded=True))
writer.write(Event(Free(1, 1), seq=7))
deadline = time.monotonic() + 30
while not taken and time.monotonic() < deadline:
    time.sleep(0.05)
assert taken == [7]
""")


def test_forked_child_leaves_recording_to_parent() -> None:
    run("""
import os
recording = Recording(take, Path(name))
writer.write(Event(Free(1, 1), seq=7))
child = os.fork()
if not child:
    with recording.drain():
        os._exit(len(taken))
assert os.waitpid(child, 0)[1] == 0
with recording.drain():
    assert taken == [7]
""")


def test_synchronized_flushes_launches_first() -> None:
    run("""
def tell():
    writer.write(Event(Free(1, 1), seq=8))
recording = Recording(take, Path(name), CudaRecording(flush=tell))
writer.write(Event(Free(1, 1), seq=7))
with recording.drain():
    assert taken == [7]
with recording.synchronize_and_drain():
    assert taken == [7, 8]
""")


def test_directory_is_removed_at_exit_but_not_by_forked_child() -> None:
    code = """
import os, sys
from pathlib import Path
from cudakit.record.recording import begin
recording = begin(print, gpu="sim")
recording.record_simulated(enabled=True)
directory = os.environ["CUDAKIT_SPOOL"]
child = os.fork()
if not child:
    sys.exit()
os.waitpid(child, 0)
assert Path(directory).is_dir()
print(directory)
"""
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip()
    assert not Path(result.stdout.strip()).exists()


# The fake CUDA is used as the library.
CUDA = """
import ctypes, json, os, sys
from pathlib import Path
from cudakit.errors import CudakitError
from cudakit.record.recording import begin
from cudakit.record.installed import SearchPaths, find_frame_readers, find_recorder
from cudakit.record.preflight import RecorderFiles
from cudakit.trace.kinds import EventKind

library, places, recorded = sys.argv[1], SearchPaths.of_this_process(), []
ready = RecorderFiles(Path(library), find_recorder(places), find_frame_readers(places))
recording = begin(recorded.append, files_or_refusal=ready)
cuda, U = ctypes.CDLL(library), ctypes.c_uint64
context, stream = ctypes.c_void_p(0x1000), ctypes.c_void_p(0x2000)
cuda.make_context(context, 0)
cuda.make_stream(context, stream, 1)
cuda.fill(context, stream, U(4096), U(64), 1)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("library"))


def run_cuda(library: Path, code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", CUDA + code, str(library)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_recorder_records_own_process(library: Path) -> None:
    run_cuda(
        library,
        """
with recording.drain():
    kinds = [kind for batch in recorded for kind in batch.records["kind"].tolist()]
    assert kinds.count(EventKind.FILL) == 1
    assert {batch.process for batch in recorded} == {os.getpid()}
    assert not any(batch.simulated for batch in recorded)
assert recording.cuda.accesses == "arguments" and not recording.cuda.notes
""",
    )


def test_second_recording_of_process_is_refused(library: Path) -> None:
    run_cuda(
        library,
        """
try:
    begin(recorded.append, files_or_refusal=ready)
except CudakitError as error:
    assert "being recorded already" in error.message and error.hint
else:
    raise AssertionError("nothing was raised")
again = begin(recorded.append, files_or_refusal=ready, on_missing="run")
assert "CUDA was not recorded" in again.cuda.notes[0]
""",
    )
