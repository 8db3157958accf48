"""Checks that CUDA starts, sees the right devices, and works (CK005, CK014, CK015, CK041 to CK044)."""

from __future__ import annotations

from collections.abc import Mapping

from cudakit.core.devices.diagnose.check import Finding, NotCheckable, fail, ok, require, warn
from cudakit.core.devices.diagnose.driver import (
    cuda_text,
    driver_cuda,
    require_driver,
    require_nvml,
)
from cudakit.core.devices.match import match
from cudakit.core.devices.visible_devices import VARIABLE, visibility
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

# The known causes of each error of cuInit (CUDA Driver API, CUresult).
CAUSES: Mapping[int, tuple[str, ...]] = {
    2: (
        "a limit of address space (ulimit -v) or vm.overcommit_memory=2 keeps CUDA from reserving "
        "addresses: see CK035",
    ),
    3: ("the process was forked after CUDA had been used: start workers with spawn",),
    34: ("a stub libcuda was loaded: take .../lib64/stubs off LD_LIBRARY_PATH (CK008)",),
    46: ("another process holds the GPU exclusively, or its compute mode forbids use: see CK018",),
    100: (
        "no GPU is within reach: see CK002 (device nodes), CK014 (CUDA_VISIBLE_DEVICES), "
        "CK016 (container), CK017 (MIG)",
    ),
    101: ("the driver and its device nodes do not agree: restart the container (CK002)",),
    102: ("a vGPU without a licence: start nvidia-gridd and look at nvidia-smi -q | grep -i lic",),
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

_ORDER = "CUDA_DEVICE_ORDER"
_ORDERS = ("FASTEST_FIRST", "PCI_BUS_ID")


def cuda_starts(c: RunContext) -> Finding:
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
    offered = driver_cuda(c)
    version = "?" if offered is None else cuda_text(offered)
    path = "?" if isinstance(cuda.libcuda, Unavailable) else cuda.libcuda
    evidence = {"driver's CUDA": version, "libcuda": path}
    if not cuda.devices and cuda.order and not visibility(cuda.visible_devices, cuda.order).kept:
        raise NotCheckable(f"{VARIABLE} hides every device (CK014)")
    if cuda.error is not None:
        require_driver(c)
        code, name, text = cuda.error
        return fail(f"cuInit fails with {name} ({code}): {text}", evidence, *CAUSES.get(code, ()))
    if not cuda.devices:
        return fail("CUDA starts but sees no device", evidence, *CAUSES[100])
    count = len(cuda.devices)
    return ok(f"CUDA {version} starts and sees {count} device{'' if count == 1 else 's'}", evidence)


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


def visible_devices(c: RunContext) -> Finding:
    """CUDA_VISIBLE_DEVICES lists the devices that a program may see, in the order it will number them.

    Not set, all are visible; empty, none. The list ends at the first entry that names no device
    (0,2,-1,1 shows 0 and 2), and an entry named twice leaves none at all. An entry is an index, or the
    beginning of a UUID (GPU-8932f937, MIG-...). Indices count as CUDA does, which is nvidia-smi's order
    only with CUDA_DEVICE_ORDER=PCI_BUS_ID. CUDA Programming Guide, CUDA Environment Variables.
    """
    cuda = c.cuda
    value = c.variables.get(VARIABLE) if isinstance(cuda, Unavailable) else cuda.visible_devices
    if value is None:
        return ok(f"{VARIABLE} is not set: every device is visible")
    if isinstance(cuda, Unavailable) or not cuda.order:
        raise NotCheckable(f"{VARIABLE} is {value!r}, but CUDA sees no device either way (CK005)")
    found = visibility(value, cuda.order)
    evidence = {VARIABLE: value or "(empty)", "devices": f"{len(found.kept)} of {len(cuda.order)}"}
    notes = "; ".join(found.notes)
    if not found.kept:
        return fail(
            f"no device is visible: {notes}",
            evidence,
            f"unset {VARIABLE}",
            "or name a device: cudakit devices --select",
        )
    if notes:
        return warn(
            notes, evidence, f"name devices by UUID: export {VARIABLE}={cuda.order[0][:12]}"
        )
    return ok(f"{VARIABLE}={value} shows {len(found.kept)} of {len(cuda.order)} devices", evidence)


def device_order(c: RunContext) -> Finding:
    """CUDA numbers the fastest device first, nvidia-smi by PCI address.

    With GPUs of one kind both orders are mostly the same. With different ones, cuda:0 may be GPU 1 of
    nvidia-smi, and CUDA_VISIBLE_DEVICES=0 the wrong card. CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA count
    as nvidia-smi does. Judged by comparing UUIDs and PCI addresses, not by believing the variable.
    """
    order = c.variables.get(_ORDER)
    if order is not None and order not in _ORDERS:
        return warn(
            f"{_ORDER}={order} means nothing to CUDA",
            {_ORDER: order},
            f"export {_ORDER}=PCI_BUS_ID",
        )
    cuda = c.cuda
    if isinstance(cuda, Unavailable) or not cuda.devices:
        raise NotCheckable("CUDA sees no device (CK005)")
    found = match(require_nvml(c), cuda)
    pairs = [(one.cuda, one.nvml) for one in found if one.cuda and not one.hidden]
    numbers = {ours.index: theirs.index for ours, theirs in pairs if theirs}
    shown = {f"cuda:{ours}": f"GPU {numbers[ours]} of nvidia-smi" for ours in sorted(numbers)}
    in_order = [numbers[ours] for ours in sorted(numbers)]
    if in_order == sorted(in_order):
        return ok("CUDA counts the devices in nvidia-smi's order", shown)
    if cuda.visible_devices:
        return ok(f"CUDA counts the devices in the order of {VARIABLE}", shown)
    return warn(
        "CUDA counts the devices in another order than nvidia-smi",
        shown,
        f"export {_ORDER}=PCI_BUS_ID",
    )


# --- the self-test: each check reads one step of --deep --------------------------------------------


def context_step(c: RunContext) -> Finding:
    """A context is what a program has on a device: the first thing it makes, and a few hundred MiB.

    It fails where cuInit still worked if the device is held exclusively (46), has no memory left (2), or
    is broken.
    """
    return _check_step(c, "context", "a context can be made")


def compile_step(c: RunContext) -> Finding:
    """NVRTC compiles CUDA C++ at run time; CuPy, Numba, PyTorch and cudakit use it.

    It is looked for where Python packages and the toolkit put it. It must know the GPU's compute
    capability: CK010.
    """
    return _check_step(c, "compile", "NVRTC compiles for this GPU")


def kernel_step(c: RunContext) -> Finding:
    """A small kernel of known result runs on every multiprocessor; each value is compared.

    A wrong value with no error reported is the mark of bad hardware (silent data corruption).
    """
    return _check_step(c, "kernel", "a kernel computes what it should")


def copy_step(c: RunContext) -> Finding:
    """Bytes copied to the device and back must be the same ones.

    From pinned host memory, over PCIe or NVLink-C2C, and within the device.
    """
    return _check_step(c, "copy", "copies to the GPU and back are exact")


def _check_step(c: RunContext, name: str, well: str) -> Finding:
    require_driver(c)
    step = next((one for one in require(c.self_test) if one.name == name), None)
    if step is None:
        raise NotCheckable("a step before this one failed")
    if step.error:
        return fail(step.error, step.seen, *filter(None, [step.hint]))
    seen = ", ".join(dict.fromkeys(step.seen.values()))
    return ok(f"{well} ({seen})" if seen else well, step.seen)
