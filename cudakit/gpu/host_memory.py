"""The host memory that this process can still allocate."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def available_host_memory() -> int | None:
    """Return the number of bytes that this process can still allocate; None if the system reports no limit.

    Returns the least of the available memory of the host (``MemAvailable``), of its control groups
    (cgroup v2, ``memory.max``) and of its address space (RLIMIT_AS).
    """
    return min(_limits(), default=None)


def _limits() -> Iterator[int]:
    with suppress(OSError, ValueError, IndexError):
        _, _, after_label = Path("/proc/meminfo").read_text("ascii").partition("MemAvailable:")
        yield 1024 * int(after_label.split()[0])
    for group in _control_groups():
        with suppress(OSError, ValueError):  # the limit is "max", or the group has no limits
            group_limit = int((group / "memory.max").read_text("ascii"))
            yield max(group_limit - int((group / "memory.current").read_text("ascii")), 0)
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft_limit != resource.RLIM_INFINITY:
        with suppress(OSError, ValueError):
            used_pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
            yield max(soft_limit - used_pages * resource.getpagesize(), 0)


def _control_groups() -> Iterator[Path]:
    """Yield the control group of this process, and all groups that contain it (cgroup v2)."""
    root = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text("utf-8").splitlines():
            hierarchy, _, name = line.split(":", 2)
            if hierarchy == "0":
                group = root / name.lstrip("/")
                yield from (group, *group.parents[: len(group.parts) - len(root.parts)])
