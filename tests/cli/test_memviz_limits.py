"""A snapshot file takes little time and memory, whatever is in it."""

from __future__ import annotations

import gzip
import json
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from memory.load import costly

SHAPES = dict(costly.shapes(1_000_000))
# A file of 1 MB takes 0.5 to 4 s on an idle machine, and three times as long on a busy one. The limit finds
# shapes whose time is out of proportion to their size: without the rules for costly shapes, hours.
MAX_SECONDS = 30
MAX_BYTES = 600 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """The end of a command, with its processor time and peak memory."""

    status: int
    seconds: float
    peak_bytes: int
    errors: str


# Starts a command with limited address space, and prints its exit code, processor time and peak memory.
# A process of its own: the peak that the system counts includes that of the process that forked it.
MEASURE = """
import json, os, resource, subprocess, sys
limit = int(sys.argv[1])
process = subprocess.Popen(
    sys.argv[2:],
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
)
_, status, usage = os.wait4(process.pid, 0)
seconds = usage.ru_utime + usage.ru_stime
print(json.dumps([os.waitstatus_to_exitcode(status), seconds, usage.ru_maxrss << 10]))
"""


def run_memviz(arguments: Sequence[str | Path], *, memory_bytes: int = 4 << 30) -> Run:
    """Run the command in a process with limited address space."""
    memviz = [sys.executable, "-P", "-m", "cudakit", "memviz", *map(str, arguments)]
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", MEASURE, str(memory_bytes), *memviz],
        capture_output=True,
        text=True,
        check=True,
    )
    return Run(*json.loads(run.stdout), errors=run.stderr)


def assert_small(run: Run) -> None:
    assert "Traceback" not in run.errors
    assert run.status in (0, 2), run.errors
    assert run.seconds < MAX_SECONDS
    assert run.peak_bytes < MAX_BYTES


@pytest.mark.parametrize("shape", SHAPES)
def test_costly_shape_takes_little_time_and_memory(tmp_path: Path, shape: str) -> None:
    file = tmp_path / "snapshot.pkl"
    file.write_bytes(SHAPES[shape]())

    assert_small(run_memviz([file]))


@pytest.mark.parametrize(
    "shape",
    [
        "frames_and_stacks_of_128_devices",
        "nested_stacks",
        "one_deep_stack_in_many_events",
        "one_long_name_in_many_events",
        "many_segments",
    ],
)
def test_all_exports_of_a_costly_shape_take_little_time_and_memory(
    tmp_path: Path, shape: str
) -> None:
    file = tmp_path / "snapshot.pkl"
    file.write_bytes(SHAPES[shape]())
    forms = ("html", "csv", "perfetto.json", "speedscope.json", "json")
    outputs = [argument for form in forms for argument in ("-o", tmp_path / f"out.{form}")]

    assert_small(run_memviz([file, *outputs]))


@pytest.mark.parametrize(
    "shape",
    [
        "one_event_many_times",
        "one_block_list_for_all_devices",
        "one_stack_for_all_devices",
        "empty_dictionaries",
        "lists_in_lists",
        "json_events",
        "json_lists",
        "json_small_dictionaries",
    ],
)
def test_compressed_costly_shape_takes_little_time_and_memory(tmp_path: Path, shape: str) -> None:
    """Compress 25 MB to 0.8 MB: random bytes keep the file below the limit of compression."""
    content = dict(costly.shapes(25_000_000))[shape]()
    random = os.urandom(len(content) // 40)
    if content.startswith(b"{"):
        padded = b'{"padding":"' + random.hex().encode() + b'",' + content[1:]
    else:
        padded = content[:2] + b"B" + struct.pack("<I", len(random)) + random + b"0" + content[2:]
    file = tmp_path / "snapshot.gz"
    file.write_bytes(gzip.compress(padded, 1))

    assert_small(run_memviz([file]))


def test_file_larger_than_half_of_the_available_memory_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.pkl"
    with file.open("wb") as stream:
        stream.truncate(1 << 30)

    run = run_memviz([file], memory_bytes=1 << 30)

    assert run.status == 2
    assert "half of the available memory" in run.errors


def test_compressed_file_that_needs_too_much_memory_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.gz"
    content = b"\x80\x04B" + struct.pack("<I", 4_000_000) + os.urandom(4_000_000) + b"0"
    file.write_bytes(gzip.compress(content + b"]" * 150_000_000, 1))

    run = run_memviz([file], memory_bytes=1 << 30)

    assert run.status == 2
    assert "MiB of memory" in run.errors or "half of the available memory" in run.errors


def test_endless_standard_input_is_rejected() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    start = time.monotonic()
    with Path("/dev/zero").open("rb") as endless:
        run = subprocess.run(
            [sys.executable, "-P", "-m", "cudakit", "memviz", "-"],
            stdin=endless,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=limit,
        )

    assert run.returncode == 2
    assert "standard input is larger than" in run.stderr
    assert time.monotonic() - start < 30
