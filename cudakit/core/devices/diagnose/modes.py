"""Checks of NVSwitch fabric, MIG and compute mode (CK006, CK017, CK018)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cudakit.core.devices.diagnose.check import Finding, Status, combine, fail, ok, warn
from cudakit.core.devices.diagnose.driver import require_nvml
from cudakit.core.devices.diagnose.gpus import (
    GpuRule,
    GpuState,
    evidence_of,
    gpu_states,
    names_of,
)
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable


def fabric(c: RunContext) -> Finding:
    """On machines with NVSwitch, CUDA waits until the fabric manager has set up the NVLinks.

    Until then cuInit fails with 802 (CUDA_ERROR_SYSTEM_NOT_READY). NVML tells each GPU's state:
    not started, in progress, completed. The nvidia-fabricmanager service must run on the machine (or,
    in a virtual machine, on its host), in exactly the driver's version. On other machines there is no
    fabric, and nothing to wait for.
    """
    gpus = [gpu for gpu in gpu_states(c) if gpu.text("fabric_state") not in (None, "not supported")]
    if not gpus:
        return ok("no GPU waits for an NVSwitch fabric")
    states = evidence_of(gpus, _fabric_state)
    waiting = [gpu for gpu in gpus if gpu.text("fabric_state") != "completed"]
    broken = [gpu for gpu in gpus if (gpu.text("fabric_status") or "").startswith("error")]
    if not waiting and not broken:
        return ok("the NVSwitch fabric is ready", states)
    if c.cuda_devices:
        return _without_fabric(waiting or broken, states, alone=len(gpus) == 1)
    return fail(
        f"the NVSwitch fabric is not ready on {names_of(waiting or broken)}",
        {**states, "nv-fabricmanager": _fabric_manager(c)},
        "sudo systemctl enable --now nvidia-fabricmanager",
        "if it does not start: install the version that equals the driver's, to the last digit",
        "in a virtual machine the fabric is set up by the host: ask whoever runs it",
    )


def _without_fabric(gpus: list[GpuState], states: dict[str, str], *, alone: bool) -> Finding:
    if alone:
        return ok(f"{names_of(gpus)} is in no NVSwitch fabric, and alone needs none", states)
    return warn(
        f"CUDA works, but {names_of(gpus)} cannot reach its peers over NVSwitch",
        states,
        "sudo systemctl restart nvidia-fabricmanager, once nothing uses the GPUs",
    )


def _fabric_state(gpu: GpuState) -> str:
    status = gpu.text("fabric_status")
    return f"{gpu.text('fabric_state')}{f', {status}' if status else ''}"


def _fabric_manager(c: RunContext) -> str:
    if isinstance(c.processes, Unavailable):
        return c.processes.reason
    return "runs" if "nv-fabricmanage" in c.processes else "does not run here"


_MODE_CHANGE = GpuRule(
    Status.WARN,
    lambda gpu: gpu.flag("mig_mode_pending") not in (None, gpu.flag("mig_mode")),
    "a change of MIG mode waits for a reset of {gpus}",
    ("sudo nvidia-smi -i {index} --gpu-reset, once nothing uses it",),
    lambda gpu: "now on, then off" if gpu.flag("mig_mode") else "now off, then on",
)


def mig_instances(c: RunContext) -> Finding:
    """A GPU in MIG mode can be used only through its instances; without any, CUDA does not see it.

    MIG divides a GPU into instances that are devices of their own. The mode survives reboots, the
    instances do not: after a reboot they must be made again. A change of mode waits for a reset of the
    GPU. NVIDIA Multi-Instance GPU User Guide.
    """
    gpus = gpu_states(c)
    in_mig = [gpu for gpu in gpus if gpu.flag("mig_mode")]
    parents = Counter(device.parent for device in require_nvml(c).devices)
    counts = {gpu.label: parents[gpu.facts.index] for gpu in in_mig}
    evidence = {label: f"{count} instances" for label, count in counts.items()}
    empty = [gpu for gpu in in_mig if not counts[gpu.label]]
    findings = list(_MODE_CHANGE.findings(gpus))
    if empty:
        findings.insert(0, _without_instances(empty, evidence, all_gpus=len(empty) == len(gpus)))
    return combine(
        findings,
        otherwise=ok(f"{names_of(in_mig)} has MIG instances", evidence)
        if in_mig
        else ok("no GPU is in MIG mode"),
    )


def _without_instances(
    empty: Sequence[GpuState], evidence: dict[str, str], *, all_gpus: bool
) -> Finding:
    index = empty[0].facts.index
    return Finding(
        Status.FAIL if all_gpus else Status.WARN,
        f"{names_of(empty)} is in MIG mode and has no instance, so CUDA does not see it",
        {gpu.label: evidence[gpu.label] for gpu in empty},
        (
            f"make instances: sudo nvidia-smi mig -i {index} -lgip, then -cgi PROFILE -C",
            f"or leave the mode: sudo nvidia-smi -i {index} -mig 0",
        ),
    )


def compute_mode(c: RunContext) -> Finding:
    """The compute mode says how many processes may use a GPU: any number, one, or none.

    In exclusive mode a second process fails with 46 (CUDA_ERROR_DEVICE_UNAVAILABLE, "all CUDA-capable
    devices are busy or unavailable"), which surprises data loaders and debuggers; MPS wants this mode.
    In prohibited mode no process may.
    """
    gpus = [gpu for gpu in gpu_states(c) if gpu.text("compute_mode")]
    modes = evidence_of(gpus, lambda gpu: gpu.text("compute_mode"))
    special = [gpu for gpu in gpus if gpu.text("compute_mode") != "default"]
    if not special:
        return ok("any number of processes may use each GPU")
    fix = f"sudo nvidia-smi -i {special[0].facts.index} -c DEFAULT"
    forbidden = [gpu for gpu in special if gpu.text("compute_mode") == "prohibited"]
    if forbidden:
        report = fail if len(forbidden) == len(gpus) else warn
        return report(f"no process may use {names_of(forbidden)} (prohibited)", modes, fix)
    return warn(f"one process at a time may use {names_of(special)} (exclusive)", modes, fix)
