"""Checks of containers, WSL, MPS, profilers and limits (CK016, CK019, CK025, CK026, CK034 to CK037)."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from cudakit.devices.doctor.check import (
    Finding,
    NotCheckable,
    count_of,
    fail,
    ok,
    require_fact,
    warn,
)
from cudakit.devices.doctor.driver import require_driver
from cudakit.devices.doctor.variables import apply_rules, rules_of
from cudakit.gpu.api.facts import MPS_DIRECTORY, SHARED_MEMORY, RunContext
from cudakit.units import Unavailable, format_bytes

_DEVICES_VARIABLE = "NVIDIA_VISIBLE_DEVICES"
_CAPABILITIES_VARIABLE = "NVIDIA_DRIVER_CAPABILITIES"
_PIPES_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
_WSL_LIBRARIES = "/usr/lib/wsl/lib"


def container(context: RunContext) -> Finding:
    """Two variables tell NVIDIA's container runtime which GPUs and driver libraries a container gets.

    NVIDIA_VISIBLE_DEVICES is all, none (driver but no GPU), void or empty (nothing), or a list.
    NVIDIA_DRIVER_CAPABILITIES must contain compute (CUDA) and utility (NVML), which is the default. Both
    are read when the container starts; a later change has no effect. With CDI the runtime itself sets
    NVIDIA_VISIBLE_DEVICES=void. Source: NVIDIA Container Toolkit, Specialized Configurations with Docker.
    """
    kind = context.host.container
    names = (_DEVICES_VARIABLE, _CAPABILITIES_VARIABLE)
    settings = {name: context.variables[name] for name in names if name in context.variables}
    if not kind and not settings:
        return ok("not in a container")
    evidence = {"container": kind or "not recognized", **settings}
    if context.cuda_devices and not isinstance(context.nvml, Unavailable):
        return ok(f"CUDA and NVML work in this container ({kind or 'of unknown kind'})", evidence)
    # If no capabilities are set, the container runtime uses utility and compute.
    capabilities = settings.get(_CAPABILITIES_VARIABLE) or "all"
    granted = capabilities.split(",")
    missing = [name for name in ("compute", "utility") if not {name, "all"} & {*granted}]
    if missing:
        return fail(
            f"{_CAPABILITIES_VARIABLE}={capabilities} does not contain {' and '.join(missing)}",
            evidence,
            f"start the container with -e {_CAPABILITIES_VARIABLE}=compute,utility",
        )
    if settings.get(_DEVICES_VARIABLE) in ("none", "void", ""):
        devices = settings[_DEVICES_VARIABLE] or "(empty)"
        summary = f"{_DEVICES_VARIABLE}={devices} gives the container no GPU"
        return fail(summary, evidence, "docker run --gpus all ...")
    return ok("no variable excludes the GPU from the container", evidence)


def wsl_libraries(context: RunContext) -> Finding:
    """WSL uses the Windows driver; its libcuda is in /usr/lib/wsl/lib.

    If a Linux driver is installed inside WSL, its libcuda is loaded instead and cuInit fails. In WSL, NVML
    reports fewer fields, and not the memory of each process. Source: CUDA on WSL User Guide.
    """
    if not context.host.is_wsl:
        return ok("not in WSL")
    if context.simulated:
        raise NotCheckable("the machine is simulated")
    libraries = require_fact(context.software.libraries)
    copies = [library for library in libraries if library.soname == "libcuda.so.1"]
    evidence = {"libcuda.so.1": ", ".join(library.path for library in copies) or "not found"}
    if any("/wsl/" not in library.real for library in copies):
        return fail(
            "a Linux driver inside WSL hides the libcuda of the Windows driver",
            evidence,
            "sudo apt purge 'libnvidia-*' 'nvidia-driver-*', then run in PowerShell: wsl --shutdown",
        )
    if not context.driver.wsl_libcuda:
        return fail(
            f"{_WSL_LIBRARIES} contains no libcuda: Windows has no NVIDIA driver for WSL",
            evidence,
            "install the NVIDIA driver in Windows, then run in PowerShell: wsl --update; wsl --shutdown",
        )
    return ok("WSL uses the Windows driver", evidence)


def mps(context: RunContext) -> Finding:
    """With MPS, programs use the GPU through a daemon; a directory of pipes connects them.

    CUDA_MPS_PIPE_DIRECTORY, by default /tmp/nvidia-mps, contains the file "control" while the daemon runs.
    A leftover directory, one of another user, or a container that does not share the directory causes
    805 (CUDA_ERROR_MPS_CONNECTION_FAILED). Source: CUDA Multi-Process Service, Environment Variables.
    """
    directory = context.variables.get(_PIPES_VARIABLE, MPS_DIRECTORY)
    daemon_runs = (
        not isinstance(context.processes, Unavailable) and "nvidia-cuda-mps" in context.processes
    )
    pipes = context.driver.mps_pipes
    evidence = {
        "directory": directory,
        "control pipe": "present" if pipes else "not found",
        "nvidia-cuda-mps-control": "running" if daemon_runs else "not found",
    }
    if context.cuda_error is not None and 805 <= context.cuda_error <= 809:
        return fail(
            f"CUDA cannot connect to the MPS daemon ({context.cuda_error})",
            evidence,
            "nvidia-cuda-mps-control -d",
            f"or stop using MPS: unset {_PIPES_VARIABLE}; rm -r {directory}",
        )
    if _PIPES_VARIABLE in context.variables and not pipes:
        return warn(
            f"{_PIPES_VARIABLE}={directory}, but no MPS daemon runs with this directory",
            evidence,
            f"unset {_PIPES_VARIABLE}, or start the daemon: nvidia-cuda-mps-control -d",
        )
    if daemon_runs or pipes:
        return ok(f"an MPS daemon runs with {directory}", evidence)
    return ok("MPS is not in use")


# --- profilers -------------------------------------------------------------------------------------

_DCGM_CONFLICT = "DCGM uses the performance counters while it collects profiling metrics"
_NCU_CONFLICT = "Nsight Compute uses the performance counters"
# Profiling tools, by process name. The kernel cuts names of processes at 15 characters.
_PROFILING_TOOLS = {
    "nsys": "Nsight Systems uses CUPTI in the programs that it starts",
    "ncu": _NCU_CONFLICT,
    "nv-nsight-cu-cl": _NCU_CONFLICT,
    "nv-hostengine": _DCGM_CONFLICT,
    "dcgm-exporter": _DCGM_CONFLICT,
    "compute-sanitiz": "compute-sanitizer attaches to the driver in the programs that it starts",
    "cuda-gdb": "cuda-gdb stops the GPU that it debugs",
    "dynolog": "dynolog starts PyTorch's profiler in running programs",
}


def cupti_users(context: RunContext) -> Iterator[Finding]:
    """Only one tool can use CUPTI: torch.profiler, nsys, ncu, compute-sanitizer and cuda-gdb conflict.

    CUDA_INJECTION64_PATH makes the driver load a tool into every CUDA program; NVTX_INJECTION64_PATH does
    the same for NVTX. A second tool then fails with CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39).
    DCGM (nv-hostengine) also uses the performance counters: profilers report "hardware busy" until
    dcgmi profile --pause. The check does not see processes of other containers.
    """
    yield from apply_rules(rules_of("CK025"), context.variables)
    processes = frozenset() if isinstance(context.processes, Unavailable) else context.processes
    for name in sorted(processes & _PROFILING_TOOLS.keys()):
        fix = (
            "dcgmi profile --pause while you profile, then --resume"
            if name in ("nv-hostengine", "dcgm-exporter")
            else f"end {name} before you profile"
        )
        yield warn(f"{name} is running: {_PROFILING_TOOLS[name]}", {name: "running"}, fix)
    yield ok("no other tool uses CUPTI")


def performance_counters(context: RunContext) -> Finding:
    """By default only administrators can read performance counters (ncu, CUPTI metrics).

    Timelines of kernels and copies need no privilege. Reading counters fails with ERR_NVGPUCTRPERM unless
    the process has CAP_SYS_ADMIN or the driver was loaded with NVreg_RestrictProfilingToAdminUsers=0,
    which /proc/driver/nvidia/params shows as RmProfilingAdminOnly: 0.
    """
    if context.driver.parameters is None:
        require_driver(context)
        raise NotCheckable("/proc/driver/nvidia/params cannot be read here")
    value = context.driver.parameters.get("RmProfilingAdminOnly")
    evidence = {
        "RmProfilingAdminOnly": value or "?",
        "CAP_SYS_ADMIN": "yes" if context.privileged else "no",
    }
    if value == "0":
        return ok("every user can read performance counters", evidence)
    if context.privileged:
        return ok("this process can read performance counters (CAP_SYS_ADMIN)", evidence)
    return warn(
        "only administrators can read performance counters (timelines need no privilege)",
        evidence,
        "run ncu with sudo; or allow all users: echo 'options nvidia "
        "NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvidia-profiling.conf, "
        "update the initramfs and reboot",
    )


# --- memory ----------------------------------------------------------------------------------------

# Minimum size of /dev/shm. Docker's default is 64 MiB; the batches of a data loader can take hundreds of MiB.
_MIN_SHARED_BYTES = 1 << 30
_MAX_MOUNTS = 4  # Number of file systems that the evidence names.
_CONTAINER_SHM_FIXES: tuple[str, ...] = (
    "docker run --ipc=host ...  (or --shm-size=8g)",
    "in Kubernetes: mount an emptyDir with medium: Memory at /dev/shm",
)
_HOST_SHM_FIXES: tuple[str, ...] = ("sudo mount -o remount,size=8G /dev/shm",)
# Minimum of address space. CUDA reserves address space for all memory of host and devices, and uses little.
_MIN_ADDRESS_SPACE = 1 << 40
# Minimum of lockable memory with InfiniBand. Buffers that are registered with a card are locked in memory.
_MIN_LOCKED_BYTES = 1 << 30


def shared_memory(context: RunContext) -> Finding:
    """Data loaders and NCCL pass data between processes through /dev/shm.

    Docker's default is 64 MiB: PyTorch's workers then fail with "Bus error" or "insufficient shared memory
    (shm)"; NCCL fails with "unhandled system error" or uses slower sockets.
    """
    size_bytes = require_fact(context.host.shared_memory_bytes)
    size = format_bytes(size_bytes)
    evidence = {SHARED_MEMORY: size}
    if size_bytes >= _MIN_SHARED_BYTES:
        return ok(f"{SHARED_MEMORY} has {size}", evidence)
    fixes = _CONTAINER_SHM_FIXES if context.host.container else _HOST_SHM_FIXES
    summary = f"{SHARED_MEMORY} has only {size}: data loader workers may crash"
    return warn(summary, evidence, *fixes)


def memory_limits(context: RunContext) -> Iterator[Finding]:
    """CUDA reserves far more address space than it uses; if that fails, CUDA fails with error 2.

    A limit on address space (ulimit -v, as batch systems set it) and vm.overcommit_memory=2 can prevent this
    reservation. With InfiniBand, NCCL locks memory for the card: a low ulimit -l makes it slower or fail.
    Without InfiniBand that limit does not matter.
    """
    limits = require_fact(context.limits)
    address_limit, lock_limit = limits.address_space_bytes, limits.locked_memory_bytes
    overcommit_mode, cards = context.host.overcommit_memory, context.host.infiniband
    evidence = {
        "address space (ulimit -v)": _limit_text(address_limit),
        "locked memory (ulimit -l)": _limit_text(lock_limit),
        "vm.overcommit_memory": overcommit_mode or "?",
    }
    if address_limit is not None and address_limit < _MIN_ADDRESS_SPACE:
        yield warn(
            f"the address space is limited to {_limit_text(address_limit)}: CUDA may fail with "
            "out of memory (error 2)",
            evidence,
            "ulimit -v unlimited, or ask the batch system for more memory",
        )
    if overcommit_mode == "2":
        summary = "vm.overcommit_memory is 2: CUDA may fail with out of memory (error 2)"
        yield warn(summary, evidence, "sudo sysctl vm.overcommit_memory=0")
    if cards and lock_limit is not None and lock_limit < _MIN_LOCKED_BYTES:
        yield warn(
            f"only {_limit_text(lock_limit)} of memory can be locked; InfiniBand "
            f"({', '.join(cards)}) needs more",
            evidence,
            "ulimit -l unlimited (docker run --ulimit memlock=-1)",
        )
    yield ok("no limit prevents CUDA from reserving memory", evidence)


def _limit_text(limit: int | None) -> str:
    return "unlimited" if limit is None else format_bytes(limit)


# --- cudakit --------------------------------------------------------------------------------

# The extensions that setup.py builds, each with the effect if it is missing.
_EFFECTS_OF_MISSING = {
    "memory/load/_pickled": "snapshots are read by the Python reader, about 10 times slower",
    "allocator/_fast": "the allocator's calls run in Python, several times slower",
    "arrays/plugs/_buffers": "buffers of cuda.core are allocated through Python, which is slower",
    "arrays/plugs/_torch_pool": "cudakit.torch_pool is not available",
    "record/_frames": "races have no Python call stacks",
    "record/_recorder": "cudakit run --sanitize is not available",
}


def compiled_extensions(context: RunContext) -> Finding:
    """Without its optional C extensions cudakit is slower, or lacks features.

    pip builds the extensions if it finds a C compiler and the headers of Python; otherwise it installs
    cudakit without them, silently. Snapshots and the allocator then use a slower Python implementation.
    """
    missing = {
        name: effect
        for name, effect in _EFFECTS_OF_MISSING.items()
        if name in context.software.missing_extensions
    }
    if not missing:
        return ok("cudakit's compiled extensions are installed")
    return warn(
        f"cudakit was installed without {count_of(len(missing), 'compiled extension')}",
        missing,
        "install a C compiler and Python's headers (apt install gcc python3-dev), then: "
        "pip install --force-reinstall --no-cache-dir --no-binary cudakit cudakit",
    )


def gpudirect_storage(context: RunContext) -> Finding:
    """GPUDirect Storage reads files into GPU memory if nvidia-fs is loaded and the file system supports it.

    Otherwise cuFile reads through host memory (compatibility mode): programs work, but no faster than with
    read and a copy. cudakit bench gds measures both. Without udev's database, as in most containers, cuFile
    refuses files on block devices, such as NVMe drives. Source: GPUDirect Storage Installation and
    Troubleshooting Guide.
    """
    if context.simulated:
        raise NotCheckable("the machine is simulated")
    nvidia_fs_version, mounts = context.driver.nvidia_fs, context.driver.mounts
    mounts_text = ", ".join(
        f"{mount.directory} ({mount.file_system})" for mount in mounts[:_MAX_MOUNTS]
    )
    evidence = {
        "nvidia-fs": nvidia_fs_version or "not loaded",
        "supported file systems": mounts_text or "none is mounted",
        "udev's database": "/run/udev/data" if context.driver.udev_database else "missing",
    }
    if not nvidia_fs_version:
        summary = (
            "GPUDirect Storage is not set up; cuFile reads through host memory"
            if context.driver.udev_database
            else "GPUDirect Storage is not set up and udev's database /run/udev is missing; only programs "
            "that use cuFile need them"
        )
        return ok(summary, evidence)
    if not context.driver.udev_database:
        return warn(
            f"nvidia-fs {nvidia_fs_version} is loaded, but cuFile refuses files on block devices, such as "
            "NVMe drives, because udev's database /run/udev is missing",
            evidence,
            "give the container the database of the host: docker run -v /run/udev:/run/udev:ro",
        )
    if not mounts:
        return warn(
            f"nvidia-fs {nvidia_fs_version} is loaded, but no mounted file system supports GPUDirect Storage",
            evidence,
            "use a directory on ext4 or xfs on a local NVMe drive, or on a parallel file system",
        )
    return ok(f"nvidia-fs {nvidia_fs_version} is loaded, for {mounts_text}", evidence)


# --- Xid errors: the table of their meanings, and the check of the kernel log (CK033) --------------

CATALOG_URL = "https://docs.nvidia.com/deploy/xid-errors/"

# A line of the kernel log: "NVRM: Xid (PCI:0000:65:00): 79, pid=1234, name=python, GPU has fallen off the
# bus."
_XID_PATTERN = re.compile(r"Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


@dataclass(frozen=True, slots=True)
class Xid:
    """A kind of error that the driver writes to the kernel log."""

    origin: str  # usual cause, by NVIDIA's catalog: "program" or "hardware"; "notice" if it needs no action
    meaning: str
    action: str  # recommended action


@cache
def known_xids() -> Mapping[int, Xid]:
    """Return the table xids.csv by number.

    Sources: Xid Errors, the catalog; NVIDIA/open-gpu-kernel-modules, nverror.h.
    """
    table = files("cudakit.devices.doctor").joinpath("xids.csv").read_text("utf-8")
    return {
        int(number): Xid(origin, meaning, action or _USUAL_ACTIONS[origin])
        for number, origin, meaning, action in list(csv.reader(table.splitlines()))[1:]
    }


_USUAL_ACTIONS = {
    "program": "run the program under compute-sanitizer: it prints the kernel and the source line",
    "hardware": "reset the GPU or reboot; if the error returns, test the GPU (dcgmi diag -r 3)",
    "notice": "no action is needed unless the Xid appears often",
}


def xids(context: RunContext) -> Finding:
    """The driver writes its errors to the kernel log as numbered Xid messages.

    Xids 13, 31, 43 and 45 mostly come from errors of programs. 48, 63, 64, 92, 94 and 95 concern memory, 74
    NVLink, 79 a GPU that has fallen off the bus, 119 and 120 the GPU's system processor. The log starts at
    boot or at the oldest message in its buffer; on most systems reading it needs privilege.
    `cudakit explain NUMBER` explains the common Xids. Source, with all Xids:
    https://docs.nvidia.com/deploy/xid-errors/
    """
    log_lines = require_fact(context.driver.kernel_log)
    matches = (_XID_PATTERN.search(line) for line in log_lines if "Xid" in line)
    counts = Counter((match[1], int(match[2])) for match in matches if match)
    if not counts:
        return ok("no Xid errors in the kernel log")
    table = known_xids()
    numbers = sorted({number for _, number in counts})
    known = {number: table[number] for number in numbers if number in table}
    evidence = {
        f"Xid {number} on {address}": f"{count}×, "
        f"{known[number].meaning if number in known else 'not in the table'}"
        for (address, number), count in sorted(counts.items())
    }
    numbers_text = ", ".join(map(str, numbers))
    origins = {known[number].origin if number in known else "notice" for number in numbers}
    if origins == {"program"}:
        summary = f"programs caused GPU errors since boot (Xid {numbers_text})"
        return warn(summary, evidence, _USUAL_ACTIONS["program"])
    make_finding = fail if "hardware" in origins else warn
    return make_finding(
        f"the driver reported GPU errors since boot (Xid {numbers_text})",
        evidence,
        *(f"Xid {number}: {xid.action}" for number, xid in known.items()),
        f"NVIDIA's catalog: {CATALOG_URL}",
    )
