"""What kind of system this is, and what it lets a process do."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cudakit.core.devices.circumstances.files import Files
from cudakit.units import Unavailable

# CAP_SYS_ADMIN (linux/capability.h).
_SYS_ADMIN = 21

SHARED_MEMORY = "/dev/shm"  # noqa: S108 nothing is written there

_UNSEEN = Unavailable("the files of this system are not looked at")

# What the control group of the first process says of the runtime that made it.
_MARKS = {
    "docker": "docker",
    "containerd": "containerd",
    "kubepods": "Kubernetes",
    "libpod": "podman",
    "lxc": "LXC",
}


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A file under /dev by which a process reaches the driver."""

    path: str
    mode: str  # as ls -l shows it
    error: str  # of opening it for reading and writing, as errno's name; "" where that works


@dataclass(frozen=True, slots=True)
class Limits:
    """What the system allows this process; None is no limit."""

    address_space_bytes: int | None
    locked_memory_bytes: int | None


def device_nodes(files: Files) -> Iterator[DeviceNode]:
    """Try the nodes of the NVIDIA driver (and of WSL's and Jetson's) by opening and closing them."""
    for name in files.names("/dev"):
        if name.startswith(("nvidia", "nvhost-gpu", "nvmap")) or name == "dxg":
            found = _node(files, f"/dev/{name}")
            if found:
                yield found


def _node(files: Files, path: str) -> DeviceNode | None:
    place = files.place(path) or Path(path)
    try:
        mode = place.stat().st_mode
    except OSError as error:
        return DeviceNode(path, "?", _symbol(error))
    if stat.S_ISDIR(mode):
        return None
    return DeviceNode(path, stat.filemode(mode), _open_error(place))


def _open_error(place: Path) -> str:
    try:
        os.close(os.open(place, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return _symbol(error)
    return ""


def _symbol(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))


def process_names(files: Files) -> frozenset[str]:
    """Return the names of the running processes of this PID namespace, each of at most 15 characters."""
    numbers = (name for name in files.names("/proc") if name.isdecimal())
    return frozenset(filter(None, (files.text(f"/proc/{number}/comm") for number in numbers)))


def kernel_log(files: Files) -> tuple[str, ...] | Unavailable:
    """Return the messages of the kernel since it started, as far as its buffer goes back."""
    place = files.place("/dev/kmsg")
    if place is None:
        return _UNSEEN
    try:
        log = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return Unavailable(f"the kernel's log cannot be read ({_symbol(error)} on /dev/kmsg)")
    try:
        return tuple(_messages(log))
    finally:
        os.close(log)


def _messages(log: int) -> Iterator[str]:
    # Each read gives one message; where the buffer was overwritten meanwhile it says EPIPE once.
    while True:
        try:
            message = os.read(log, 1 << 16)
        except BlockingIOError:
            return
        except BrokenPipeError:
            continue
        if not message:
            return
        for line in message.decode(errors="replace").splitlines():
            yield line.partition(";")[2] or line


def shared_memory_bytes(files: Files) -> int | Unavailable:
    """Return the size of the file system for memory that processes share."""
    place = files.place(SHARED_MEMORY)
    if place is None:
        return _UNSEEN
    try:
        found = os.statvfs(place)
    except OSError as error:
        return Unavailable(f"{SHARED_MEMORY}: {error.strerror}")
    return found.f_frsize * found.f_blocks


def limits() -> Limits:
    """Return the soft limits of this process."""
    return Limits(_limit(resource.RLIMIT_AS), _limit(resource.RLIMIT_MEMLOCK))


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def is_privileged(files: Files) -> bool:
    """Say whether this process has CAP_SYS_ADMIN, which the driver asks for before some operations."""
    for line in (files.text("/proc/self/status") or "").splitlines():
        label, _, value = line.partition(":")
        if label == "CapEff":
            with suppress(ValueError):
                return bool(int(value, 16) >> _SYS_ADMIN & 1)
    return False


def container(files: Files, environment: Mapping[str, str]) -> str:
    """Name the kind of container that this is, "" outside of one."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "Kubernetes"
    if files.exists("/run/.containerenv"):
        return "podman"
    if files.exists("/.dockerenv"):
        return "docker"
    groups = files.text("/proc/1/cgroup") or ""
    named = (name for mark, name in _MARKS.items() if mark in groups)
    return next(named, environment.get("container", ""))


def is_wsl(files: Files) -> bool:
    """Say whether this is Linux under Windows, where the GPU is reached through /dev/dxg."""
    return "microsoft" in (files.text("/proc/sys/kernel/osrelease") or "").lower()


def is_jetson(files: Files) -> bool:
    """Say whether this is a Tegra system, whose GPU is no PCI device."""
    model = files.text("/proc/device-tree/model") or ""
    return files.exists("/etc/nv_tegra_release") or "jetson" in model.lower()
