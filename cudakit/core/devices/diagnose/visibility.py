"""Which devices does a CUDA program see, under which numbers, and may it use them?"""

from __future__ import annotations

from collections.abc import Sequence

from cudakit.core.devices.circumstances import Circumstances
from cudakit.core.devices.diagnose.check import CannotTell, Finding, fail, ok, together, warn
from cudakit.core.devices.diagnose.gpus import SeenGpu, each, named, seen_gpus
from cudakit.gpu.api.facts import CudaView, DeviceFacts
from cudakit.units import Unavailable

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"
_ORDERS = ("FASTEST_FIRST", "PCI_BUS_ID")


def visible_devices(c: Circumstances) -> Finding:
    """CUDA_VISIBLE_DEVICES lists the devices that a program may see, in the order it will number them.

    Not set, all are visible; empty, none. The list ends at the first entry that names no device
    (0,2,-1,1 shows 0 and 2), and an entry named twice leaves none at all. An entry is an index, or the
    beginning of a UUID (GPU-8932f937, MIG-...). Indices count as CUDA does, which is nvidia-smi's order
    only with CUDA_DEVICE_ORDER=PCI_BUS_ID. CUDA Programming Guide, CUDA Environment Variables.
    """
    value = c.environment.get(_VISIBLE)
    if value is None:
        return ok(f"{_VISIBLE} is not set: every device is visible")
    evidence = {_VISIBLE: value or "(empty)"}
    cuda = c.cuda
    if isinstance(cuda, Unavailable) or not (cuda.devices or cuda.hidden):
        raise CannotTell(f"{_VISIBLE}={value}, but CUDA sees no device either way (CK005)")
    total = len(cuda.devices) + len(cuda.hidden)
    if not cuda.devices:
        return fail(
            f"{_VISIBLE}={value} hides every device{_why_none(value)}",
            evidence,
            f"unset {_VISIBLE}",
            "or name a device: cudakit devices --select",
        )
    ignored = _ignored(value, len(cuda.devices))
    if ignored:
        return warn(
            f"{_VISIBLE}={value}: {ignored[0]!r} names no device, and the list ends there",
            {**evidence, "ignored": ", ".join(ignored)},
            f"name devices by the beginning of their UUID: {_VISIBLE}=GPU-...",
        )
    return ok(f"{_VISIBLE}={value} shows {len(cuda.devices)} of {total} devices", evidence)


def _entries(value: str) -> list[str]:
    return [entry.strip() for entry in value.split(",")]


def _why_none(value: str) -> str:
    entries = _entries(value)
    if not value.strip():
        return ""
    if len(set(entries)) < len(entries):
        return ": a device is named twice"
    return f": {entries[0]!r} names no device"


def _ignored(value: str, visible: int) -> list[str]:
    return _entries(value)[visible:]


def device_order(c: Circumstances) -> Finding:
    """CUDA numbers the fastest device first, nvidia-smi by PCI address.

    With GPUs of one kind both orders are mostly the same. With different ones, cuda:0 may be GPU 1 of
    nvidia-smi, and CUDA_VISIBLE_DEVICES=0 the wrong card. CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA count
    as nvidia-smi does. Judged by comparing UUIDs and PCI addresses, not by believing the variable.
    """
    told = c.environment.get(_ORDER)
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
    numbers = _numbers(cuda, [gpu.facts for gpu in seen_gpus(c)])
    known = [nvml for nvml in numbers.values() if nvml is not None]
    mapping = {
        f"cuda:{ours}": "?" if theirs is None else f"GPU {theirs} of nvidia-smi"
        for ours, theirs in numbers.items()
    }
    if known == sorted(known):
        return ok("CUDA counts the devices in nvidia-smi's order", mapping)
    if c.environment.get(_VISIBLE):
        return ok(f"CUDA counts the devices in the order of {_VISIBLE}", mapping)
    return warn(
        "CUDA counts the devices in another order than nvidia-smi",
        mapping,
        f"export {_ORDER}=PCI_BUS_ID",
    )


def _numbers(cuda: CudaView, gpus: Sequence[DeviceFacts]) -> dict[int, int | None]:
    """Map CUDA's number of each visible device to NVML's of its GPU."""
    by_address = {gpu.pci_bus_id: gpu.index for gpu in gpus if isinstance(gpu.pci_bus_id, str)}
    return {one.index: by_address.get(str(one.pci_bus_id)) for one in cuda.devices}


def mig_instances(c: Circumstances) -> Finding:
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


def _empty(c: Circumstances, in_mig: Sequence[SeenGpu], *, all_gpus: int) -> list[Finding]:
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
            each(
                waiting,
                lambda gpu: f"now {gpu.flag('mig_mode')}, then {gpu.flag('mig_mode_pending')}",
            ),
            f"sudo nvidia-smi -i {waiting[0].facts.index} --gpu-reset, once nothing uses it",
        )
    ]


def _count(c: Circumstances, gpu: SeenGpu) -> int:
    devices = () if isinstance(c.nvml, Unavailable) else c.nvml.devices
    return sum(device.parent == gpu.facts.index for device in devices)


def _instances(c: Circumstances, gpu: SeenGpu) -> str:
    return f"{_count(c, gpu)} instances"


def compute_mode(c: Circumstances) -> Finding:
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
