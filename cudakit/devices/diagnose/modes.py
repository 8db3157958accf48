"""Checks of the NVSwitch fabric, MIG and the compute mode (CK006, CK017, CK018)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cudakit.devices.diagnose.check import (
    Finding,
    NotCheckable,
    Status,
    combine_findings,
    count_of,
    fail_finding,
    ok_finding,
    warn_finding,
)
from cudakit.devices.diagnose.driver import require_nvml
from cudakit.devices.diagnose.gpus import (
    GpuRule,
    GpuState,
    evidence_of,
    gpu_states,
    names_of,
)
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable


def fabric(context: RunContext) -> Finding:
    """On machines with NVSwitch, CUDA starts only after the fabric manager has set up the NVLinks.

    Until then cuInit fails with 802 (CUDA_ERROR_SYSTEM_NOT_READY). NVML reports the state of each GPU:
    not started, in progress, or completed. The nvidia-fabricmanager service must run on the machine (for a
    virtual machine, on its host) in exactly the driver's version. Other machines have no fabric.
    """
    gpus = [
        gpu
        for gpu in gpu_states(context)
        if gpu.text_field("fabric_state") not in (None, "not supported")
    ]
    if not gpus:
        return ok_finding("no GPU needs an NVSwitch fabric")
    state_by_label = evidence_of(gpus, _fabric_state)
    waiting_gpus = [gpu for gpu in gpus if gpu.text_field("fabric_state") != "completed"]
    gpus_with_errors = [
        gpu for gpu in gpus if (gpu.text_field("fabric_status") or "").startswith("error")
    ]
    if not waiting_gpus and not gpus_with_errors:
        return ok_finding("the NVSwitch fabric is ready", state_by_label)
    if context.cuda_devices:
        return _fabric_warning(
            waiting_gpus or gpus_with_errors, state_by_label, is_single_gpu=len(gpus) == 1
        )
    return fail_finding(
        f"the NVSwitch fabric is not ready on {names_of(waiting_gpus or gpus_with_errors)}",
        {**state_by_label, "nv-fabricmanager": _fabric_manager_state(context)},
        "sudo systemctl enable --now nvidia-fabricmanager",
        "if it does not start, install the version of nvidia-fabricmanager that equals the driver's",
        "in a virtual machine the host sets up the fabric: contact its administrator",
    )


def _fabric_warning(
    gpus: list[GpuState], state_by_label: dict[str, str], *, is_single_gpu: bool
) -> Finding:
    if is_single_gpu:
        summary = f"{names_of(gpus)} is not in an NVSwitch fabric; a single GPU needs none"
        return ok_finding(summary, state_by_label)
    return warn_finding(
        f"CUDA works, but {names_of(gpus)} cannot reach other GPUs over NVSwitch",
        state_by_label,
        "end all GPU processes, then: sudo systemctl restart nvidia-fabricmanager",
    )


def _fabric_state(gpu: GpuState) -> str:
    status = gpu.text_field("fabric_status")
    return f"{gpu.text_field('fabric_state')}{f', {status}' if status else ''}"


def _fabric_manager_state(context: RunContext) -> str:
    if isinstance(context.processes, Unavailable):
        return context.processes.reason
    return "running" if "nv-fabricmanage" in context.processes else "not running here"


_PENDING_MIG_CHANGE = GpuRule(
    Status.WARN,
    lambda gpu: gpu.flag_field("mig_mode_pending") not in (None, gpu.flag_field("mig_mode")),
    "{gpus}: a change of MIG mode takes effect at the next reset",
    ("end all processes on the GPU, then: sudo nvidia-smi -i {index} --gpu-reset",),
    lambda gpu: "on, off after a reset" if gpu.flag_field("mig_mode") else "off, on after a reset",
)


def mig_instances(context: RunContext) -> Finding:
    """CUDA uses a GPU in MIG mode only through its instances. Without an instance, CUDA does not see the GPU.

    MIG divides a GPU into instances that are separate devices. The mode survives a reboot, the instances
    do not and must be created again. A change of the mode takes effect at the next reset of the GPU.
    Source: NVIDIA Multi-Instance GPU User Guide.
    """
    gpus = gpu_states(context)
    mig_gpus = [gpu for gpu in gpus if gpu.flag_field("mig_mode")]
    instance_counts = Counter(device.parent for device in require_nvml(context).devices)
    count_by_label = {gpu.label: instance_counts[gpu.facts.index] for gpu in mig_gpus}
    evidence = {
        label: count_of(instance_count, "instance")
        for label, instance_count in count_by_label.items()
    }
    gpus_without_instances = [gpu for gpu in mig_gpus if not count_by_label[gpu.label]]
    findings = list(_PENDING_MIG_CHANGE.findings(gpus))
    if gpus_without_instances:
        findings.insert(
            0,
            _empty_mig_finding(
                gpus_without_instances, evidence, all_gpus=len(gpus_without_instances) == len(gpus)
            ),
        )
    return combine_findings(
        findings,
        otherwise=ok_finding(f"{names_of(mig_gpus)} in MIG mode, with instances", evidence)
        if mig_gpus
        else ok_finding("no GPU is in MIG mode"),
    )


def _empty_mig_finding(
    gpus: Sequence[GpuState], evidence: dict[str, str], *, all_gpus: bool
) -> Finding:
    first_index = gpus[0].facts.index
    return Finding(
        Status.FAIL if all_gpus else Status.WARN,
        f"{names_of(gpus)}: MIG mode is on without any instance, so CUDA cannot use the GPU",
        {gpu.label: evidence[gpu.label] for gpu in gpus},
        (
            f"create instances: sudo nvidia-smi mig -i {first_index} -lgip, then -cgi PROFILE -C",
            f"or turn MIG mode off: sudo nvidia-smi -i {first_index} -mig 0",
        ),
    )


def compute_mode(context: RunContext) -> Finding:
    """The compute mode limits how many processes can use a GPU: any number, one, or none.

    In exclusive mode a second process, such as a data loader or debugger, fails with 46
    (CUDA_ERROR_DEVICE_UNAVAILABLE, "all CUDA-capable devices are busy or unavailable"). With MPS,
    NVIDIA recommends exclusive mode, but does not require it. In prohibited mode no process can use the GPU.
    """
    gpus = [gpu for gpu in gpu_states(context) if gpu.text_field("compute_mode")]
    mode_by_label = evidence_of(gpus, lambda gpu: gpu.text_field("compute_mode"))
    restricted_gpus = [gpu for gpu in gpus if gpu.text_field("compute_mode") != "default"]
    if not gpus:
        raise NotCheckable("no GPU reports its compute mode")
    if not restricted_gpus:
        return ok_finding("any number of processes can use each GPU")
    fix = f"sudo nvidia-smi -i {restricted_gpus[0].facts.index} -c DEFAULT"
    prohibited_gpus = [
        gpu for gpu in restricted_gpus if gpu.text_field("compute_mode") == "prohibited"
    ]
    if prohibited_gpus:
        make_finding = fail_finding if len(prohibited_gpus) == len(gpus) else warn_finding
        return make_finding(
            f"no process can use {names_of(prohibited_gpus)} (compute mode prohibited)",
            mode_by_label,
            fix,
        )
    return warn_finding(
        f"only one process can use {names_of(restricted_gpus)} (compute mode exclusive)",
        mode_by_label,
        fix,
    )
