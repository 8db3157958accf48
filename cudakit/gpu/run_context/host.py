"""Facts of the operating system, the container and the limits of this process."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Mapping
from contextlib import suppress

from cudakit.gpu.api.run_context import SHARED_MEMORY, Host, Limits
from cudakit.gpu.run_context.files import NO_FILES, Files
from cudakit.gpu.run_context.host_memory import available_host_memory
from cudakit.units import Unavailable

# CAP_SYS_ADMIN (linux/capability.h).
_SYS_ADMIN_BIT = 21
# The last byte of this EFI variable is 1 if kernel modules must be signed.
_SECURE_BOOT_PATH = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
# Container runtimes, by a text that each of them adds to /proc/1/cgroup.
_RUNTIME_BY_TEXT = {
    "docker": "docker",
    "containerd": "containerd",
    "kubepods": "Kubernetes",
    "libpod": "podman",
    "lxc": "LXC",
}


def read_host(files: Files, variables: Mapping[str, str]) -> Host:
    """Read the facts of the host. Without files, only the container is known: from the environment."""
    release_fields = dict(
        line.split("=", 1) for line in files.lines("/etc/os-release") if "=" in line
    )
    kernel = files.text("/proc/sys/kernel/osrelease") or ""
    device_model = files.text("/proc/device-tree/model") or ""
    return Host(
        cpu=_cpu(files),
        system=platform.system() if files.root else "",
        kernel=kernel,
        distribution=release_fields.get("PRETTY_NAME", "").strip('"'),
        distribution_id=release_fields.get("ID", "").strip('"'),
        container=_container(files, variables),
        is_wsl="microsoft" in kernel.lower(),
        is_jetson=files.exists("/etc/nv_tegra_release") or "jetson" in device_model.lower(),
        secure_boot=(files.text(_SECURE_BOOT_PATH) or "").endswith("\x01"),
        overcommit_memory=files.text("/proc/sys/vm/overcommit_memory") or "",
        infiniband=files.names("/sys/class/infiniband"),
        available_bytes=_available_bytes(files),
        shared_memory_bytes=_shared_memory_bytes(files),
    )


def _cpu(files: Files) -> str:
    lines = files.lines("/proc/cpuinfo")
    model_names = (
        line.partition(":")[2].strip() for line in lines if line.startswith("model name")
    )
    return next(model_names, platform.processor() if files.root else "")


def _container(files: Files, variables: Mapping[str, str]) -> str:
    """Return the container runtime, "" outside of a container."""
    if "KUBERNETES_SERVICE_HOST" in variables:
        return "Kubernetes"
    if files.exists("/run/.containerenv"):
        return "podman"
    if files.exists("/.dockerenv"):
        return "docker"
    control_groups = files.text("/proc/1/cgroup") or ""
    runtimes = (name for text, name in _RUNTIME_BY_TEXT.items() if text in control_groups)
    return next(runtimes, variables.get("container", ""))


def _available_bytes(files: Files) -> int | Unavailable:
    available_bytes = available_host_memory(files)
    return (
        Unavailable("/proc/meminfo has no MemAvailable")
        if available_bytes is None
        else available_bytes
    )


def _shared_memory_bytes(files: Files) -> int | Unavailable:
    """Return the size of the file system for POSIX shared memory."""
    location = files.locate(SHARED_MEMORY)
    if location is None:
        return NO_FILES
    try:
        stats = os.statvfs(location)
    except OSError as error:
        return Unavailable(f"{SHARED_MEMORY}: {error.strerror}")
    return stats.f_frsize * stats.f_blocks


def read_limits() -> Limits:
    """Return the soft limits of this process."""
    return Limits(_soft_limit(resource.RLIMIT_AS), _soft_limit(resource.RLIMIT_MEMLOCK))


def _soft_limit(limit_kind: int) -> int | None:
    soft_limit, _ = resource.getrlimit(limit_kind)
    return None if soft_limit == resource.RLIM_INFINITY else soft_limit


def is_privileged(files: Files) -> bool:
    """Return whether this process has CAP_SYS_ADMIN, which the driver requires for some operations."""
    for line in files.lines("/proc/self/status"):
        label, _, value = line.partition(":")
        if label == "CapEff":
            with suppress(ValueError):
                return bool(int(value, 16) >> _SYS_ADMIN_BIT & 1)
    return False


def process_names(files: Files) -> frozenset[str]:
    """Return the names of the running processes of this PID namespace, each of at most 15 characters."""
    pids = (name for name in files.names("/proc") if name.isdecimal())
    return frozenset(filter(None, (files.text(f"/proc/{pid}/comm") for pid in pids)))
