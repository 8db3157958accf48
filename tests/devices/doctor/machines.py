"""Fake machines for the checks: a healthy one, and functions to change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from cudakit.devices.doctor.check import Finding, Status
from cudakit.devices.doctor.checks import find_check
from cudakit.gpu.api.facts import (
    Build,
    CudaView,
    DeviceFacts,
    DeviceNode,
    Distribution,
    Driver,
    Host,
    Library,
    Limits,
    NvmlView,
    RunContext,
    Software,
    Telemetry,
)
from cudakit.gpu.host import Files, read_driver, read_host
from cudakit.gpu.run_context import read_software
from cudakit.units import Unavailable

DRIVER = "580.159.04"
UUID = "GPU-00112233-4455-6677-8899-aabbccddee0"  # the UUID of a device without its last digit
VERSION = (
    f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release Build\n"
    "GCC version:  gcc version 13.3.0"
)
ADDRESS = "0000:0{}:00.0"
LIBCUDA = f"/usr/lib/x86_64-linux-gnu/libcuda.so.{DRIVER}"

OK, UNKNOWN, WARN, FAIL = Status

# The type of the fixture ``machine``.
Machine: TypeAlias = Callable[..., RunContext]

# The facts and telemetry of one GPU in NVML.
FIELDS: Mapping[str, Any] = {
    "name": "NVIDIA H200",
    "compute_capability": "9.0",
    "memory_total_bytes": 150_754_820_096,
    "mig_mode": False,
    "mig_mode_pending": False,
    "compute_mode": "default",
    "persistence_mode": True,
    "display_active": False,
    "fabric_state": "not supported",
    "ecc_sram_uncorrected_volatile": 0,
    "ecc_dram_uncorrected_volatile": 0,
    "ecc_dram_uncorrected_aggregate": 0,
    "remapped_rows_correctable": 0,
    "remapped_rows_uncorrectable": 0,
    "remapped_rows_pending": False,
    "remapped_rows_failed": False,
    "recovery_action": "none",
    "pcie_generation": 5,
    "pcie_generation_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "utilization_gpu_percent": 0,
    "clock_event_reasons": ("idle",),
    "temperature_gpu_c": 30,
    "power_limit_default_w": 700.0,
    "power_limit_enforced_w": 700.0,
}

# The files of a machine with a working driver.
SYSTEM: Mapping[str, str] = {
    "/proc/driver/nvidia/version": VERSION,
    "/proc/driver/nvidia/params": "ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 0",
    "/proc/sys/kernel/osrelease": "6.8.0-60-generic",
    "/proc/sys/vm/overcommit_memory": "0",
    "/etc/os-release": 'ID=ubuntu\nPRETTY_NAME="Ubuntu 24.04.3 LTS"',
}


def files(root: Path, contents: Mapping[str, str]) -> Files:
    """Write files under a directory."""
    for path, text in contents.items():
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    return Files(root)


def system(root: Path, **contents: str) -> Files:
    """Write the files of a machine with a working driver."""
    return files(root, SYSTEM | contents)


def on_bus(root: Path, address: str, *, driver: str = "nvidia", revision: str = "0xa1") -> None:
    """Write the files of an NVIDIA GPU on the PCI bus."""
    device = f"/sys/bus/pci/devices/{address}"
    files(root, {f"{device}/vendor": "0x10de", f"{device}/class": "0x030200"})
    files(root, {f"{device}/revision": revision})
    if driver:
        target = root / "sys/bus/pci/drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        (root / device.lstrip("/") / "driver").symlink_to(target)


def gpu(index: int = 0, **fields: Any) -> DeviceFacts:
    """Return a GPU as NVML describes it."""
    return DeviceFacts(index, f"{UUID}{index}", ADDRESS.format(index), {**FIELDS, **fields})


def instance(index: int, parent: int) -> DeviceFacts:
    """Return a MIG instance as NVML describes it."""
    uuid = f"MIG-00112233-4455-6677-8899-aabbccddee{index:02d}"
    return DeviceFacts(index, uuid, ADDRESS.format(parent), {"name": "MIG 1g.18gb"}, parent)


def nvml(*devices: DeviceFacts) -> NvmlView:
    return NvmlView(DRIVER, f"13.{DRIVER}", devices or (gpu(),), ())


def cuda(*devices: DeviceFacts, **changes: Any) -> CudaView:
    """Return CUDA's view with visible ``devices`` in the order of their CUDA indices."""
    visible = tuple(
        replace(device, index=index) for index, device in enumerate(devices or (gpu(),))
    )
    view = CudaView(
        driver_version=(13, 0),
        devices=visible,
        hidden=(),
        peer_access=(),
        peer_atomics=(),
        error=None,
        libcuda=LIBCUDA,
        visible_devices=None,
        device_order=None,
        order=tuple(str(device.uuid) for device in visible),
    )
    return replace(view, **changes)


def failed_cuda(code: int, **changes: Any) -> CudaView:
    """Return CUDA's view after a failed cuInit."""
    changes = {"devices": (), "order": (), **changes}
    return replace(cuda(), error=(code, f"CUDA_ERROR_{code}", "in the driver's words"), **changes)


def changed(context: RunContext, **changes: Any) -> RunContext:
    """Return a context with changed facts, named by field of the context or of one of its parts."""
    for part, kind in (("host", Host), ("driver", Driver), ("software", Software)):
        names = {field.name for field in fields(kind)} & changes.keys()
        inner = {name: changes.pop(name) for name in names}
        context = replace(context, **{part: replace(getattr(context, part), **inner)})
    return replace(context, **changes)


def context_of(files: Files, variables: Mapping[str, str]) -> RunContext:
    """Return the context that a tree of files describes."""
    host = read_host(files, variables)
    return RunContext(
        variables=variables,
        host=host,
        driver=read_driver(files, variables, host.kernel),
        software=read_software(files, variables, []),
    )


def healthy_machine(files: Files, **changes: Any) -> RunContext:
    """Return a machine with one GPU and without problems, with some changes."""
    well = changed(
        context_of(files, changes.get("variables", {})),
        device_nodes=tuple(
            DeviceNode(path, "crw-rw-rw-", "")
            for path in ("/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl")
        ),
        libraries=(Library("libcuda.so.1", "/usr/lib/libcuda.so.1", LIBCUDA, "system"),),
        processes=frozenset({"bash", "python3"}),
        kernel_log=("Linux version 6.8.0",),
        shared_memory_bytes=8 << 30,
        limits=Limits(address_space_bytes=None, locked_memory_bytes=None),
        nvml=nvml(),
        cuda=cuda(),
    )
    return changed(well, **changes)


def both_views(*devices: DeviceFacts, **telemetry: Any) -> dict[str, Any]:
    """Return the views of NVML and CUDA on the same GPUs, as changes of a context."""
    moving = Telemetry(0, telemetry)
    return {"nvml": nvml(*devices), "cuda": cuda(*devices), "telemetry": (moving,) * len(devices)}


def without_driver(root: Path, contents: Mapping[str, str], **changes: Any) -> RunContext:
    """Return a machine without a driver."""
    silent = replace(
        context_of(files(root, contents), changes.get("variables", {})),
        nvml=Unavailable("libnvidia-ml.so.1 (NVML) cannot be loaded"),
        cuda=Unavailable("the CUDA driver's library cannot be loaded: libcuda.so.1"),
    )
    return changed(silent, **changes)


def run_check(name: str, context: RunContext) -> Finding:
    """Run one check."""
    return find_check(name).run(context)


def installed(**versions: str) -> tuple[Distribution, ...]:
    """Return installed packages: ``installed(nvidia_ml_py="13.0")``."""
    return tuple(
        Distribution(name.replace("_", "-"), version, "/site") for name, version in versions.items()
    )


def built(framework: str, cuda: tuple[int, int | None] | None, version: str = "1.0") -> Build:
    return Build(framework, version, cuda)
