"""The processes on a device, with their SM utilization, memory and runtime."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cudakit.gpu.api.facts import Process
from cudakit.gpu.nvml.reader import Reader
from cudakit.units import Unavailable

# Suffixes of the function versions, newest first: nvidia-ml-py does not select the version that the driver
# has.
_FUNCTION_SUFFIXES = ("_v3", "_v2", "")
_FUNCTION_BY_KIND = {
    "compute": "nvmlDeviceGetComputeRunningProcesses",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
    "MPS": "nvmlDeviceGetMPSComputeRunningProcesses",
}
_OTHER_NAMESPACE = Unavailable("the pid belongs to the host or to another container")
_MEMORY_NOT_REPORTED = Unavailable("the driver does not report memory per process (WDDM or WSL)")
# If no process has used the SMs since the last sample, NVML returns NVML_SUCCESS with no sample, or
# NVML_ERROR_NOT_FOUND.
_NO_SAMPLE_CODES = (0, 6)
# Index of the start time, field 22 of /proc/PID/stat, among the fields after the command, field 2
# (proc_pid_stat(5)). It is in clock ticks since boot.
_START_TIME_INDEX = 22 - 3


def processes(
    reader: Reader, *, proc_directory: Path = Path("/proc")
) -> tuple[Process, ...] | Unavailable:
    """Return the processes, sorted by kind and pid; Unavailable if NVML reports no kind of process."""
    kinds_and_processes: list[tuple[str, Any]] = []
    errors: list[Unavailable] = []
    for kind, function in _FUNCTION_BY_KIND.items():
        result = _running_processes(reader, function)
        if isinstance(result, Unavailable):
            errors.append(result)
        else:
            kinds_and_processes += ((kind, process) for process in result)
    if len(errors) == len(_FUNCTION_BY_KIND):
        return errors[0]
    utilization = _sm_utilization(reader) if kinds_and_processes else {}
    running_processes = (
        _process(kind, process, utilization, proc_directory)
        for kind, process in kinds_and_processes
    )
    return tuple(sorted(running_processes, key=lambda process: (process.kind, process.pid)))


def _running_processes(reader: Reader, function_name: str) -> Any:
    result: Any = Unavailable("this driver does not report processes")
    for suffix in _FUNCTION_SUFFIXES:
        nvml_function = getattr(reader.lib, function_name + suffix, None)
        if nvml_function is not None:
            result = reader.attempt(partial(nvml_function, reader.handle))
            if not isinstance(result, Unavailable):
                break
    return result


def _sm_utilization(reader: Reader) -> Mapping[int, int] | Unavailable:
    """Return the SM utilization in percent of each process that has used the SMs, by pid.

    NVML returns a sample for each process with a nonzero utilization (nvmlDeviceGetProcessUtilization).
    """
    try:
        samples = reader.lib.nvmlDeviceGetProcessUtilization(reader.handle, 0)
    except reader.lib.NVMLError as error:
        return {} if error.value in _NO_SAMPLE_CODES else reader.reason(error.value)
    except AttributeError:
        return Unavailable("this nvidia-ml-py does not report utilization by process")
    samples_by_time = sorted(samples, key=lambda sample: sample.timeStamp)
    # Some drivers return samples without values; their utilization is above 100 %.
    return {sample.pid: sample.smUtil for sample in samples_by_time if sample.smUtil <= 100}


def _process(
    kind: str, nvml_process: Any, utilization: Mapping[int, int] | Unavailable, proc_directory: Path
) -> Process:
    directory = proc_directory / str(nvml_process.pid)
    used_bytes = nvml_process.usedGpuMemory
    return Process(
        pid=nvml_process.pid,
        kind=kind,
        used_bytes=_MEMORY_NOT_REPORTED if used_bytes is None else used_bytes,
        name=_command_line(directory),
        user=_user_name(directory),
        sm_percent=utilization
        if isinstance(utilization, Unavailable)
        else utilization.get(nvml_process.pid, 0),
        runtime_s=_runtime(directory, proc_directory),
    )


def _command_line(directory: Path) -> str | Unavailable:
    try:
        arguments = directory.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return _OTHER_NAMESPACE
    return " ".join(filter(None, arguments)) or _OTHER_NAMESPACE


def _user_name(directory: Path) -> str | Unavailable:
    try:
        uid = os.stat(directory).st_uid
    except OSError:
        return _OTHER_NAMESPACE
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _runtime(directory: Path, proc_directory: Path) -> float | Unavailable:
    """Return the seconds since a process started."""
    try:
        # The command is in parentheses, and may contain spaces and parentheses.
        fields_after_command = (
            directory.joinpath("stat").read_text(errors="replace").rpartition(")")[2]
        )
        start_s = int(fields_after_command.split()[_START_TIME_INDEX]) / os.sysconf("SC_CLK_TCK")
        return float(proc_directory.joinpath("uptime").read_text().split()[0]) - start_s
    except (OSError, ValueError, IndexError):
        return _OTHER_NAMESPACE
