"""``cudakit.sanitize()``, on simulated devices, each in a process of its own: recording lasts as long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HAS_DEVICE = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()

STEP = """
import threading
import cudakit
from cudakit.gpu.open import open_gpu

def step(*, ordered=False):
    gpu = open_gpu("sim")
    first, second = gpu.stream(), gpu.stream()
    memory = gpu.malloc(1024)
    gpu.fill(memory, 0, 1024, first)
    if ordered:
        gpu.sync_stream(first)
    gpu.fill(memory, 1, 1024, second)
    gpu.close()

def refused(call, what):
    try:
        call()
    except cudakit.CudakitError as error:
        assert what in error.message, error.message
        assert error.hint
    else:
        raise AssertionError("nothing was raised")
"""


def run(code: str, *, gpu: str = "sim") -> None:
    """Run a program with the names above; it fails by raising."""
    text = STEP + code.replace("SANITIZE", f"cudakit.sanitize(gpu={gpu!r}")
    completed = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", text], capture_output=True, text=True
    )
    assert (completed.returncode, completed.stderr) == (0, "")


def test_accesses_of_simulated_devices_are_exact_in_every_mode() -> None:
    run("""
for accesses in ("auto", "exact", "arguments", None):
    with SANITIZE, accesses=accesses) as report:
        step()
    assert [race.confidence.value for race in report.races] == ["certain"]
""")


def test_block_reports_its_races_while_running_and_afterwards() -> None:
    run("""
with SANITIZE) as report:
    step(ordered=True)
    assert report.races == ()
    step()
    assert [race.kind.value for race in report.races] == ["write-after-write"]
step()
assert len(report.races) == 1 and report.races[0].count == 1
assert report.result.simulated
assert report.result.exit_status is None
""")


def test_later_blocks_report_only_their_own_races() -> None:
    run("""
with SANITIZE) as first:
    step()
with SANITIZE) as second:
    step(ordered=True)
with SANITIZE) as third:
    step()
    step()
assert [sum(race.count for race in block.races) for block in (first, second, third)] == [1, 0, 2]
""")


def test_race_with_earlier_work_belongs_to_the_later_block() -> None:
    run("""
with SANITIZE) as before:
    gpu = open_gpu("sim")
    first, second = gpu.stream(), gpu.stream()
    memory = gpu.malloc(1024)
    gpu.fill(memory, 0, 1024, first)
with SANITIZE) as after:
    gpu.fill(memory, 1, 1024, second)
assert (len(before.races), len(after.races)) == (0, 1)
""")


def test_block_includes_work_of_all_threads() -> None:
    run("""
with SANITIZE) as report:
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
assert len(report.races) == 1
""")


def test_raise_on_race_raises_the_report_as_message() -> None:
    run("""
try:
    with SANITIZE, raise_on_race=True):
        step()
except cudakit.RaceError as error:
    head, _, race = error.message.partition("\\n\\n")
    assert head == "1 race between operations on the GPU"
    assert race.startswith("write-after-write (certain): the memset on stream 4 writes 1.00 KiB")
    assert "<string>:13 step" in race and "fix:     record an event on stream 3" in race
    assert error.exit_code == 1
else:
    raise AssertionError("nothing was raised")
with SANITIZE, raise_on_race=True):
    step(ordered=True)
""")


def test_exception_of_the_block_takes_precedence_over_races() -> None:
    run("""
try:
    with SANITIZE, raise_on_race=True) as report:
        step()
        raise KeyError("mine")
except KeyError:
    assert len(report.races) == 1
""")


def test_suppressed_race_is_counted_and_not_raised() -> None:
    run("""
with SANITIZE, suppress=["site:*:step"], raise_on_race=True) as report:
    step()
assert report.races == () and report.result.suppressed[0].races == 1
""")


def test_nested_block_is_refused_and_the_outer_continues() -> None:
    run("""
with SANITIZE) as report:
    refused(lambda: SANITIZE).__enter__(), "cannot be nested")
    step()
assert len(report.races) == 1
""")


def test_already_recorded_process_is_refused() -> None:
    run("""
import os
os.environ["CUDAKIT_SPOOL"] = "/nowhere"
refused(lambda: SANITIZE).__enter__(), "already recorded")
""")


def test_forked_process_leaves_the_block_without_error() -> None:
    run("""
import os, warnings
warnings.simplefilter("ignore")
with SANITIZE) as report:
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert status == 0
    step()
if child == 0:
    os._exit(0)
assert sum(race.count for race in report.races) == 2
""")


@pytest.mark.skipif(HAS_DEVICE, reason="needs a machine without a CUDA device")
def test_without_gpu_nothing_is_refused() -> None:
    run(
        """
with SANITIZE) as report:
    step()
assert len(report.races) == 1 and report.result.notes == ()
""",
        gpu="auto",
    )


@pytest.mark.gpu
def test_block_after_cuda_init_is_refused_with_a_hint() -> None:
    run(
        """
cudakit.synchronize()
refused(lambda: SANITIZE).__enter__(), "CUDA is already initialized")
""",
        gpu="auto",
    )
