"""Facts of the NVIDIA driver in system files: modules, device nodes, PCI bus, kernel log."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from cudakit.gpu.api.run_context import (
    MPS_DIRECTORY,
    DeviceNode,
    Driver,
    KernelModule,
    Mount,
    PciGpu,
)
from cudakit.gpu.run_context.files import NO_FILES, Files
from cudakit.units import Unavailable

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
