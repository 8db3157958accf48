"""Plays the log of a run with exact accesses with ``--accesses auto``: see template_player.c."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cudakit.trace.trace_file import RECORD, Records

HERE = Path(__file__).parent
RECORDER = HERE.parents[1] / "cudakit/record/native/recorder"
INCLUDED = RECORDER, RECORDER.parent, RECORDER.parents[1]
SOURCES = (
    "containers.c", "decode/byte_set_hash.c", "exact/access_digest.c", "exact/launch_order.c",
    "exact/templates.c", "model/access_history.c", "model/allocations.c", "model/graph_contents.c",
    "model/stream_order.c",
)  # fmt: skip


@cache
def _player() -> Path:
    """Build the player; skip the test without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("there is no C compiler")
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory)
    program = directory / "template_player"
    subprocess.run(
        [compiler, "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
         "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections",
         *shlex.split(os.environ.get("CFLAGS", "")), *(f"-I{folder}" for folder in INCLUDED),
         str(HERE / "template_player.c"), *(str(RECORDER / name) for name in SOURCES), "-lpthread",
         "-o", str(program)],
        check=True,
    )  # fmt: skip
    return program


def apply(records: Records) -> Records:
    """Return the records that would have been written; ``records`` are in the order of their calls."""
    played = subprocess.run(
        [_player()], input=records.tobytes(), stdout=subprocess.PIPE, check=True
    )
    return np.frombuffer(bytearray(played.stdout), RECORD)
