from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from cudakit.gpu.api import LEGACY
from cudakit.gpu.open import open_gpu
from cudakit.gpu.sim import Sim
from cudakit.gpu.sim.recorder import PROCESS_VARIABLE, SPOOL_VARIABLE, attach_to_spool
from cudakit.stacks import Stack
from cudakit.trace.events import Event
from cudakit.trace.kinds import EventKind
from cudakit.trace.layout import unpack
from cudakit.trace.spool import Spool

PROGRAM = """
from cudakit.gpu.sim import Sim

def step(gpu):
    ptr = gpu.malloc(64)
    gpu.fill(ptr, 1, 64, gpu.stream())

gpu = Sim()
for _ in range(3):
    step(gpu)
"""


LAUNCHES = """
import numpy as np
from cudakit.gpu.api import LEGACY
from cudakit.gpu.sim import Sim, host_kernel

@host_kernel("store")
def store(launch, where, value):
    launch.write(where, np.int32)[:] = value

gpu = Sim()
source = 'extern "C" __global__ void store(int* where, int value) {}'
kernel = gpu.kernel(gpu.load(gpu.compile(source)), "store")
for value in range(100):
    gpu.launch(kernel, (1, 1, 1), (1, 1, 1), (gpu.malloc(4), np.int32(value)), LEGACY)
"""


def run(script: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
    )


def read(directory: Path) -> list[tuple[Event, Stack]]:
    with Spool(directory) as spool:
        return [
            (event, batch.stacks[event.site])
            for batch in spool.batches()
            for event in unpack(batch.records, batch.strings)
        ]


def kinds(directory: Path) -> list[EventKind]:
    return [event.body.kind for event, _ in read(directory)]


def test_device_of_traced_program_writes_to_spool(tmp_path: Path) -> None:
    result = run(PROGRAM, {SPOOL_VARIABLE: str(tmp_path)})

    assert (result.returncode, result.stderr) == (0, "")
    assert kinds(tmp_path).count(EventKind.ALLOC) == 3
    assert kinds(tmp_path).count(EventKind.FILL) == 3


def test_event_has_call_stack(tmp_path: Path) -> None:
    run(PROGRAM, {SPOOL_VARIABLE: str(tmp_path)})

    stacks = {stack for event, stack in read(tmp_path) if event.body.kind is EventKind.ALLOC}
    (stack,) = stacks
    assert [(frame.name, frame.filename, frame.line) for frame in stack] == [
        ("step", "<string>", 5),
        ("<module>", "<string>", 10),
    ]


def test_pending_work_is_traced_at_exit(tmp_path: Path) -> None:
    result = run(LAUNCHES, {SPOOL_VARIABLE: str(tmp_path)})

    assert (result.returncode, result.stderr) == (0, "")
    assert kinds(tmp_path).count(EventKind.LAUNCH) == kinds(tmp_path).count(EventKind.ACCESS) == 100


def test_events_before_sigkill_are_kept(tmp_path: Path) -> None:
    end = "gpu.sync(); import os, signal; os.kill(os.getpid(), signal.SIGKILL)"

    run(PROGRAM + end, {SPOOL_VARIABLE: str(tmp_path)})

    assert kinds(tmp_path).count(EventKind.FILL) == 3


def test_untraced_process_writes_no_spool(tmp_path: Path) -> None:
    assert attach_to_spool({}) is None
    assert attach_to_spool({SPOOL_VARIABLE: str(tmp_path), PROCESS_VARIABLE: "1"}) is None
    assert (
        attach_to_spool({SPOOL_VARIABLE: str(tmp_path), PROCESS_VARIABLE: str(os.getpid())})
        is not None
    )


def test_device_with_sink_does_not_use_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SPOOL_VARIABLE, str(tmp_path))
    events: list[Event] = []

    Sim(sink=events.append).malloc(8)

    assert events
    assert kinds(tmp_path) == []


def test_device_opened_by_name_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPOOL_VARIABLE, str(tmp_path))
    gpu = open_gpu("sim")
    ptr = gpu.malloc(8)
    gpu.fill(ptr, 0, 8, LEGACY)
    gpu.close()

    traces = read(tmp_path)
    assert traces[-1][0].body.kind is EventKind.FILL
    assert traces[-1][1][0].filename == __file__
