"""Does CUDA start, and if not, why?"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cudakit.core.devices.diagnose.check import CannotTell, Finding, fail, ok, warn
from cudakit.core.devices.diagnose.driver import require_driver
from cudakit.core.devices.diagnose.gpus import SeenGpu, each, named, seen_gpus
from cudakit.core.devices.visible import VARIABLE, visibility
from cudakit.gpu.api.facts import CudaView
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

# What cuInit returns, with the causes known of each (CUDA Driver API, CUresult). Elsewhere a code may
# mean more; of cuInit it means this.
CAUSES: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        2: (
            "a limit of address space (ulimit -v) or vm.overcommit_memory=2 keeps CUDA from reserving "
            "addresses: see CK035",
        ),
        3: ("the process was forked after CUDA had been used: start workers with spawn",),
        34: ("a stub libcuda was loaded: take .../lib64/stubs off LD_LIBRARY_PATH (CK008)",),
        46: (
            "another process holds the GPU exclusively, or its compute mode forbids use: see CK018",
        ),
        100: (
            "no GPU is within reach: see CK002 (device nodes), CK014 (CUDA_VISIBLE_DEVICES), "
            "CK016 (container), CK017 (MIG)",
        ),
        101: ("the driver and its device nodes do not agree: restart the container (CK002)",),
        102: (
            "a vGPU without a licence: start nvidia-gridd and look at nvidia-smi -q | grep -i lic",
        ),
        304: (
            "a call to the operating system failed: look at device nodes (CK002), at limits (CK035), and "
            "at the number of open files (ulimit -n)",
        ),
        802: (
            "the NVSwitch fabric is not ready: see CK006",
            "systemctl status nvidia-fabricmanager; its version must be the driver's",
        ),
        803: (
            "libcuda and the kernel's module are of different drivers: see CK004",
            "take cuda-compat off LD_LIBRARY_PATH: see CK008",
        ),
        804: (
            "libcuda of cuda-compat runs on data-centre GPUs only: take it off LD_LIBRARY_PATH (CK008)",
            "and update the driver instead",
        ),
        805: ("the MPS daemon does not answer: see CK019",),
        806: ("the MPS server broke off: echo quit | nvidia-cuda-mps-control, and start it again",),
        807: ("the MPS server is starting: try again",),
        808: ("the MPS server has its most clients: end one",),
        809: ("the MPS server has its most connections: end a client",),
        999: (
            "/dev/nvidia-uvm is missing or broken, often after suspend: "
            "sudo rmmod nvidia_uvm; sudo modprobe nvidia_uvm (CK002)",
            "sudo dmesg | grep -iE 'nvrm|xid' | tail",
        ),
    }
)


def initialises(c: RunContext) -> Finding:
    """The first call of every CUDA program is cuInit; its error says which cause to look for.

    A short child process asks, so that nothing is initialised where it would harm a later fork. The
    codes: 2 limits of memory, 34 a stub library, 100 no device within reach, 802 the NVSwitch fabric is
    not ready, 803 libcuda and kernel module differ, 804 cuda-compat on hardware that it does not
    support, 805 to 809 MPS, 999 often a missing /dev/nvidia-uvm.
    """
    cuda = c.cuda
    if isinstance(cuda, Unavailable):
        require_driver(c)
        return _without_libcuda(c, cuda.reason)
    evidence = _evidence(cuda)
    if not cuda.devices and cuda.order and not visibility(cuda.visible_devices, cuda.order).kept:
        raise CannotTell(f"{VARIABLE} hides every device (CK014)")
    if cuda.error is not None:
        require_driver(c)
        code, name, text = cuda.error
        return fail(f"cuInit fails with {name} ({code}): {text}", evidence, *CAUSES.get(code, ()))
    if not cuda.devices:
        return fail("CUDA starts but sees no device", evidence, *CAUSES[100])
    count = len(cuda.devices)
    return ok(
        f"CUDA {_version(cuda)} starts and sees {count} device{'' if count == 1 else 's'}", evidence
    )


def _evidence(cuda: CudaView) -> dict[str, str]:
    path = "?" if isinstance(cuda.libcuda, Unavailable) else cuda.libcuda
    return {"driver's CUDA": _version(cuda), "libcuda": path}


def _version(cuda: CudaView) -> str:
    version = cuda.driver_version
    return "?" if isinstance(version, Unavailable) else f"{version[0]}.{version[1]}"


def _without_libcuda(c: RunContext, reason: str) -> Finding:
    if "cannot be loaded" not in reason:
        return fail(
            f"CUDA cannot be asked: {reason}", {}, "sudo dmesg | grep -iE 'nvrm|xid' | tail"
        )
    fix = (
        "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        if c.host.container
        else "install the driver's CUDA library (libcuda.so.1), of the kernel module's version"
    )
    return fail("libcuda.so.1 cannot be loaded", {"loader": reason}, fix)


def fabric_ready(c: RunContext) -> Finding:
    """On machines with NVSwitch, CUDA waits until the fabric manager has set up the NVLinks.

    Until then cuInit fails with 802 (CUDA_ERROR_SYSTEM_NOT_READY). NVML tells each GPU's state:
    not started, in progress, completed. The nvidia-fabricmanager service must run on the machine (or,
    in a virtual machine, on its host), in exactly the driver's version. On other machines there is no
    fabric, and nothing to wait for.
    """
    gpus = [gpu for gpu in seen_gpus(c) if gpu.text("fabric_state") not in (None, "not supported")]
    if not gpus:
        return ok("no GPU waits for an NVSwitch fabric")
    states = each(gpus, _fabric)
    waiting = [gpu for gpu in gpus if gpu.text("fabric_state") != "completed"]
    broken = [gpu for gpu in gpus if (gpu.text("fabric_status") or "").startswith("error")]
    if not waiting and not broken:
        return ok("the NVSwitch fabric is ready", states)
    if _cuda_runs(c):
        return _without_fabric(waiting or broken, states, alone=len(gpus) == 1)
    return fail(
        f"the NVSwitch fabric is not ready on {named(waiting or broken)}",
        {**states, "nv-fabricmanager": _manager(c)},
        "sudo systemctl enable --now nvidia-fabricmanager",
        "if it does not start: install the version that equals the driver's, to the last digit",
        "in a virtual machine the fabric is set up by the host: ask whoever runs it",
    )


def _without_fabric(gpus: list[SeenGpu], states: dict[str, str], *, alone: bool) -> Finding:
    if alone:
        return ok(f"{named(gpus)} is in no NVSwitch fabric, and alone needs none", states)
    return warn(
        f"CUDA works, but {named(gpus)} cannot reach its peers over NVSwitch",
        states,
        "sudo systemctl restart nvidia-fabricmanager, once nothing uses the GPUs",
    )


def _fabric(gpu: SeenGpu) -> str:
    status = gpu.text("fabric_status")
    return f"{gpu.text('fabric_state')}{f', {status}' if status else ''}"


def _cuda_runs(c: RunContext) -> bool:
    return not isinstance(c.cuda, Unavailable) and bool(c.cuda.devices)


def _manager(c: RunContext) -> str:
    if isinstance(c.processes, Unavailable):
        return c.processes.reason
    return "runs" if "nv-fabricmanage" in c.processes else "does not run here"
