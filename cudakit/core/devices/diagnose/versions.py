"""The versions of the driver's three parts: the kernel's module, NVML's library and CUDA's."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cudakit.core.devices.circumstances import Circumstances
from cudakit.core.devices.circumstances.files import Files
from cudakit.units import Unavailable

# "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build ..."
_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_IN_NAME = re.compile(r"\.so\.(\d{3,}\.\d+(?:\.\d+)?)$")


@dataclass(frozen=True, slots=True)
class KernelModule:
    """The driver's module, as /proc/driver/nvidia/version tells."""

    version: str
    is_open: bool


def kernel_module(files: Files) -> KernelModule | None:
    """Return the driver's module, None where it is not loaded or not shown."""
    text = files.text("/proc/driver/nvidia/version") or ""
    found = _MODULE.search(text)
    return KernelModule(found[1], "Open Kernel Module" in text) if found else None


def nvml_library_version(circumstances: Circumstances) -> str | None:
    """Return the driver that libnvidia-ml belongs to; NVML says it with its own number before it."""
    nvml = circumstances.nvml
    if not isinstance(nvml, Unavailable) and isinstance(nvml.nvml_version, str):
        return nvml.nvml_version.partition(".")[2] or None
    return _first_on_path(circumstances, "libnvidia-ml.so.1")


def libcuda_path(circumstances: Circumstances) -> str | None:
    """Return the file of the libcuda that answered, else of the one that the loader would take."""
    cuda = circumstances.cuda
    if not isinstance(cuda, Unavailable) and isinstance(cuda.libcuda, str):
        return cuda.libcuda
    found = circumstances.libraries
    if isinstance(found, Unavailable):
        return None
    return next((one.real for one in found if one.soname == "libcuda.so.1"), None)


def libcuda_version(circumstances: Circumstances) -> str | None:
    """Return the driver that libcuda belongs to, from the name of its file."""
    path = libcuda_path(circumstances)
    return version_in_name(circumstances.files.resolve(path)) if path else None


def version_in_name(path: str) -> str | None:
    """Read 580.65.06 from libcuda.so.580.65.06; libcuda.so.1 says nothing."""
    found = _IN_NAME.search(path)
    return found[1] if found else None


def _first_on_path(circumstances: Circumstances, soname: str) -> str | None:
    found = circumstances.libraries
    if isinstance(found, Unavailable):
        return None
    first = next((one.real for one in found if one.soname == soname), None)
    return version_in_name(first) if first else None


def as_numbers(version: str) -> tuple[int, ...]:
    """Make versions compare as numbers: 580.65.06 as (580, 65, 6)."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def cuda_text(version: tuple[int, int | None]) -> str:
    """Write the version of a CUDA: 13.0, or 13.x where the minor number is not known."""
    major, minor = version
    return f"{major}.{'x' if minor is None else minor}"
