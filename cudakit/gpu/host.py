"""Read the files that describe a system: /proc, /dev, /sys, /etc."""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import TypeVar

from cudakit.gpu.api.facts import (
    MPS_DIRECTORY,
    SHARED_MEMORY,
    DeviceNode,
    Driver,
    Host,
    KernelModule,
    Limits,
    Mount,
    PciGpu,
)
from cudakit.units import Unavailable

_T = TypeVar("_T")

# At most 4 MiB are read, more than any of the files has: some files under /proc have no end.
_MAX_CHUNKS = 64
# /proc/sys refuses reads of 4 MiB and more (KMALLOC_MAX_SIZE).
_CHUNK_BYTES = 1 << 16
# File systems that keep their files in host memory.
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Files:
    """The files below ``root``: ``/`` is the running system, None a system without any files.

    Paths are absolute, as on the running system. An unreadable file is treated as absent.
    """

    root: Path | None

    def text(self, path: str) -> str | None:
        """Return the text of a file without newlines at its end, or None if it cannot be read."""
        location = self.locate(path)
        if location is None:
            return None
        try:
            with location.open("rb", buffering=0) as file:
                chunks = takewhile(bool, (file.read(_CHUNK_BYTES) for _ in range(_MAX_CHUNKS)))
                return b"".join(chunks).decode(errors="replace").rstrip("\n")
        except OSError:
            return None

    def lines(self, path: str) -> list[str]:
        """Return the lines of a file, or no lines if it is absent."""
        return (self.text(path) or "").splitlines()

    def names(self, directory: str) -> tuple[str, ...]:
        """Return the sorted names in a directory, or no names if it is absent."""
        location = self.locate(directory)
        with suppress(OSError):
            return tuple(sorted(os.listdir(location))) if location else ()
        return ()

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists."""
        location = self.locate(path)
        return location is not None and os.path.exists(location)

    def is_in_memory(self, device: int) -> bool:
        """Return whether the file system with a device number (stat(2), st_dev) keeps files in host memory.

        Source: proc_pid_mountinfo(5), whose third field is the device number of a mounted file system.
        """
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in self.lines("/proc/self/mountinfo"):
            mount_fields, _, file_system_fields = line.partition(" - ")
            if mount_fields.split(" ")[2:3] == [number]:
                return file_system_fields.split(" ")[0] in _MEMORY_FILE_SYSTEMS
        return False

    def resolve(self, path: str) -> str:
        """Return a path with symbolic links resolved, or the path itself if it does not exist."""
        location = self.locate(path)
        if location is None or not os.path.exists(location):
            return path
        resolved_path = os.path.realpath(location)
        root = os.path.realpath(str(self.root))
        return (
            "/" + os.path.relpath(resolved_path, root)
            if resolved_path.startswith(root)
            else resolved_path
        )

    def locate(self, path: str) -> Path | None:
        """Return the location of a file on this system; None for a system without files."""
        return None if self.root is None else self.root / path.lstrip("/")


SYSTEM = Files(Path("/"))
NO_FILES = Unavailable("the machine is simulated")


def attempt(read: Callable[[], _T]) -> _T | Unavailable:
    """Return the result of a function, or Unavailable if it raises, so that other facts are still read."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001 any error is reported instead of the fact
        return Unavailable(f"reading failed: {type(error).__name__}: {error}")


# --- Facts of the operating system, the container and the limits of this process -------------------

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


# --- The host memory that this process can still allocate ------------------------------------------


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


# --- Facts of the NVIDIA driver in system files: modules, device nodes, PCI bus, kernel log --------

# Matches "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build ..."
_MODULE_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_NVIDIA_VENDOR = "0x10de"  # PCI vendor id
# VGA and 3D controllers (PCI Code and ID Assignment, class 03).
_DISPLAY_CLASSES = ("0x0300", "0x0302")
_PCI_DEVICES = "/sys/bus/pci/devices"
# File systems that cuFile can read without host memory (GPUDirect Storage Release Notes, "Supported
# Filesystems").
_STORAGE_FILE_SYSTEMS = frozenset(
    {"ext4", "xfs", "lustre", "nfs4", "beegfs", "gpfs", "wekafs", "virtiofs"}
)


def read_driver(files: Files, variables: Mapping[str, str], kernel: str) -> Driver:
    """Read the facts of the driver; ``kernel`` is the release of the running kernel."""
    modules = (line.split(" ", 1)[0] for line in files.lines("/proc/modules"))
    module_dependencies = files.text(f"/lib/modules/{kernel}/modules.dep") or ""
    pipe_directory = variables.get("CUDA_MPS_PIPE_DIRECTORY", MPS_DIRECTORY)
    return Driver(
        module=_kernel_module(files),
        module_installed="/nvidia.ko" in module_dependencies,
        nouveau_loaded="nouveau" in modules,
        parameters=_parameters(files),
        device_nodes=tuple(device_nodes(files)),
        pci_gpus=tuple(_pci_gpus(files)),
        kernel_log=kernel_log(files),
        mps_pipes=files.exists(f"{pipe_directory}/control"),
        wsl_libcuda=files.exists("/usr/lib/wsl/lib/libcuda.so.1"),
        nvidia_fs=_nvidia_fs_version(files),
        mounts=tuple(_storage_mounts(files)),
        udev_database=files.exists("/run/udev/data"),
    )


def _nvidia_fs_version(files: Files) -> str:
    """Return the version in /proc/driver/nvidia-fs/version, such as "2.25"; empty without the driver."""
    match = re.search(r"\d+(?:\.\d+)*", files.text("/proc/driver/nvidia-fs/version") or "")
    return match[0] if match else ""


def _storage_mounts(files: Files) -> Iterator[Mount]:
    """Yield the mounted file systems whose type GPUDirect Storage supports."""
    for line in files.lines("/proc/mounts"):
        fields = line.split(" ")
        if len(fields) > 2 and fields[2] in _STORAGE_FILE_SYSTEMS:
            yield Mount(fields[1], fields[2])


def _kernel_module(files: Files) -> KernelModule | None:
    text = files.text("/proc/driver/nvidia/version") or ""
    match = _MODULE_VERSION.search(text)
    return KernelModule(match[1], "Open Kernel Module" in text) if match else None


def _parameters(files: Files) -> dict[str, str] | None:
    text = files.text("/proc/driver/nvidia/params")
    if text is None:
        return None
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


def device_nodes(files: Files) -> Iterator[DeviceNode]:
    """Yield the device nodes of the NVIDIA driver, WSL and Jetson, with the result of opening each."""
    for name in files.names("/dev"):
        if name.startswith(("nvidia", "nvhost-gpu", "nvmap")) or name == "dxg":
            path = f"/dev/{name}"
            node = _device_node(path, files.locate(path) or Path(path))
            if node:
                yield node


def _device_node(path: str, location: Path) -> DeviceNode | None:
    try:
        mode = location.stat().st_mode
    except OSError as error:
        return DeviceNode(path, "?", _errno_name(error))
    if stat.S_ISDIR(mode):
        return None
    return DeviceNode(path, stat.filemode(mode), _open_error(location))


def _open_error(location: Path) -> str:
    try:
        os.close(os.open(location, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return _errno_name(error)
    return ""


def _errno_name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))


def _pci_gpus(files: Files) -> Iterator[PciGpu]:
    """Yield the NVIDIA GPUs on the PCI bus in order of address. sysfs lists GPUs without a driver, too."""
    for address in files.names(_PCI_DEVICES):
        directory = f"{_PCI_DEVICES}/{address}"
        class_code = files.text(f"{directory}/class") or ""
        if files.text(f"{directory}/vendor") == _NVIDIA_VENDOR and class_code.startswith(
            _DISPLAY_CLASSES
        ):
            driver_path = (
                files.resolve(f"{directory}/driver") if files.exists(f"{directory}/driver") else ""
            )
            is_gone = files.text(f"{directory}/revision") == "0xff"
            yield PciGpu(address, driver_path.rpartition("/")[2], is_gone)


def kernel_log(files: Files) -> tuple[str, ...] | Unavailable:
    """Return the messages in the kernel log buffer."""
    location = files.locate("/dev/kmsg")
    if location is None:
        return NO_FILES
    try:
        log_descriptor = os.open(location, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return Unavailable(f"the kernel log cannot be read ({_errno_name(error)} on /dev/kmsg)")
    try:
        return tuple(_messages(log_descriptor))
    finally:
        os.close(log_descriptor)


def _messages(log_descriptor: int) -> Iterator[str]:
    # Each read returns one message. EPIPE means that the next message was overwritten: continue with the one
    # after it.
    while True:
        try:
            message = os.read(log_descriptor, 1 << 16)
        except BlockingIOError:
            return
        except BrokenPipeError:
            continue
        if not message:
            return
        for line in message.decode(errors="replace").splitlines():
            yield line.partition(";")[2] or line
