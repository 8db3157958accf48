"""Checks that CUDA starts, sees the expected devices and works (CK005, CK014, CK015, CK041 to CK044)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cudakit.devices.doctor.check import (
    Finding,
    NotCheckable,
    Status,
    count_of,
    fail,
    ok,
    require_fact,
    warn,
)
from cudakit.devices.doctor.driver import cuda_text, driver_cuda, require_driver, require_nvml
from cudakit.devices.doctor.gpus import (
    GpuRule,
    GpuState,
    evidence_of,
    gpu_states,
    names_of,
    reporting_gpus,
)
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
        if "cannot be loaded" not in cuda.reason:
            fix = "sudo dmesg | grep -iE 'nvrm|xid' | tail"
            return fail(f"the query of the CUDA driver failed: {cuda.reason}", {}, fix)
        fix = (
            "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            if context.host.container
            else "install the driver's CUDA library (libcuda.so.1) in the version of the kernel module"
        )
        return fail("libcuda.so.1 cannot be loaded", {"loader": cuda.reason}, fix)
    supported_cuda = driver_cuda(context)
    version = "?" if supported_cuda is None else cuda_text(supported_cuda)
    libcuda = "?" if isinstance(cuda.libcuda, Unavailable) else cuda.libcuda
    evidence = {"driver's CUDA": version, "libcuda": libcuda}
    if not cuda.devices and cuda.order and not visibility(cuda.visible_devices, cuda.order).visible:
        raise NotCheckable(f"{VARIABLE} hides every device (CK014)")
    if cuda.error is not None:
        require_driver(context)
        code, name, text = cuda.error
        remedy = _ADDRESS_SPACE_FIX_REMEDY if code == _OUT_OF_MEMORY else context.cuda_remedy
        return fail(f"cuInit fails with {name} ({code}): {text}", evidence, *filter(None, [remedy]))
    if not cuda.devices:
        return fail("CUDA starts but finds no device", evidence, _NO_DEVICE_REMEDY)
    return ok(f"CUDA {version} starts and sees {count_of(len(cuda.devices), 'device')}", evidence)


def visible_devices(context: RunContext) -> Finding:
    """CUDA_VISIBLE_DEVICES lists the devices that CUDA programs see, in the order of their CUDA indices.

    If it is not set, all devices are visible; if it is empty, none. The list ends at the first invalid
    entry (0,2,-1,1 shows 0 and 2), and a device listed twice hides all devices. An entry is an index or
    the beginning of a UUID (GPU-8932f937, MIG-...). Indices are in CUDA's order, which equals nvidia-smi's
    only with CUDA_DEVICE_ORDER=PCI_BUS_ID. Source: CUDA Programming Guide, CUDA Environment Variables.
    """
    cuda = context.cuda
    value = (
        context.variables.get(VARIABLE) if isinstance(cuda, Unavailable) else cuda.visible_devices
    )
    if value is None:
        return ok(f"{VARIABLE} is not set, so it hides no device")
    if isinstance(cuda, Unavailable) or not cuda.order:
        raise NotCheckable(f"CUDA sees no device, whatever the value of {VARIABLE} (CK005)")
    shown = visibility(value, cuda.order)
    count_text = f"{len(shown.visible)} of {len(cuda.order)}"
    evidence = {VARIABLE: value or "(empty)", "visible devices": count_text}
    notes = "; ".join(shown.notes)
    if not shown.visible:
        fixes = (f"unset {VARIABLE}", "or select a device: cudakit devices --select")
        return fail(f"no device is visible: {notes}", evidence, *fixes)
    if notes:
        return warn(notes, evidence, f"use UUIDs: export {VARIABLE}={cuda.order[0][:12]}")
    return ok(f"{VARIABLE}={value}: {count_text} devices are visible", evidence)


def device_order(context: RunContext) -> Finding:
    """CUDA numbers devices from the fastest to the slowest, nvidia-smi by PCI address.

    With equal GPUs both orders are mostly the same. With different GPUs, cuda:0 may be GPU 1 of nvidia-smi,
    and CUDA_VISIBLE_DEVICES=0 the wrong GPU. CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA use nvidia-smi's
    order. The check compares UUIDs and PCI addresses; it does not rely on the variable.
    """
    order = context.variables.get(_ORDER_VARIABLE)
    fix = f"export {_ORDER_VARIABLE}=PCI_BUS_ID"
    if order is not None and order not in _VALID_ORDERS:
        summary = f"{_ORDER_VARIABLE}={order} is not valid, so CUDA ignores it"
        return warn(summary, {_ORDER_VARIABLE: order}, fix)
    cuda = context.cuda
    if isinstance(cuda, Unavailable) or not cuda.devices:
        raise NotCheckable("CUDA sees no device (CK005)")
    index_pairs = sorted(
        (device.cuda.index, device.nvml.index)
        for device in match_devices(require_nvml(context), cuda)
        if device.cuda and device.nvml and not device.is_hidden
    )
    evidence = {f"cuda:{first}": f"GPU {second} of nvidia-smi" for first, second in index_pairs}
    nvml_indices = [nvml_index for _, nvml_index in index_pairs]
    if nvml_indices == sorted(nvml_indices):
        return ok("CUDA and nvidia-smi number the devices in the same order", evidence)
    if cuda.visible_devices:
        return ok(f"CUDA numbers the devices in the order of {VARIABLE}", evidence)
    return warn("CUDA and nvidia-smi number the devices in different orders", evidence, fix)


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
    step = next((step for step in require_fact(context.self_test) if step.name == step_name), None)
    if step is None:
        raise NotCheckable("an earlier step of the self-test failed")
    if step.error:
        return fail(step.error, step.details, *filter(None, [step.hint]))
    names = list(step.details)
    gpus = names[0] if len(names) == 1 else f"each of the {len(names)} GPUs"
    details = ", ".join(dict.fromkeys(step.details.values()))
    return ok(f"{success.format(gpus=gpus)} ({details})", step.details)


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
        return ok("no GPU needs an NVSwitch fabric")
    states = evidence_of(gpus, _fabric_state)
    affected_gpus = [gpu for gpu in gpus if gpu.text_field("fabric_state") != "completed"] or [
        gpu for gpu in gpus if (gpu.text_field("fabric_status") or "").startswith("error")
    ]
    if not affected_gpus:
        return ok("the NVSwitch fabric is ready", states)
    names = names_of(affected_gpus)
    if context.cuda_devices and len(gpus) == 1:
        return ok(f"{names} is not in an NVSwitch fabric; a single GPU needs none", states)
    if context.cuda_devices:
        return warn(
            f"CUDA works, but {names} cannot reach other GPUs over NVSwitch",
            states,
            "end all GPU processes, then: sudo systemctl restart nvidia-fabricmanager",
        )
    if isinstance(context.processes, Unavailable):
        manager = context.processes.reason
    else:
        manager = "running" if "nv-fabricmanage" in context.processes else "not running here"
    return fail(
        f"the NVSwitch fabric is not ready on {names}",
        {**states, "nv-fabricmanager": manager},
        "sudo systemctl enable --now nvidia-fabricmanager",
        "if it does not start, install the version of nvidia-fabricmanager that equals the driver's",
        "in a virtual machine the host sets up the fabric: contact its administrator",
    )


def _fabric_state(gpu: GpuState) -> str:
    status = gpu.text_field("fabric_status")
    return f"{gpu.text_field('fabric_state')}{f', {status}' if status else ''}"


_PENDING_MIG_CHANGE = GpuRule(
    Status.WARN,
    lambda gpu: gpu.flag_field("mig_mode_pending") not in (None, gpu.flag_field("mig_mode")),
    "{gpus}: a change of MIG mode takes effect at the next reset",
    ("end all processes on the GPU, then: sudo nvidia-smi -i {index} --gpu-reset",),
    lambda gpu: "on, off after a reset" if gpu.flag_field("mig_mode") else "off, on after a reset",
)


def mig_instances(context: RunContext) -> Iterator[Finding]:
    """CUDA uses a GPU in MIG mode only through its instances. Without an instance, CUDA does not see the GPU.

    MIG divides a GPU into instances that are separate devices. The mode survives a reboot, the instances
    do not and must be created again. A change of the mode takes effect at the next reset of the GPU.
    Source: NVIDIA Multi-Instance GPU User Guide.
    """
    gpus = gpu_states(context)
    mig_gpus = [gpu for gpu in gpus if gpu.flag_field("mig_mode")]
    instance_counts = Counter(device.parent for device in require_nvml(context).devices)
    evidence = {
        gpu.label: count_of(instance_counts[gpu.facts.index], "instance") for gpu in mig_gpus
    }
    empty_gpus = [gpu for gpu in mig_gpus if not instance_counts[gpu.facts.index]]
    if empty_gpus:
        index = empty_gpus[0].facts.index
        make_finding = fail if len(empty_gpus) == len(gpus) else warn
        yield make_finding(
            f"{names_of(empty_gpus)}: MIG mode is on without any instance, so CUDA cannot use the GPU",
            {gpu.label: evidence[gpu.label] for gpu in empty_gpus},
            f"create instances: sudo nvidia-smi mig -i {index} -lgip, then -cgi PROFILE -C",
            f"or turn MIG mode off: sudo nvidia-smi -i {index} -mig 0",
        )
    yield from _PENDING_MIG_CHANGE.findings(gpus)
    if mig_gpus:
        yield ok(f"{names_of(mig_gpus)} in MIG mode, with instances", evidence)
    else:
        yield ok("no GPU is in MIG mode")


def compute_mode(context: RunContext) -> Finding:
    """The compute mode limits how many processes can use a GPU: any number, one, or none.

    In exclusive mode a second process, such as a data loader or debugger, fails with 46
    (CUDA_ERROR_DEVICE_UNAVAILABLE, "all CUDA-capable devices are busy or unavailable"). With MPS,
    NVIDIA recommends exclusive mode, but does not require it. In prohibited mode no process can use the GPU.
    """
    gpus = reporting_gpus(context, ("compute_mode",), otherwise="no GPU reports its compute mode")
    modes = evidence_of(gpus, lambda gpu: gpu.text_field("compute_mode"))
    restricted = [gpu for gpu in gpus if gpu.text_field("compute_mode") != "default"]
    if not restricted:
        return ok("any number of processes can use each GPU")
    fix = f"sudo nvidia-smi -i {restricted[0].facts.index} -c DEFAULT"
    prohibited = [gpu for gpu in restricted if gpu.text_field("compute_mode") == "prohibited"]
    if prohibited:
        make_finding = fail if len(prohibited) == len(gpus) else warn
        summary = f"no process can use {names_of(prohibited)} (compute mode prohibited)"
        return make_finding(summary, modes, fix)
    summary = f"only one process can use {names_of(restricted)} (compute mode exclusive)"
    return warn(summary, modes, fix)
