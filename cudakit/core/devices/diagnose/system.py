"""Checks of container, WSL, MPS, limits and profilers (CK016, CK019, CK025, CK026, CK034 to CK036)."""

from __future__ import annotations

from cudakit.core.devices.diagnose.check import (
    Finding,
    NotCheckable,
    combine,
    fail,
    ok,
    require,
    warn,
)
from cudakit.core.devices.diagnose.driver import require_driver
from cudakit.core.devices.diagnose.variables import VariableRule, matches
from cudakit.gpu.api.run_context import MPS_DIRECTORY, SHARED_MEMORY, RunContext
from cudakit.units import Unavailable, format_bytes

_DEVICES = "NVIDIA_VISIBLE_DEVICES"
_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_WSL_LIBRARIES = "/usr/lib/wsl/lib"


def container(c: RunContext) -> Finding:
    """NVIDIA's container runtime reads which GPUs and which parts of the driver a container gets.

    NVIDIA_VISIBLE_DEVICES: all, none (driver but no GPU), void or empty (nothing), or a list.
    NVIDIA_DRIVER_CAPABILITIES must hold compute (CUDA) and utility (NVML), which is the default;
    graphics or video alone leave them out. Both are read when the container starts, so changing them
    inside has no effect. With CDI the runtime sets NVIDIA_VISIBLE_DEVICES=void itself. NVIDIA Container
    Toolkit, Docker Specialized Configurations.
    """
    kind = c.host.container
    given = {name: c.variables[name] for name in (_DEVICES, _CAPABILITIES) if name in c.variables}
    if not kind and not given:
        return ok("this is no container")
    evidence = {"container": kind or "not recognised", **given}
    if c.cuda_devices and not isinstance(c.nvml, Unavailable):
        return ok(
            f"the container ({kind or 'of unknown kind'}) has what CUDA and NVML need", evidence
        )
    parts = _missing_capabilities(given.get(_CAPABILITIES))
    if parts:
        return fail(
            f"{_CAPABILITIES}={given[_CAPABILITIES]} leaves out {' and '.join(parts)}",
            evidence,
            f"start the container with -e {_CAPABILITIES}=compute,utility",
        )
    if given.get(_DEVICES) in ("none", "void", ""):
        return fail(
            f"{_DEVICES}={given[_DEVICES] or '(empty)'} gives the container no GPU",
            evidence,
            "docker run --gpus all ...",
        )
    return ok("no variable keeps the GPU out of the container", evidence)


def _missing_capabilities(capabilities: str | None) -> list[str]:
    # Not set and empty mean the default, utility and compute.
    if not capabilities or "all" in capabilities.split(","):
        return []
    given = capabilities.split(",")
    return [part for part in ("compute", "utility") if part not in given]


def wsl_libraries(c: RunContext) -> Finding:
    """In WSL the driver is that of Windows, and libcuda comes from /usr/lib/wsl/lib.

    A Linux driver installed inside WSL puts its own libcuda before that one, and cuInit fails. In WSL
    NVML tells less: nothing of processes, and fewer fields. CUDA on WSL User Guide.
    """
    if not c.host.is_wsl:
        return ok("this is not WSL")
    copies = [one for one in require(c.software.libraries) if one.soname == "libcuda.so.1"]
    foreign = [
        one.path
        for one in copies
        if not one.real.startswith(_WSL_LIBRARIES) and "/wsl/" not in one.real
    ]
    evidence = {"libcuda.so.1": ", ".join(one.path for one in copies) or "not found"}
    if foreign:
        return fail(
            "a Linux driver is installed inside WSL, and its libcuda hides that of Windows",
            evidence,
            "sudo apt purge 'libnvidia-*' 'nvidia-driver-*', then in PowerShell: wsl --shutdown",
        )
    if not c.driver.wsl_libcuda:
        return fail(
            f"{_WSL_LIBRARIES} has no libcuda: Windows has no NVIDIA driver for WSL",
            evidence,
            "install the NVIDIA driver in Windows, then in PowerShell: wsl --update; wsl --shutdown",
        )
    return ok("WSL has the driver of Windows, and no other", evidence)


def mps(c: RunContext) -> Finding:
    """With MPS, programs reach the GPU through a daemon, found by the directory of its pipes.

    CUDA_MPS_PIPE_DIRECTORY, by default /tmp/nvidia-mps, holds the file "control" while the daemon runs.
    A directory that is left over or belongs to another user, or a container that does not share it,
    gives 805 (CUDA_ERROR_MPS_CONNECTION_FAILED). CUDA Multi-Process Service, Environment Variables.
    """
    directory = c.variables.get(_PIPES, MPS_DIRECTORY)
    runs = not isinstance(c.processes, Unavailable) and "nvidia-cuda-mps" in c.processes
    pipes = c.driver.mps_pipes
    evidence = {
        "directory": directory,
        "pipes": "there" if pipes else "none",
        "nvidia-cuda-mps-control": "runs" if runs else "not seen",
    }
    if c.cuda_error is not None and 805 <= c.cuda_error <= 809:
        return fail(
            f"CUDA cannot reach the MPS daemon ({c.cuda_error})",
            evidence,
            "nvidia-cuda-mps-control -d",
            f"or do without: unset {_PIPES}; rm -r {directory}",
        )
    if _PIPES in c.variables and not pipes:
        return warn(
            f"{_PIPES}={directory} has no pipes: no MPS daemon serves it",
            evidence,
            f"unset {_PIPES}, or start the daemon: nvidia-cuda-mps-control -d",
        )
    if runs or pipes:
        return ok(f"MPS serves {directory}", evidence)
    return ok("MPS is not in use")


# --- profilers -------------------------------------------------------------------------------------

INJECTION_RULES = tuple(
    VariableRule(name, bool, "{name} puts another tool into every CUDA program")
    for name in ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "CUDA_INJECTION32_PATH")
)
# Tools by the name of their process, cut at 15 characters by the kernel, and what each holds.
_HOLDERS = {
    "nsys": "Nsight Systems subscribes to CUPTI in what it starts",
    "ncu": "Nsight Compute holds the performance counters",
    "nv-nsight-cu-cl": "Nsight Compute holds the performance counters",
    "nv-hostengine": "DCGM holds the performance counters while it watches profiling metrics",
    "dcgm-exporter": "DCGM holds the performance counters while it watches profiling metrics",
    "compute-sanitiz": "compute-sanitizer subscribes to the driver in what it starts",
    "cuda-gdb": "cuda-gdb stops the GPU that it debugs",
    "dynolog": "dynolog starts PyTorch's profiler from outside",
}


def cupti_holders(c: RunContext) -> Finding:
    """CUPTI serves one tool at a time: torch.profiler, nsys, ncu, compute-sanitizer and cuda-gdb conflict.

    CUDA_INJECTION64_PATH makes the driver load a tool into every CUDA program, NVTX_INJECTION64_PATH
    sends its ranges to one. A second tool then fails with CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED
    (39). DCGM (nv-hostengine) shares the performance counters: profilers of counters say "hardware
    busy" until dcgmi profile --pause. Processes of other containers cannot be seen.
    """
    running = frozenset() if isinstance(c.processes, Unavailable) else c.processes
    tools = (
        warn(f"{name} runs: {_HOLDERS[name]}", {name: "runs"}, _release(name))
        for name in sorted(running & _HOLDERS.keys())
    )
    findings = (*matches(INJECTION_RULES, c.variables), *tools)
    return combine(findings, otherwise=ok("no other tool is seen that would hold CUPTI"))


def _release(name: str) -> str:
    if name in ("nv-hostengine", "dcgm-exporter"):
        return "dcgmi profile --pause, and --resume afterwards"
    return f"end {name} before you profile"


def performance_counters(c: RunContext) -> Finding:
    """By default only administrators may read performance counters (ncu, metrics of CUPTI).

    Timelines of kernels and copies need no privilege. Counters give ERR_NVGPUCTRPERM unless the process
    has CAP_SYS_ADMIN or the driver was loaded with NVreg_RestrictProfilingToAdminUsers=0, which
    /proc/driver/nvidia/params shows as RmProfilingAdminOnly: 0.
    """
    parameters = c.driver.parameters
    if parameters is None:
        require_driver(c)
        raise NotCheckable("/proc/driver/nvidia/params is not shown here")
    value = parameters.get("RmProfilingAdminOnly")
    evidence = {
        "RmProfilingAdminOnly": value or "?",
        "CAP_SYS_ADMIN": "yes" if c.privileged else "no",
    }
    if value == "0":
        return ok("every user may read performance counters", evidence)
    if c.privileged:
        return ok("this process may read performance counters, as an administrator", evidence)
    return warn(
        "performance counters are for administrators (timelines are not)",
        evidence,
        "run ncu with sudo, or for all users: echo 'options nvidia "
        "NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvidia-profiling.conf, "
        "update the initramfs and reboot",
    )


# --- memory ----------------------------------------------------------------------------------------

# Docker's default is 64 MiB; a worker of a data loader passes batches of hundreds of MiB.
_LEAST_SHARED = 1 << 30
_IN_CONTAINER: tuple[str, ...] = (
    "docker run --ipc=host ...  (or --shm-size=8g)",
    "in Kubernetes: mount an emptyDir of medium Memory at /dev/shm",
)
_ELSEWHERE: tuple[str, ...] = ("sudo mount -o remount,size=8G /dev/shm",)
# CUDA reserves addresses for all memory of host and devices, and uses next to none of them.
_LEAST_ADDRESSES = 1 << 40
# Registering a buffer with an InfiniBand card locks it.
_LEAST_LOCKED = 1 << 30


def shared_memory(c: RunContext) -> Finding:
    """Data loaders and NCCL pass data between processes through /dev/shm.

    Docker gives a container 64 MiB of it, and PyTorch's workers then die with "Bus error" or
    "insufficient shared memory (shm)"; NCCL fails with "unhandled system error" or goes through sockets.
    """
    size = require(c.host.shared_memory_bytes)
    evidence = {SHARED_MEMORY: format_bytes(size)}
    if size >= _LEAST_SHARED:
        return ok(f"{SHARED_MEMORY} has {format_bytes(size)}", evidence)
    fixes = _IN_CONTAINER if c.host.container else _ELSEWHERE
    return warn(
        f"{SHARED_MEMORY} has only {format_bytes(size)}: workers of data loaders may die",
        evidence,
        *fixes,
    )


def memory_limits(c: RunContext) -> Finding:
    """CUDA reserves far more addresses than it uses; where they are limited it fails with 2.

    A limit of address space (ulimit -v, as batch systems set it) and vm.overcommit_memory=2 both forbid
    that. With InfiniBand, memory is locked for the card, and a low ulimit -l makes NCCL fall back or
    fail; without InfiniBand the limit does not matter to CUDA.
    """
    limits = require(c.limits)
    addresses, locked = limits.address_space_bytes, limits.locked_memory_bytes
    overcommit, cards = c.host.overcommit_memory, c.host.infiniband
    evidence = {
        "address space (ulimit -v)": _size(addresses),
        "locked memory (ulimit -l)": _size(locked),
        "vm.overcommit_memory": overcommit or "?",
    }
    rows = (
        (
            addresses is not None and addresses < _LEAST_ADDRESSES,
            f"the address space is limited to {_size(addresses)}: CUDA may run out of it (2)",
            "ulimit -v unlimited, or ask the batch system for more memory",
        ),
        (
            overcommit == "2",
            "vm.overcommit_memory is 2: CUDA may find no addresses to reserve (2)",
            "sudo sysctl vm.overcommit_memory=0",
        ),
        (
            bool(cards) and locked is not None and locked < _LEAST_LOCKED,
            f"only {_size(locked)} can be locked, and InfiniBand ({', '.join(cards)}) needs more",
            "ulimit -l unlimited (docker run --ulimit memlock=-1)",
        ),
    )
    return combine(
        (warn(message, evidence, fix) for applies, message, fix in rows if applies),
        otherwise=ok("no limit keeps CUDA from its memory", evidence),
    )


def _size(limit: int | None) -> str:
    return "unlimited" if limit is None else format_bytes(limit)
