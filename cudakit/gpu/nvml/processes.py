"""The processes that use a device."""

from __future__ import annotations

import os
import pwd
from functools import partial
from pathlib import Path
from typing import Any

from cudakit.gpu.api.facts import Process
from cudakit.gpu.nvml.reader import Reader
from cudakit.units import Unavailable

# The functions of current drivers, of 2021 and of earlier: nvidia-ml-py does not choose between them.
_FORMS = ("_v3", "_v2", "")
_KINDS = {
    "compute": "nvmlDeviceGetComputeRunningProcesses",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
    "MPS": "nvmlDeviceGetMPSComputeRunningProcesses",
}
_ELSEWHERE = Unavailable("the pid is not in this namespace (of the host, or of another container)")
_NOT_COUNTED = Unavailable("the driver does not count memory by process (WDDM or WSL)")


def processes(reader: Reader, *, proc: Path = Path("/proc")) -> tuple[Process, ...] | Unavailable:
    """List processes by kind and number; Unavailable if NVML refuses every kind."""
    found: list[Process] = []
    refused: list[Unavailable] = []
    for kind, function in _KINDS.items():
        answer = _listed(reader, function)
        if isinstance(answer, Unavailable):
            refused.append(answer)
        else:
            found += (_process(kind, each, proc) for each in answer)
    if len(refused) == len(_KINDS):
        return refused[0]
    return tuple(sorted(found, key=lambda process: (process.kind, process.pid)))


def _listed(reader: Reader, function: str) -> Any:
    answer: Any = Unavailable("this driver does not say")
    for form in _FORMS:
        call = getattr(reader.lib, function + form, None)
        if call is not None:
            answer = reader.attempt(partial(call, reader.handle))
            if not isinstance(answer, Unavailable):
                break
    return answer


def _process(kind: str, found: Any, proc: Path) -> Process:
    place = proc / str(found.pid)
    used = found.usedGpuMemory
    return Process(
        pid=found.pid,
        kind=kind,
        used_bytes=_NOT_COUNTED if used is None else used,
        name=_command(place),
        user=_owner(place),
    )


def _command(place: Path) -> str | Unavailable:
    try:
        words = place.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return _ELSEWHERE
    return " ".join(filter(None, words)) or _ELSEWHERE


def _owner(place: Path) -> str | Unavailable:
    try:
        number = os.stat(place).st_uid
    except OSError:
        return _ELSEWHERE
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
