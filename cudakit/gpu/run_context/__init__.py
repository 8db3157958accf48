"""Gather a RunContext. No other package reads /proc, /dev, /sys and /etc for facts of a run."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from cudakit.gpu.api.facts import CudaView, DeviceFacts, Machine, NvmlView
from cudakit.gpu.api.run_context import RunContext, SelfTestStep
from cudakit.gpu.run_context.driver import read_driver
from cudakit.gpu.run_context.files import SYSTEM, Files, attempt
from cudakit.gpu.run_context.host import (
    is_privileged,
    process_names,
    read_host,
    read_limits,
)
from cudakit.gpu.run_context.software import read_software
from cudakit.units import Unavailable

_NOT_IN_NVML = Unavailable("NVML does not report the device")
_SIMULATED = Unavailable("the machine is simulated")


def gather(
    machine: Machine,
    *,
    variables: Mapping[str, str],
    command: tuple[str, ...] = (),
    ordinal: int = 0,
    files: Files = SYSTEM,
) -> RunContext:
    """Return the facts that benchmark results record: host, driver, environment, processes on the GPU.

    ``ordinal`` is the CUDA index of the GPU.

    Call this before the device is opened: otherwise ``other_processes`` counts this process, and the child
    process that queries the driver.
    """
    context = _common_facts(machine, variables, files)
    uuids = [device.uuid for device in context.cuda_devices[ordinal : ordinal + 1]]
    device = next(
        (candidate for candidate in context.nvml_devices if candidate.uuid in uuids), None
    )
    return replace(
        context,
        command=command,
        versions=dict(_versions(context.nvml, context.cuda)),
        nvml_device=device,
        other_processes=_count_processes(machine, device),
    )


def gather_all(
    machine: Machine,
    *,
    variables: Mapping[str, str],
    search_path: Iterable[str],
    self_test: tuple[SelfTestStep, ...] | Unavailable = (),
    files: Files = SYSTEM,
) -> RunContext:
    """Return all facts that can be observed without using a GPU.

    A fact that cannot be read becomes Unavailable with the reason. ``search_path`` is the list of
    directories with Python packages, such as sys.path. If the GPUs are simulated, the files, packages,
    environment variables and limits of the host are left out: they belong to a different machine.
    """
    if machine.simulated:
        files, variables, search_path = Files(None), {}, ()
    context = _common_facts(machine, variables, files)
    if machine.simulated:
        context = replace(
            context, host=replace(context.host, is_wsl=_uses_wsl_driver(context.cuda))
        )
    return replace(
        context,
        driver=read_driver(files, context.variables, context.host.kernel),
        software=read_software(files, context.variables, search_path),
        limits=_SIMULATED if machine.simulated else attempt(read_limits),
        privileged=is_privileged(files),
        processes=attempt(partial(process_names, files)),
        telemetry=tuple(
            attempt(partial(machine.telemetry, device)) for device in context.nvml_devices
        ),
        self_test=self_test,
    )


def _common_facts(machine: Machine, variables: Mapping[str, str], files: Files) -> RunContext:
    """Return the facts for ``gather`` and ``gather_all``: host, environment, views of NVML and CUDA."""
    nvml, cuda = attempt(machine.nvml), attempt(machine.cuda)
    return RunContext(
        simulated=machine.simulated,
        variables=_effective_variables(machine, cuda, variables),
        host=read_host(files, variables),
        nvml=nvml,
        cuda=cuda,
    )


def _uses_wsl_driver(cuda: CudaView | Unavailable) -> bool:
    """Return whether libcuda is the one that Windows provides in WSL."""
    library = cuda if isinstance(cuda, Unavailable) else cuda.libcuda
    return isinstance(library, str) and library.startswith("/usr/lib/wsl/")


def _effective_variables(
    machine: Machine, cuda: CudaView | Unavailable, variables: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the environment variables.

    On a simulated machine, the variables that select CUDA devices are simulated.
    """
    if not machine.simulated or isinstance(cuda, Unavailable):
        return variables
    recorded_variables = {
        "CUDA_VISIBLE_DEVICES": cuda.visible_devices,
        "CUDA_DEVICE_ORDER": cuda.device_order,
    }
    other_variables = {
        name: value for name, value in variables.items() if name not in recorded_variables
    }
    return other_variables | {
        name: value for name, value in recorded_variables.items() if value is not None
    }


def _versions(
    nvml: NvmlView | Unavailable, cuda: CudaView | Unavailable
) -> Iterator[tuple[str, str]]:
    from importlib.metadata import version  # slow to import (20 ms), and not needed by doctor

    if isinstance(nvml, NvmlView) and isinstance(nvml.driver_version, str):
        yield "driver", nvml.driver_version
    if isinstance(cuda, CudaView) and isinstance(cuda.driver_version, tuple):
        yield "CUDA", ".".join(map(str, cuda.driver_version))
    yield "cudakit", version("cudakit")
    yield "python", platform.python_version()


def _count_processes(machine: Machine, device: DeviceFacts | None) -> int | Unavailable:
    if machine.simulated:
        return _SIMULATED
    processes = _NOT_IN_NVML if device is None else machine.processes(device)
    return processes if isinstance(processes, Unavailable) else len(processes)
