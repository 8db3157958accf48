"""Query the CUDA driver in a child process.

A process that has initialized CUDA cannot fork and use CUDA in the child, and a broken driver can hang or
crash; a child process protects the caller. If CUDA_VISIBLE_DEVICES is set, a second child without the
variable lists the hidden devices.
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

from cudakit.errors import NO_DRIVER
from cudakit.gpu.api.facts import Attribute, Capability, CudaView, DeviceFacts, Field, attributes
from cudakit.units import Unavailable

_T = TypeVar("_T")

_VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDER_VARIABLE = "CUDA_DEVICE_ORDER"

# Variables that make CUDA load a profiler or checker, which must not affect the child process.
INJECTION_VARIABLES = ("CUDA_INJECTION64_PATH", "CUDA_INJECTION32_PATH")
# cuInit can take seconds without persistence mode.
DEFAULT_SECONDS = 30
_CHILD = Path(__file__).with_name("probe_child.py")


@dataclass(frozen=True, slots=True)
class Probe:
    """Child processes that query the driver in the background."""

    environment: Mapping[str, str]
    # The child processes; the second one lists hidden devices. A string is the reason why a child did not
    # start.
    children: tuple[subprocess.Popen[str] | str, ...]
    seconds: float

    def answer(self) -> CudaView | Unavailable:
        """Wait for the driver's answer; return Unavailable with the reason if there is none."""
        answers = [_read_answer(child, self.seconds) for child in self.children]
        visible_answer, *unrestricted_answers = answers
        return cuda_view(
            visible_answer,
            unrestricted_answers[0] if unrestricted_answers else None,
            visible_devices=self.environment.get(_VISIBLE_VARIABLE),
            device_order=self.environment.get(_ORDER_VARIABLE),
        )


def start_probe(
    *,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
    seconds: float = DEFAULT_SECONDS,
) -> Probe:
    """Start the child processes, which are killed after ``seconds``.

    ``environment`` and ``command`` replace the environment of this process and the command of the child.
    """
    environment = dict(os.environ if environment is None else environment)
    attribute_numbers = (str(attribute.number) for attribute in attributes())
    child = command or (sys.executable, "-I", "-S", str(_CHILD))
    command_line = [*child, str(max(round(seconds), 1)), *attribute_numbers]
    children = [_start_child(command_line, environment)]
    if _VISIBLE_VARIABLE in environment:
        children.append(
            _start_child(command_line, without_variables(environment, _VISIBLE_VARIABLE))
        )
    return Probe(environment, tuple(children), seconds)


def without_variables(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return a copy of an environment without some variables."""
    return {name: value for name, value in environment.items() if name not in names}


def _start_child(
    command_line: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[str] | str:
    """Start a child process, or return the reason why it does not start."""
    try:
        return subprocess.Popen(  # noqa: S603 runs a script of cudakit with this interpreter
            command_line,
            env=without_variables(environment, *INJECTION_VARIABLES),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return f"cannot start the process that queries the CUDA driver: {error}"


def _read_answer(child: subprocess.Popen[str] | str, seconds: float) -> dict[str, Any] | str:
    """Return the answer of a child process, or the reason why it has none."""
    if isinstance(child, str):
        return child
    try:
        text, stderr = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _kill_child(child)
        return f"the CUDA driver did not answer within {seconds:g} s"
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else _exit_reason(child.returncode, stderr)


def _kill_child(child: subprocess.Popen[str]) -> None:
    child.kill()
    try:
        child.communicate(timeout=1)
    except subprocess.TimeoutExpired:
        # The child is blocked in an uninterruptible system call of the driver: do not wait for it.
        child.returncode = -signal.SIGKILL


def last_line(stderr: str) -> str:
    """Return the last line of a process's stderr, to append to a message."""
    lines = stderr.strip().splitlines()
    return f": {lines[-1]}" if lines else ""


def _exit_reason(exit_code: int, stderr: str) -> str:
    last_stderr_line = last_line(stderr)
    if exit_code == -signal.SIGALRM:
        return "the CUDA driver did not answer in time"
    if exit_code < 0:
        name = (
            signal.Signals(-exit_code).name
            if -exit_code in set(signal.Signals)
            else f"signal {-exit_code}"
        )
        return f"the CUDA driver crashed during the query ({name}){last_stderr_line}"
    return f"the process that queries the CUDA driver exited with {exit_code}{last_stderr_line}"


# --- conversion of the child's JSON to a CudaView --------------------------------------------------


_UNKNOWN = Unavailable("not supported by this driver")
# The text of dlopen for a library that is not installed, which the reason need not repeat.
_NOT_INSTALLED = "cannot open shared object file: No such file"

# CUcomputemode and CUdeviceNumaConfig (cuda.h).
_VALUE_NAMES: Mapping[str, Mapping[int, str]] = {
    "compute_mode": {0: "default", 2: "prohibited", 3: "exclusive process"},
    "numa_config": {0: "none", 1: "own node"},
}


def _no_driver_reason(loader_error: str) -> str:
    """Return the reason why CUDA cannot be queried, from the loader's error for libcuda."""
    return NO_DRIVER if _NOT_INSTALLED in loader_error else f"{NO_DRIVER}: {loader_error}"


def cuda_view(
    visible_answer: dict[str, Any] | str,
    unrestricted_answer: dict[str, Any] | str | None,
    *,
    visible_devices: str | None,
    device_order: str | None,
) -> CudaView | Unavailable:
    """Return the CudaView of two answers: of the children with and without CUDA_VISIBLE_DEVICES."""
    if isinstance(visible_answer, str):
        return Unavailable(visible_answer)
    if "missing" in visible_answer:
        return Unavailable(_no_driver_reason(visible_answer["missing"]))
    devices = tuple(_device_facts(visible_answer))
    visible_uuids = {device.uuid for device in devices}
    all_devices = (
        tuple(_device_facts(unrestricted_answer)) if isinstance(unrestricted_answer, dict) else ()
    )
    return CudaView(
        # CUDA_VERSION is 1000 major + 10 minor (cuda.h).
        driver_version=_convert_field(
            visible_answer["version"], lambda number: (number // 1000, number % 1000 // 10)
        ),
        devices=devices,
        hidden=tuple(
            replace(device, index=-1) for device in all_devices if device.uuid not in visible_uuids
        ),
        peer_access=tuple((device, peer) for device, peer, _ in visible_answer.get("peers", ())),
        peer_atomics=tuple(
            (device, peer)
            for device, peer, has_atomics in visible_answer.get("peers", ())
            if has_atomics
        ),
        error=tuple(visible_answer["error"]) if "error" in visible_answer else None,
        libcuda=visible_answer["libcuda"] or Unavailable("not listed in /proc/self/maps"),
        visible_devices=visible_devices,
        device_order=device_order,
        order=tuple(
            device.uuid for device in all_devices or devices if isinstance(device.uuid, str)
        ),
    )


def _device_facts(answer: dict[str, Any]) -> Iterator[DeviceFacts]:
    for index, device in enumerate(answer.get("devices", ())):
        yield DeviceFacts(
            index=index,
            uuid=_device_uuid(device),
            pci_bus_id=_convert_field(device["pci_bus_id"], str.lower),
            fields=dict(_device_fields(device)),
        )


def _device_fields(device: dict[str, Any]) -> Iterator[tuple[str, Field]]:
    attribute_values = device["attributes"]
    yield "name", _convert_field(device["name"], str)
    yield "usable_memory_bytes", _convert_field(device["memory"], int)
    major, minor = attribute_values.get("75"), attribute_values.get("76")
    if isinstance(major, int) and isinstance(minor, int):
        capability = Capability(major, minor)
        yield "compute_capability", str(capability)
        yield "architecture", capability.architecture
    for attribute in attributes():
        yield (
            attribute.name,
            _attribute_value(attribute, attribute_values.get(str(attribute.number))),
        )


def _attribute_value(attribute: Attribute, value: Any) -> Field:
    if value is None:
        return _UNKNOWN
    match attribute.unit:
        case "bool":
            return _convert_field(value, bool)
        case "hex":
            return _convert_field(value, lambda number: f"{number & 0xFFFFFFFF:#010x}")
        case "word":
            value_names = _VALUE_NAMES[attribute.name]
            return _convert_field(
                value, lambda number: value_names.get(number, f"unknown ({number})")
            )
    return _convert_field(value, int)


def _convert_field(value: Any, convert: Callable[[Any], _T]) -> _T | Unavailable:
    """Convert a field of the child's JSON; an error object becomes Unavailable."""
    if not isinstance(value, dict):
        return convert(value)
    _, name, explanation = value["error"]
    return Unavailable(f"{name}: {explanation}" if name else explanation)


def _device_uuid(device: dict[str, Any]) -> str | Unavailable:
    # The UUID of a MIG instance differs from that of its GPU.
    gpu_uuid = device["gpu_uuid"]
    uuid_prefix = "MIG" if isinstance(gpu_uuid, str) and gpu_uuid != device["uuid"] else "GPU"
    return _convert_field(device["uuid"], lambda digits: f"{uuid_prefix}-{uuid.UUID(hex=digits)}")
