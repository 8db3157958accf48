"""Checks that CUDA starts, sees the expected devices and works (CK005, CK014, CK015, CK041 to CK044)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cudakit.devices.doctor.check import (
    Finding,
    NotCheckable,
    Status,
    combine_findings,
    count_of,
    fail_finding,
    ok_finding,
    require_fact,
    warn_finding,
)
from cudakit.devices.doctor.driver import cuda_text, driver_cuda, require_driver, require_nvml
from cudakit.devices.doctor.gpus import GpuRule, GpuState, evidence_of, gpu_states, names_of
from cudakit.devices.query import VARIABLE, match_devices, visibility
from cudakit.gpu.api.facts import RunContext
from cudakit.units import Unavailable

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
# Remedy if cuInit fails for lack of memory. cuInit allocates no device memory, so the general remedy does not
# apply.
_ADDRESS_SPACE_FIX_REMEDY = (
    "CUDA could not reserve address space: check ulimit -v and vm.overcommit_memory (CK035)"
)
_NO_DEVICE_REMEDY = (
    "check the device nodes (CK002), CUDA_VISIBLE_DEVICES (CK014), the container (CK016) "
    "and MIG (CK017)"
)

_ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
_VALID_ORDERS = ("FASTEST_FIRST", "PCI_BUS_ID")


def cuda_starts(context: RunContext) -> Finding:
    """Every CUDA program calls cuInit first; its error code shows the cause.

    A short-lived child process calls cuInit, so that cudakit's own process can still fork. Error codes:
    2 memory limits, 34 stub library, 100 no device found, 802 NVSwitch fabric not ready, 803 libcuda and
    kernel module have different versions, 804 cuda-compat on unsupported hardware, 805 to 809 MPS, 999
    often a missing /dev/nvidia-uvm. `cudakit explain CODE` explains each code.
    """
    cuda = context.cuda
    if isinstance(cuda, Unavailable):
        require_driver(context)
        return _unanswered_query(context, cuda.reason)
    supported_cuda = driver_cuda(context)
    version = "?" if supported_cuda is None else cuda_text(supported_cuda)
    libcuda = "?" if isinstance(cuda.libcuda, Unavailable) else cuda.libcuda
    evidence = {"driver's CUDA": version, "libcuda": libcuda}
    if not cuda.devices and cuda.order and not visibility(cuda.visible_devices, cuda.order).visible:
        raise NotCheckable(f"{VARIABLE} hides every device (CK014)")
    if cuda.error is not None:
        require_driver(context)
        error_code, error_name, error_text = cuda.error
        fix = _ADDRESS_SPACE_FIX_REMEDY if error_code == _OUT_OF_MEMORY else context.cuda_remedy
        summary = f"cuInit fails with {error_name} ({error_code}): {error_text}"
        return fail_finding(summary, evidence, *filter(None, [fix]))
    if not cuda.devices:
        return fail_finding("CUDA starts but finds no device", evidence, _NO_DEVICE_REMEDY)
    return ok_finding(
        f"CUDA {version} starts and sees {count_of(len(cuda.devices), 'device')}", evidence
    )


def _unanswered_query(context: RunContext, reason: str) -> Finding:
    if "cannot be loaded" not in reason:
        return fail_finding(
            f"the query of the CUDA driver failed: {reason}",
            {},
            "sudo dmesg | grep -iE 'nvrm|xid' | tail",
        )
    fix = (
        "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        if context.host.container
        else "install the driver's CUDA library (libcuda.so.1) in the version of the kernel module"
    )
    return fail_finding("libcuda.so.1 cannot be loaded", {"loader": reason}, fix)


def visible_devices(context: RunContext) -> Finding:
    """CUDA_VISIBLE_DEVICES lists the devices that CUDA programs see, in the order of their CUDA indices.

    If it is not set, all devices are visible; if it is empty, none. The list ends at the first invalid
    entry (0,2,-1,1 shows 0 and 2), and a device listed twice hides all devices. An entry is an index or
    the beginning of a UUID (GPU-8932f937, MIG-...). Indices are in CUDA's order, which equals nvidia-smi's
    only with CUDA_DEVICE_ORDER=PCI_BUS_ID. Source: CUDA Programming Guide, CUDA Environment Variables.
    """
    cuda = context.cuda
    visible_devices_value = (
        context.variables.get(VARIABLE) if isinstance(cuda, Unavailable) else cuda.visible_devices
    )
    if visible_devices_value is None:
        return ok_finding(f"{VARIABLE} is not set, so it hides no device")
    if isinstance(cuda, Unavailable) or not cuda.order:
        raise NotCheckable(f"CUDA sees no device, whatever the value of {VARIABLE} (CK005)")
    visibility_of_value = visibility(visible_devices_value, cuda.order)
    evidence = {
        VARIABLE: visible_devices_value or "(empty)",
        "visible devices": f"{len(visibility_of_value.visible)} of {len(cuda.order)}",
    }
    notes_text = "; ".join(visibility_of_value.notes)
    if not visibility_of_value.visible:
        return fail_finding(
            f"no device is visible: {notes_text}",
            evidence,
            f"unset {VARIABLE}",
            "or select a device: cudakit devices --select",
        )
    if notes_text:
        return warn_finding(
            notes_text, evidence, f"use UUIDs: export {VARIABLE}={cuda.order[0][:12]}"
        )
    return ok_finding(
        f"{VARIABLE}={visible_devices_value}: {len(visibility_of_value.visible)} of {len(cuda.order)}"
        " devices are visible",
        evidence,
    )


def device_order(context: RunContext) -> Finding:
    """CUDA numbers devices from the fastest to the slowest, nvidia-smi by PCI address.

    With equal GPUs both orders are mostly the same. With different GPUs, cuda:0 may be GPU 1 of nvidia-smi,
    and CUDA_VISIBLE_DEVICES=0 the wrong GPU. CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA use nvidia-smi's
    order. The check compares UUIDs and PCI addresses; it does not rely on the variable.
    """
    device_order_value = context.variables.get(_ORDER_VARIABLE)
    if device_order_value is not None and device_order_value not in _VALID_ORDERS:
        return warn_finding(
            f"{_ORDER_VARIABLE}={device_order_value} is not valid, so CUDA ignores it",
            {_ORDER_VARIABLE: device_order_value},
            f"export {_ORDER_VARIABLE}=PCI_BUS_ID",
        )
    cuda = context.cuda
    if isinstance(cuda, Unavailable) or not cuda.devices:
        raise NotCheckable("CUDA sees no device (CK005)")
    matched_devices = match_devices(require_nvml(context), cuda)
    device_pairs = [
        (device.cuda, device.nvml)
        for device in matched_devices
        if device.cuda and not device.is_hidden
    ]
    nvml_index_by_cuda_index = {
        cuda_device.index: nvml_device.index
        for cuda_device, nvml_device in device_pairs
        if nvml_device
    }
    evidence = {
        f"cuda:{cuda_device}": f"GPU {nvml_index_by_cuda_index[cuda_device]} of nvidia-smi"
        for cuda_device in sorted(nvml_index_by_cuda_index)
    }
    nvml_indices = [
        nvml_index_by_cuda_index[cuda_device] for cuda_device in sorted(nvml_index_by_cuda_index)
    ]
    if nvml_indices == sorted(nvml_indices):
        return ok_finding("CUDA and nvidia-smi number the devices in the same order", evidence)
    if cuda.visible_devices:
        return ok_finding(f"CUDA numbers the devices in the order of {VARIABLE}", evidence)
    return warn_finding(
        "CUDA and nvidia-smi number the devices in different orders",
        evidence,
        f"export {_ORDER_VARIABLE}=PCI_BUS_ID",
    )


# --- the self-test: each check reports one step ------------------------------------------


def context_step(context: RunContext) -> Finding:
    """Every CUDA program first creates a context on its device. A context takes a few hundred MiB.

    Creating a context fails, although cuInit succeeded, if another process uses the device in exclusive
    mode (CUDA error 46), if no memory is free (CUDA error 2), or if the device is broken.
    """
    return _check_step(context, "context", "a CUDA context can be created on {gpus}")


def compile_step(context: RunContext) -> Finding:
    """CuPy, Numba, PyTorch and cudakit compile CUDA C++ at run time with NVRTC.

    The check searches Python packages and the CUDA toolkit for NVRTC. NVRTC must support the GPU's compute
    capability (CK010).
    """
    return _check_step(context, "compile", "NVRTC compiles for {gpus}")


def kernel_step(context: RunContext) -> Finding:
    """A small kernel runs on every SM, and each of its results is compared with the expected value.

    A wrong value without an error indicates defective hardware (silent data corruption).
    """
    return _check_step(context, "kernel", "a kernel computes correct results on {gpus}")


def copy_step(context: RunContext) -> Finding:
    """Bytes copied to the device and back must be unchanged.

    The check copies from pinned host memory, over PCIe or NVLink-C2C, and within the device.
    """
    return _check_step(context, "copy", "copies to {gpus} and back are correct")


def _check_step(context: RunContext, step_name: str, success: str) -> Finding:
    """Return the finding of one step of the self-test; ``success`` has ``{gpus}`` for the tested GPUs."""
    require_driver(context)
    steps = require_fact(context.self_test)
    self_test_step = next(
        (step_result for step_result in steps if step_result.name == step_name), None
    )
    if self_test_step is None:
        raise NotCheckable("an earlier step of the self-test failed")
    if self_test_step.error:
        hints = filter(None, [self_test_step.hint])
        return fail_finding(self_test_step.error, self_test_step.details, *hints)
    gpu_names = list(self_test_step.details)
    gpus = gpu_names[0] if len(gpu_names) == 1 else f"each of the {len(gpu_names)} GPUs"
    details = ", ".join(dict.fromkeys(self_test_step.details.values()))
    return ok_finding(f"{success.format(gpus=gpus)} ({details})", self_test_step.details)


# --- Checks of the NVSwitch fabric, MIG and the compute mode (CK006, CK017, CK018) -----------------


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
