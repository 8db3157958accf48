"""Can a profiler be used here, or does another hold what it needs?"""

from __future__ import annotations

from cudakit.core.devices.diagnose.check import CannotTell, Finding, ok, together, warn
from cudakit.core.devices.diagnose.driver import require_driver
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

_INJECTIONS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "CUDA_INJECTION32_PATH")
# Processes by the name that /proc gives them, cut at 15 characters, and what each holds.
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


def profiler_free(c: RunContext) -> Finding:
    """CUPTI serves one tool at a time: torch.profiler, nsys, ncu, compute-sanitizer and cuda-gdb conflict.

    CUDA_INJECTION64_PATH makes the driver load a tool into every CUDA program, NVTX_INJECTION64_PATH
    sends its ranges to one. A second tool then fails with CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED
    (39). DCGM (nv-hostengine) shares the performance counters: profilers of counters say "hardware
    busy" until dcgmi profile --pause. Processes of other containers cannot be seen.
    """
    found = [
        warn(
            f"{name} puts another tool into every CUDA program",
            {name: c.variables[name]},
            f"unset {name}",
        )
        for name in _INJECTIONS
        if c.variables.get(name)
    ]
    if not isinstance(c.processes, Unavailable):
        found += [
            warn(f"{name} runs: {_HOLDERS[name]}", {name: "runs"}, _release(name))
            for name in sorted(c.processes & _HOLDERS.keys())
        ]
    return together(found, otherwise=ok("no other tool is seen that would hold CUPTI"))


def _release(name: str) -> str:
    if name in ("nv-hostengine", "dcgm-exporter"):
        return "dcgmi profile --pause, and --resume afterwards"
    return f"end {name} before you profile"


def counters_permitted(c: RunContext) -> Finding:
    """By default only administrators may read performance counters (ncu, metrics of CUPTI).

    Timelines of kernels and copies need no privilege. Counters give ERR_NVGPUCTRPERM unless the process
    has CAP_SYS_ADMIN or the driver was loaded with NVreg_RestrictProfilingToAdminUsers=0, which
    /proc/driver/nvidia/params shows as RmProfilingAdminOnly: 0.
    """
    parameters = c.driver.parameters
    if parameters is None:
        require_driver(c)
        raise CannotTell("/proc/driver/nvidia/params is not shown here")
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
