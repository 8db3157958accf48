"""Which devices does a CUDA program see, under which numbers, and may it use them?"""

from __future__ import annotations

from collections.abc import Sequence

from cudakit.core.devices.diagnose.check import CannotTell, Finding, fail, ok, together, warn
from cudakit.core.devices.diagnose.gpus import SeenGpu, each, named, seen_gpus
from cudakit.core.devices.match import match
from cudakit.core.devices.visible import VARIABLE, visibility
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

_ORDER = "CUDA_DEVICE_ORDER"
_ORDERS = ("FASTEST_FIRST", "PCI_BUS_ID")


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
        raise CannotTell(f"{VARIABLE} is {value!r}, but CUDA sees no device either way (CK005)")
    found = visibility(value, cuda.order)
    evidence = {VARIABLE: value or "(empty)", "devices": f"{len(found.kept)} of {len(cuda.order)}"}
    told = "; ".join(found.notes)
    if not found.kept:
        return fail(
            f"no device is visible: {told}",
            evidence,
            f"unset {VARIABLE}",
            "or name a device: cudakit devices --select",
        )
    if told:
        return warn(told, evidence, f"name devices by UUID: export {VARIABLE}={cuda.order[0][:12]}")
    return ok(f"{VARIABLE}={value} shows {len(found.kept)} of {len(cuda.order)} devices", evidence)


def device_order(c: RunContext) -> Finding:
    """CUDA numbers the fastest device first, nvidia-smi by PCI address.

    With GPUs of one kind both orders are mostly the same. With different ones, cuda:0 may be GPU 1 of
    nvidia-smi, and CUDA_VISIBLE_DEVICES=0 the wrong card. CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA count
    as nvidia-smi does. Judged by comparing UUIDs and PCI addresses, not by believing the variable.
    """
    told = c.variables.get(_ORDER)
    if told is not None and told not in _ORDERS:
        return warn(
            f"{_ORDER}={told} means nothing to CUDA",
            {_ORDER: told},
            f"export {_ORDER}=PCI_BUS_ID",
        )
    cuda = c.cuda
    if isinstance(cuda, Unavailable) or not cuda.devices:
        raise CannotTell("CUDA sees no device (CK005)")
    if isinstance(c.nvml, Unavailable):
        raise CannotTell("NVML does not answer (CK003)")
    pairs = [(one.cuda, one.nvml) for one in match(c.nvml, cuda) if one.cuda and not one.hidden]
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


def mig_instances(c: RunContext) -> Finding:
    """A GPU in MIG mode can be used only through its instances; without any, CUDA does not see it.

    MIG divides a GPU into instances that are devices of their own. The mode survives reboots, the
    instances do not: after a reboot they must be made again. A change of mode waits for a reset of the
    GPU. NVIDIA Multi-Instance GPU User Guide.
    """
    gpus = seen_gpus(c)
    in_mig = [gpu for gpu in gpus if gpu.flag("mig_mode")]
    return together(
        [*_empty(c, in_mig, all_gpus=len(gpus)), *_pending(gpus)],
        otherwise=ok(
            f"{named(in_mig)} has MIG instances", each(in_mig, lambda gpu: _instances(c, gpu))
        )
        if in_mig
        else ok("no GPU is in MIG mode"),
    )


def _empty(c: RunContext, in_mig: Sequence[SeenGpu], *, all_gpus: int) -> list[Finding]:
    empty = [gpu for gpu in in_mig if not _count(c, gpu)]
    if not empty:
        return []
    judged = fail if len(empty) == all_gpus else warn
    index = empty[0].facts.index
    return [
        judged(
            f"{named(empty)} is in MIG mode and has no instance, so CUDA does not see it",
            each(empty, lambda gpu: _instances(c, gpu)),
            f"make instances: sudo nvidia-smi mig -i {index} -lgip, then -cgi PROFILE -C",
            f"or leave the mode: sudo nvidia-smi -i {index} -mig 0",
        )
    ]


def _pending(gpus: Sequence[SeenGpu]) -> list[Finding]:
    waiting = [
        gpu for gpu in gpus if gpu.flag("mig_mode_pending") not in (None, gpu.flag("mig_mode"))
    ]
    if not waiting:
        return []
    return [
        warn(
            f"a change of MIG mode waits for a reset of {named(waiting)}",
            each(waiting, _change),
            f"sudo nvidia-smi -i {waiting[0].facts.index} --gpu-reset, once nothing uses it",
        )
    ]


def _change(gpu: SeenGpu) -> str:
    return "now on, then off" if gpu.flag("mig_mode") else "now off, then on"


def _count(c: RunContext, gpu: SeenGpu) -> int:
    devices = () if isinstance(c.nvml, Unavailable) else c.nvml.devices
    return sum(device.parent == gpu.facts.index for device in devices)


def _instances(c: RunContext, gpu: SeenGpu) -> str:
    return f"{_count(c, gpu)} instances"


def compute_mode(c: RunContext) -> Finding:
    """The compute mode says how many processes may use a GPU: any number, one, or none.

    In exclusive mode a second process fails with 46 (CUDA_ERROR_DEVICE_UNAVAILABLE, "all CUDA-capable
    devices are busy or unavailable"), which surprises data loaders and debuggers; MPS wants this mode.
    In prohibited mode no process may.
    """
    gpus = [gpu for gpu in seen_gpus(c) if gpu.text("compute_mode")]
    modes = each(gpus, lambda gpu: gpu.text("compute_mode"))
    special = [gpu for gpu in gpus if gpu.text("compute_mode") != "default"]
    if not special:
        return ok("any number of processes may use each GPU")
    fix = f"sudo nvidia-smi -i {special[0].facts.index} -c DEFAULT"
    forbidden = [gpu for gpu in special if gpu.text("compute_mode") == "prohibited"]
    if forbidden:
        judged = fail if len(forbidden) == len(gpus) else warn
        return judged(f"no process may use {named(forbidden)} (prohibited)", modes, fix)
    return warn(f"one process at a time may use {named(special)} (exclusive)", modes, fix)
