"""What the CUDA driver says, asked in a short child process.

A process that has initialised CUDA can no longer fork, and a driver can hang or crash: none of it may
happen here. Where CUDA_VISIBLE_DEVICES hides devices, a second child that has not got it names them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudakit.gpu.api.attributes import attributes
from cudakit.gpu.api.facts import CudaView
from cudakit.gpu.probe.answer import cuda_view
from cudakit.units import Unavailable

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"

# A profiler or checker that is told to enter every CUDA process has no business in this one.
_INJECTIONS = ("CUDA_INJECTION64_PATH", "CUDA_INJECTION32_PATH")
# A first cuInit can take seconds where no process keeps the driver loaded; one that hangs, for ever.
DEFAULT_SECONDS = 30
_CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True, slots=True)
class Probe:
    """A question that is under way: its children run while the caller does other things."""

    environment: Mapping[str, str]
    children: tuple[subprocess.Popen[str] | str, ...]  # the second one sees hidden devices
    seconds: float

    def answer(self) -> CudaView | Unavailable:
        """Wait for the driver's answer, or for the reason why there is none."""
        answers = [_read(child, self.seconds) for child in self.children]
        visible, *everything = answers
        return cuda_view(
            visible,
            everything[0] if everything else None,
            visible_devices=self.environment.get(VISIBLE),
            device_order=self.environment.get(ORDER),
        )


def ask(
    *,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
    seconds: float = DEFAULT_SECONDS,
) -> Probe:
    """Start asking the driver; ``environment`` and ``command`` replace those of this process.

    The children are killed after ``seconds``.
    """
    environment = dict(os.environ if environment is None else environment)
    line = [*(command or _command()), str(max(round(seconds), 1)), *_numbers()]
    children = [_start(line, environment)]
    if VISIBLE in environment:
        children.append(_start(line, _without(environment, VISIBLE)))
    return Probe(environment, tuple(children), seconds)


def _command() -> list[str]:
    return [sys.executable, "-I", "-S", str(_CHILD)]


def _numbers() -> list[str]:
    return [str(attribute.number) for attribute in attributes()]


def _without(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def _start(line: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str] | str:
    """Start a child, or say why it cannot be."""
    try:
        return subprocess.Popen(  # noqa: S603 this interpreter, on a file of ours
            line,
            env=_without(environment, *_INJECTIONS),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return f"no process can be started to ask the CUDA driver in: {error}"


def _read(child: subprocess.Popen[str] | str, seconds: float) -> dict[str, Any] | str:
    """Return what a child found, or why it did not."""
    if isinstance(child, str):
        return child
    try:
        text, complaints = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _abandon(child)
        return f"the CUDA driver did not answer within {seconds:g} s"
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else _death(child.returncode, complaints)


def _abandon(child: subprocess.Popen[str]) -> None:
    child.kill()
    try:
        child.communicate(timeout=1)
    except subprocess.TimeoutExpired:
        # Stuck inside the kernel, where no signal reaches it; it ends when the driver lets it.
        child.returncode = -signal.SIGKILL


def _death(code: int, complaints: str) -> str:
    lines = complaints.strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    if code == -signal.SIGALRM:
        return "the CUDA driver did not answer in time"
    if code < 0:
        return f"the CUDA driver crashed when it was asked ({_signal_name(-code)}){last}"
    return f"the process that asks the CUDA driver ended with {code}{last}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
