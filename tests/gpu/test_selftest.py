from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cudakit.errors import CudaError
from cudakit.gpu.api import MemoryInfo
from cudakit.gpu.api.facts import SelfTestStep
from cudakit.gpu.selftest import run_self_test, run_steps
from cudakit.units import Unavailable

STEPS = ["context", "compile", "kernel", "copy"]


class Device:
    """The methods of Gpu that the steps call, synchronous and on host memory."""

    def __init__(self, *, fault: str = "") -> None:
        self.fault = fault
        self.memory: dict[int, bytearray] = {}

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(16 << 20, 32 << 20)

    def compile(self, source: str) -> bytes:
        if self.fault == "compile":
            raise CudaError(5, "NVRTC_ERROR_INVALID_OPTION", "no such option", hint="another NVRTC")
        return source.encode()

    def load(self, image: bytes) -> int:
        return len(image)

    def kernel(self, module: int, name: str) -> str:
        return f"{module} {name}"

    def stream(self) -> int:
        return 7

    def malloc(self, size: int) -> int:
        self.memory[len(self.memory)] = bytearray(size)
        return len(self.memory) - 1

    host_malloc = malloc

    def free(self, ptr: int) -> None:
        del self.memory[ptr][:]

    host_free = free

    def host_view(self, ptr: int, size: int) -> memoryview:
        return memoryview(self.memory[ptr])[:size]

    def launch(self, kernel: str, grid: Any, block: Any, args: Any, stream: int) -> None:
        assert grid[0] * block[0] == args[1], (kernel, stream)
        i = np.arange(int(args[1]), dtype=np.uint32)
        values = i ^ args[2]
        for _ in range(64):
            values = values * np.uint32(1664525) + np.uint32(1013904223)
            values ^= values >> np.uint32(13)
        if self.fault == "kernel":
            values[5] ^= 1
        self.host_view(args[0], values.nbytes)[:] = values.tobytes()

    def copy(self, dst: int, src: int, size: int, stream: int) -> None:
        assert stream == 7
        self.memory[dst][:size] = self.memory[src][:size]
        if self.fault == "copy" and len(self.memory) > 4:
            self.memory[dst][8] ^= 0xFF

    def sync_stream(self, stream: int) -> None:
        assert stream == 7

    def close(self) -> None:
        self.memory = {}


def taken_steps(*devices: Any) -> list[SelfTestStep]:
    steps: Iterator[SelfTestStep] = run_steps(lambda: list(devices))
    return list(steps)


def test_steps_succeed_on_working_device() -> None:
    steps = taken_steps(Device(), Device())

    assert [step.name for step in steps] == STEPS
    assert not any(step.error for step in steps)
    assert steps[0].details == {"cuda:0": "16.0 MiB free", "cuda:1": "16.0 MiB free"}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("compile", "cuda:1: NVRTC_ERROR_INVALID_OPTION: no such option"),
        ("kernel", "cuda:1: the kernel computed 1 wrong values of 1,048,576; index 5: "),
        ("copy", "cuda:1: the copies returned 1 wrong values of 1,048,576; index 2: "),
    ],
)
def test_first_failing_step_is_last_and_names_device(fault: str, words: str) -> None:
    steps = taken_steps(Device(), Device(fault=fault))

    assert [step.name for step in steps] == STEPS[: STEPS.index(fault) + 1]
    assert steps[-1].error.startswith(words)
    assert steps[-1].hint
    assert list(steps[-1].details) == ["cuda:0"]


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def line(name: str) -> str:
    return json.dumps({"name": name, "error": "", "hint": "", "details": {"cuda:0": "well"}})


def test_crash_fails_current_step() -> None:
    crash_script = f"import os; print({line('context')!r}, flush=True); os.abort()"

    steps = run_self_test(command=python(crash_script))

    assert not isinstance(steps, Unavailable)
    assert [step.name for step in steps] == ["context", "compile"]
    assert steps[0].details == {"cuda:0": "well"}
    assert steps[1].error == "step 'compile' crashed: exit code -6"


def test_timeout_fails_current_step() -> None:
    hang_script = f"import time; print({line('context')!r}, flush=True); time.sleep(60)"

    steps = run_self_test(command=python(hang_script), seconds=1)

    assert not isinstance(steps, Unavailable)
    assert steps[1].error == "step 'compile' timed out"


def test_stderr_of_child_is_quoted() -> None:
    steps = run_self_test(command=python("raise SystemExit('no such library')"))

    assert not isinstance(steps, Unavailable)
    assert steps[0].error == "step 'context' crashed: exit code 1: no such library"


def test_missing_child_has_reason() -> None:
    assert isinstance(run_self_test(command=["/nowhere/python"]), Unavailable)


def test_real_child_answers_with_or_without_gpu() -> None:
    steps = run_self_test()

    assert not isinstance(steps, Unavailable)
    assert [step.name for step in steps] == STEPS[: len(steps)]
    assert len(steps) == len(STEPS) or steps[-1].error


@pytest.mark.gpu
def test_self_test_passes_on_real_device() -> None:
    steps = run_self_test()

    assert not isinstance(steps, Unavailable)
    assert [(step.name, step.error) for step in steps] == [(name, "") for name in STEPS]
