"""The host memory that this process can still allocate."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePosixPath

from cudakit.gpu.run_context.files import SYSTEM, Files


def available_host_memory(files: Files = SYSTEM) -> int | None:
    """Return the number of bytes that this process can still allocate; None if the system reports no limit.

    Returns the least of the available memory of the host (``MemAvailable``), of its control groups
    (cgroup v2, ``memory.max``) and, on the running system, of its address space (RLIMIT_AS).
    """
    limits_bytes = [*_system_limits(files), *(_address_space() if files == SYSTEM else ())]
    return min(limits_bytes, default=None)


def _system_limits(files: Files) -> Iterator[int]:
    """Yield the memory that the host and each control group have left."""
    with suppress(ValueError, IndexError):
        _, _, after_label = (files.text("/proc/meminfo") or "").partition("MemAvailable:")
        yield 1024 * int(after_label.split()[0])
    for group in _control_groups(files):
        with suppress(ValueError):  # the limit is "max", or the group has no limits
            limit_bytes = int(files.text(f"{group}/memory.max") or "")
            yield max(limit_bytes - int(files.text(f"{group}/memory.current") or ""), 0)


def _address_space() -> Iterator[int]:
    """Yield the address space that this process has left, if it is limited."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft_limit != resource.RLIM_INFINITY:
        with suppress(ValueError, IndexError):
            used_pages = int((SYSTEM.text("/proc/self/statm") or "").split()[0])
            yield max(soft_limit - used_pages * resource.getpagesize(), 0)


def _control_groups(files: Files) -> Iterator[PurePosixPath]:
    """Yield the control group of this process, and all groups that contain it (cgroup v2)."""
    root = PurePosixPath("/sys/fs/cgroup")
    for line in files.lines("/proc/self/cgroup"):
        hierarchy, _, name = line.partition("::")
        if hierarchy == "0" and name:
            group = root / name.lstrip("/")
            yield from (group, *group.parents[: len(group.parts) - len(root.parts)])
