"""What is around a GPU that is to be measured, and what was called: for the record of a result."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import click

from cudakit.core.bench.circumstances import Circumstances
from cudakit.gpu.api.facts import CudaView, DeviceFacts, Machine, NvmlView
from cudakit.gpu.machine import open_machine
from cudakit.units import Unavailable

_CPU_INFO = Path("/proc/cpuinfo")
_MEMORY_INFO = Path("/proc/meminfo")
_UNKNOWN = Unavailable("NVML does not know the device")


def look_around(gpu: str) -> Circumstances:
    """Ask NVML and the driver about the device that ``--gpu`` names, before it is opened.

    Then its processes are those of others, and the child that asks the driver has ended when the first
    sample is taken.
    """
    machine = open_machine(gpu)
    nvml, cuda = machine.nvml(), machine.cuda()
    device = _managed(nvml, cuda)
    return Circumstances(
        versions=dict(_versions(nvml, cuda)),
        management=device,
        other_processes=_count_processes(machine, device),
        host=_host(),
        variables=dict(os.environ),
        host_free_bytes=_host_free_bytes(),
        command=_command(),
    )


def _managed(nvml: NvmlView | Unavailable, cuda: CudaView | Unavailable) -> DeviceFacts | None:
    """Find the first device of CUDA among those of NVML."""
    if isinstance(nvml, Unavailable) or isinstance(cuda, Unavailable) or not cuda.devices:
        return None
    return next((one for one in nvml.devices if one.uuid == cuda.devices[0].uuid), None)


def _versions(
    nvml: NvmlView | Unavailable, cuda: CudaView | Unavailable
) -> Iterator[tuple[str, str]]:
    if isinstance(nvml, NvmlView) and isinstance(nvml.driver_version, str):
        yield "driver", nvml.driver_version
    if isinstance(cuda, CudaView) and isinstance(cuda.driver_version, tuple):
        yield "CUDA", ".".join(map(str, cuda.driver_version))
    yield "cudakit", version("cudakit")
    yield "python", platform.python_version()


def _count_processes(machine: Machine, device: DeviceFacts | None) -> int | Unavailable:
    if machine.simulated:
        return Unavailable("the GPU is simulated")
    found = _UNKNOWN if device is None else machine.processes(device)
    return found if isinstance(found, Unavailable) else len(found)


def _host() -> Mapping[str, str]:
    known = {"cpu": _cpu(), "system": platform.system(), "kernel": platform.release()}
    return {name: word for name, word in known.items() if word}


def _cpu() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _host_free_bytes() -> int | Unavailable:
    """Read what Linux can give without swapping (proc_meminfo(5), MemAvailable)."""
    try:
        lines = _MEMORY_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return Unavailable("the system does not say")
    words = next((line.split() for line in lines if line.startswith("MemAvailable:")), [])
    return int(words[1]) << 10 if len(words) > 1 else Unavailable("the system does not say")


def _command() -> tuple[str, ...]:
    arguments = click.get_current_context().find_object(tuple)
    return ("cudakit", *(arguments or ()))
