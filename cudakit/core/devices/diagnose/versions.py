"""The versions of the driver's three parts: the kernel's module, NVML's library and CUDA's."""

from __future__ import annotations

import re

from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

_IN_NAME = re.compile(r"\.so\.(\d{3,}\.\d+(?:\.\d+)?)$")


def nvml_library_version(circumstances: RunContext) -> str | None:
    """Return the driver that libnvidia-ml belongs to; NVML says it with its own number before it."""
    nvml = circumstances.nvml
    if not isinstance(nvml, Unavailable) and isinstance(nvml.nvml_version, str):
        return nvml.nvml_version.partition(".")[2] or None
    return _first_on_path(circumstances, "libnvidia-ml.so.1")


def libcuda_path(circumstances: RunContext) -> str | None:
    """Return the file of the libcuda that answered, else of the one that the loader would take."""
    cuda = circumstances.cuda
    if not isinstance(cuda, Unavailable) and isinstance(cuda.libcuda, str):
        return cuda.libcuda
    found = circumstances.software.libraries
    if isinstance(found, Unavailable):
        return None
    return next((one.real for one in found if one.soname == "libcuda.so.1"), None)


def libcuda_version(circumstances: RunContext) -> str | None:
    """Return the driver that libcuda belongs to, from the name of its file."""
    path = libcuda_path(circumstances)
    return version_in_name(path) if path else None


def version_in_name(path: str) -> str | None:
    """Read 580.65.06 from libcuda.so.580.65.06; libcuda.so.1 says nothing."""
    found = _IN_NAME.search(path)
    return found[1] if found else None


def _first_on_path(circumstances: RunContext, soname: str) -> str | None:
    found = circumstances.software.libraries
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
