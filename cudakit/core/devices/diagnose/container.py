"""What surrounds the process: a container, WSL, MPS."""

from __future__ import annotations

from cudakit.core.devices.diagnose.check import CannotTell, Finding, fail, ok, warn
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

_DEVICES = "NVIDIA_VISIBLE_DEVICES"
_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_WSL_LIBRARIES = "/usr/lib/wsl/lib"


def container_settings(c: RunContext) -> Finding:
    """NVIDIA's container runtime reads which GPUs and which parts of the driver a container gets.

    NVIDIA_VISIBLE_DEVICES: all, none (driver but no GPU), void or empty (nothing), or a list.
    NVIDIA_DRIVER_CAPABILITIES must hold compute (CUDA) and utility (NVML), which is the default;
    graphics or video alone leave them out. Both are read when the container starts, so changing them
    inside has no effect. With CDI the runtime sets NVIDIA_VISIBLE_DEVICES=void itself. NVIDIA Container
    Toolkit, Docker Specialized Configurations.
    """
    kind = c.host.container
    told = {name: c.variables[name] for name in (_DEVICES, _CAPABILITIES) if name in c.variables}
    if not kind and not told:
        return ok("this is no container")
    evidence = {"container": kind or "not recognised", **told}
    if (
        not isinstance(c.cuda, Unavailable)
        and c.cuda.devices
        and not isinstance(c.nvml, Unavailable)
    ):
        return ok(
            f"the container ({kind or 'of unknown kind'}) has what CUDA and NVML need", evidence
        )
    parts = _lacking(told.get(_CAPABILITIES))
    if parts:
        return fail(
            f"{_CAPABILITIES}={told[_CAPABILITIES]} leaves out {' and '.join(parts)}",
            evidence,
            f"start the container with -e {_CAPABILITIES}=compute,utility",
        )
    if told.get(_DEVICES) in ("none", "void", ""):
        return fail(
            f"{_DEVICES}={told[_DEVICES] or '(empty)'} gives the container no GPU",
            evidence,
            "docker run --gpus all ...",
        )
    return ok("no variable keeps the GPU out of the container", evidence)


def _lacking(capabilities: str | None) -> list[str]:
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
    if isinstance(c.software.libraries, Unavailable):
        raise CannotTell(c.software.libraries.reason)
    copies = [one for one in c.software.libraries if one.soname == "libcuda.so.1"]
    strangers = [
        one.path
        for one in copies
        if not one.real.startswith(_WSL_LIBRARIES) and "/wsl/" not in one.real
    ]
    evidence = {"libcuda.so.1": ", ".join(one.path for one in copies) or "not found"}
    if strangers:
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
    directory = c.variables.get(_PIPES, "/tmp/nvidia-mps")  # noqa: S108 MPS's own default
    runs = not isinstance(c.processes, Unavailable) and "nvidia-cuda-mps" in c.processes
    pipes = c.driver.mps_pipes
    code = None if isinstance(c.cuda, Unavailable) or c.cuda.error is None else c.cuda.error[0]
    evidence = {
        "directory": directory,
        "pipes": "there" if pipes else "none",
        "nvidia-cuda-mps-control": "runs" if runs else "not seen",
    }
    if code is not None and 805 <= code <= 809:
        return fail(
            f"CUDA cannot reach the MPS daemon ({code})",
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
