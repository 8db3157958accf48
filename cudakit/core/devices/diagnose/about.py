"""On what machine the checks were made: versions and devices."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from cudakit.core.devices.diagnose.result import DeviceLine
from cudakit.core.devices.diagnose.versions import (
    cuda_text,
    libcuda_path,
    nvml_library_version,
)
from cudakit.gpu.api.facts import DeviceFacts
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

# What users are asked for first when they ask for help.
_PACKAGES = (
    "cudakit",
    "torch",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "jax",
    "numba",
    "numba-cuda",
    "triton",
    "cuda-bindings",
    "cuda-core",
    "nvidia-ml-py",
    "nvtx",
)


def versions(c: RunContext) -> dict[str, str]:
    """Return the versions of system, driver and packages; what is absent is left out."""
    found = {
        "system": c.host.distribution,
        "kernel": c.host.kernel,
        "container": c.host.container or ("WSL" if c.host.is_wsl else ""),
        "driver": _driver(c),
        "NVML": nvml_library_version(c),
        "CUDA of the driver": _cuda(c),
        "libcuda": libcuda_path(c),
        "Python": platform.python_version(),
        **dict(_packages(c)),
    }
    return {label: text for label, text in found.items() if text}


def _driver(c: RunContext) -> str | None:
    module = c.driver.module
    if module:
        return f"{module.version} ({'open' if module.is_open else 'proprietary'} kernel module)"
    nvml = c.nvml
    known = not isinstance(nvml, Unavailable) and isinstance(nvml.driver_version, str)
    return nvml.driver_version if known else None  # type: ignore[union-attr,return-value]


def _cuda(c: RunContext) -> str | None:
    if isinstance(c.cuda, Unavailable) or isinstance(c.cuda.driver_version, Unavailable):
        return None
    return cuda_text(c.cuda.driver_version)


def _packages(c: RunContext) -> Iterator[tuple[str, str]]:
    if isinstance(c.software.distributions, Unavailable):
        return
    installed = {one.name: one.version for one in reversed(c.software.distributions)}
    yield from ((name, installed[name]) for name in _PACKAGES if name in installed)


def device_lines(c: RunContext) -> tuple[DeviceLine, ...]:
    """List the GPUs that NVML knows, else those that CUDA does."""
    for view in (c.nvml, c.cuda):
        if not isinstance(view, Unavailable) and view.devices:
            return tuple(_line(one) for one in view.devices if one.parent is None)
    return ()


def _line(device: DeviceFacts) -> DeviceLine:
    def text(name: str) -> str | Unavailable:
        value = device.fields.get(name, Unavailable("not asked for"))
        return value if isinstance(value, (str, Unavailable)) else str(value)

    memory = device.fields.get("memory_total_bytes", device.fields.get("usable_memory_bytes"))
    return DeviceLine(
        index=device.index,
        name=text("name"),
        uuid=device.uuid,
        pci_bus_id=device.pci_bus_id,
        compute_capability=text("compute_capability"),
        memory_bytes=memory if isinstance(memory, int) else Unavailable("not known"),
    )
