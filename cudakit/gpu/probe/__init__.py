"""Query the CUDA driver in a short child process.

A process that has initialised CUDA can no longer fork, and a driver can hang or crash: neither may happen
here. If CUDA_VISIBLE_DEVICES hides devices, a second child without the variable names the hidden ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from cudakit.gpu.api.attributes import Attribute, attributes
from cudakit.gpu.api.facts import CudaView, DeviceFacts, Field
from cudakit.gpu.architectures import Capability
from cudakit.units import Unavailable

_T = TypeVar("_T")

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"

# Profilers and checkers that are injected into every CUDA process must not enter this one.
INJECTIONS = ("CUDA_INJECTION64_PATH", "CUDA_INJECTION32_PATH")
# The first cuInit can take seconds if no process keeps the driver loaded; a hanging one never ends.
DEFAULT_SECONDS = 30
_CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True, slots=True)
class Probe:
    """Child processes that query the driver while the caller continues."""

    environment: Mapping[str, str]
    children: tuple[subprocess.Popen[str] | str, ...]  # the second one sees hidden devices
    seconds: float

    def answer(self) -> CudaView | Unavailable:
        """Wait for the driver's answer; return Unavailable with the reason without one."""
        answers = [_read(child, self.seconds) for child in self.children]
        visible, *everything = answers
        return cuda_view(
            visible,
            everything[0] if everything else None,
            visible_devices=self.environment.get(VISIBLE),
            device_order=self.environment.get(ORDER),
        )


def start_probe(
    *,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
    seconds: float = DEFAULT_SECONDS,
) -> Probe:
    """Start to query the driver; ``environment`` and ``command`` replace those of this process.

    The children are killed after ``seconds``.
    """
    environment = dict(os.environ if environment is None else environment)
    numbers = (str(attribute.number) for attribute in attributes())
    child = command or (sys.executable, "-I", "-S", str(_CHILD))
    line = [*child, str(max(round(seconds), 1)), *numbers]
    children = [_start(line, environment)]
    if VISIBLE in environment:
        children.append(_start(line, without(environment, VISIBLE)))
    return Probe(environment, tuple(children), seconds)


def without(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return an environment without some variables."""
    return {name: value for name, value in environment.items() if name not in names}


def _start(line: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str] | str:
    """Start a child process; return the reason if that fails."""
    try:
        return subprocess.Popen(  # noqa: S603 this interpreter, on a file of ours
            line,
            env=without(environment, *INJECTIONS),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return f"cannot start the process that queries the CUDA driver: {error}"


def _read(child: subprocess.Popen[str] | str, seconds: float) -> dict[str, Any] | str:
    """Return the answer of a child process, or the reason why there is none."""
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
        # Blocked inside the kernel, where no signal is delivered; the driver ends the wait.
        child.returncode = -signal.SIGKILL


def last_line(complaints: str) -> str:
    """Return the last line of what a process wrote to stderr, to append to a message."""
    lines = complaints.strip().splitlines()
    return f": {lines[-1]}" if lines else ""


def _death(code: int, complaints: str) -> str:
    last = last_line(complaints)
    if code == -signal.SIGALRM:
        return "the CUDA driver did not answer in time"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"the CUDA driver crashed during the query ({name}){last}"
    return f"the process that queries the CUDA driver exited with {code}{last}"


# --- the child's JSON as a CudaView ----------------------------------------------------------------


_UNKNOWN = Unavailable("not supported by this driver")

# CUcomputemode and CUdeviceNumaConfig (cuda.h).
_WORDS: Mapping[str, Mapping[int, str]] = {
    "compute_mode": {0: "default", 2: "prohibited", 3: "exclusive process"},
    "numa_config": {0: "none", 1: "own node"},
}


def cuda_view(
    visible: dict[str, Any] | str,
    everything: dict[str, Any] | str | None,
    *,
    visible_devices: str | None,
    device_order: str | None,
) -> CudaView | Unavailable:
    """Combine the answers of a child with CUDA_VISIBLE_DEVICES and of one without the variable."""
    if isinstance(visible, str):
        return Unavailable(visible)
    if "missing" in visible:
        return Unavailable(f"libcuda cannot be loaded: {visible['missing']}")
    devices = tuple(_devices(visible))
    seen = {device.uuid for device in devices}
    rest = tuple(_devices(everything)) if isinstance(everything, dict) else ()
    return CudaView(
        # CUDA_VERSION is 1000 major + 10 minor (cuda.h).
        driver_version=_field(
            visible["version"], lambda number: (number // 1000, number % 1000 // 10)
        ),
        devices=devices,
        hidden=tuple(replace(device, index=-1) for device in rest if device.uuid not in seen),
        peer_access=tuple((one, other) for one, other, _ in visible.get("peers", ())),
        peer_atomics=tuple((one, other) for one, other, full in visible.get("peers", ()) if full),
        error=tuple(visible["error"]) if "error" in visible else None,
        libcuda=visible["libcuda"] or Unavailable("not listed in /proc/self/maps"),
        visible_devices=visible_devices,
        device_order=device_order,
        order=tuple(device.uuid for device in rest or devices if isinstance(device.uuid, str)),
    )


def _devices(found: dict[str, Any]) -> Iterator[DeviceFacts]:
    for index, device in enumerate(found.get("devices", ())):
        yield DeviceFacts(
            index=index,
            uuid=_uuid(device),
            pci_bus_id=_field(device["pci_bus_id"], str.lower),
            fields=dict(_fields(device)),
        )


def _fields(device: dict[str, Any]) -> Iterator[tuple[str, Field]]:
    raw = device["attributes"]
    yield "name", _field(device["name"], str)
    yield "usable_memory_bytes", _field(device["memory"], int)
    major, minor = raw.get("75"), raw.get("76")
    if isinstance(major, int) and isinstance(minor, int):
        capability = Capability(major, minor)
        yield "compute_capability", str(capability)
        yield "architecture", capability.architecture
    for attribute in attributes():
        yield attribute.name, _attribute(attribute, raw.get(str(attribute.number)))


def _attribute(attribute: Attribute, value: Any) -> Field:
    if value is None:
        return _UNKNOWN
    match attribute.unit:
        case "bool":
            return _field(value, bool)
        case "hex":
            return _field(value, lambda number: f"{number & 0xFFFFFFFF:#010x}")
        case "word":
            words = _WORDS[attribute.name]
            return _field(value, lambda number: words.get(number, f"unknown ({number})"))
    return _field(value, int)


def _field(value: Any, convert: Callable[[Any], _T]) -> _T | Unavailable:
    """Convert a value; an error that the child returned in its place becomes Unavailable."""
    if not isinstance(value, dict):
        return convert(value)
    _, name, explanation = value["error"]
    return Unavailable(f"{name}: {explanation}" if name else explanation)


def _uuid(device: dict[str, Any]) -> str | Unavailable:
    # A MIG instance has its own UUID besides that of its GPU.
    gpu = device["gpu_uuid"]
    kind = "MIG" if isinstance(gpu, str) and gpu != device["uuid"] else "GPU"
    return _field(device["uuid"], lambda own: f"{kind}-{uuid.UUID(hex=own)}")
