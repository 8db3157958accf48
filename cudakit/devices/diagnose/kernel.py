"""Checks of the device nodes and the PCI bus (CK002, CK007)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cudakit.devices.diagnose.check import (
    Finding,
    NotCheckable,
    combine_findings,
    count_of,
    fail_finding,
    ok_finding,
    warn_finding,
)
from cudakit.devices.diagnose.driver import require_driver, require_nvml
from cudakit.gpu.api.facts import DeviceFacts
from cudakit.gpu.api.run_context import PciGpu, RunContext
from cudakit.units import Unavailable

_GPU_NODE = re.compile(r"/dev/nvidia\d+")
_UVM_NODE = "/dev/nvidia-uvm"
_CONTROL_NODE = "/dev/nvidiactl"
_CONTAINER_FIX = "docker run --gpus all ...  (or --device nvidia.com/gpu=all with CDI)"
_LOG_COMMAND = "sudo dmesg | grep -iE 'nvrm|xid' | tail"
# Kernel drivers that pass a GPU through to a virtual machine.
_PASS_THROUGH_DRIVERS = ("vfio-pci", "pci-stub")


def device_nodes(context: RunContext) -> Finding:
    """Programs access the driver through the files /dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0 and so on.

    EPERM: the container's control group forbids the device. The container was started without the GPU, or
    lost it when systemd reloaded its units on the host (a known problem of cgroup v2; NVML then returns
    Unknown Error). EACCES: the user has no permission on the file. If /dev/nvidia-uvm is missing, cuInit
    fails with 999; nvidia-modprobe creates it.
    """
    if context.simulated:
        raise NotCheckable("the GPU is simulated")
    require_driver(context)
    if context.host.is_wsl or context.host.is_jetson:
        return _check_nodes_of_wsl_or_jetson(context)
    findings = [*_missing_nodes(context), *_refused_nodes(context)]
    if context.cuda_devices and findings:
        return ok_finding("the device nodes work, because CUDA does", _node_evidence(context))
    summary_if_ok = f"{count_of(len(context.driver.device_nodes), 'device node')} can be opened"
    return combine_findings(findings, otherwise=ok_finding(summary_if_ok, _node_evidence(context)))


def _check_nodes_of_wsl_or_jetson(context: RunContext) -> Finding:
    refused_nodes = [node for node in context.driver.device_nodes if node.error]
    if refused_nodes:
        return fail_finding(
            f"{refused_nodes[0].path} cannot be opened ({refused_nodes[0].error})",
            _node_evidence(context),
            "sudo usermod -aG video,render $USER, then log in again",
        )
    return ok_finding("the device nodes can be opened", _node_evidence(context))


def _missing_nodes(context: RunContext) -> Iterator[Finding]:
    present_paths = {node.path for node in context.driver.device_nodes}
    gpu_paths = [node_path for node_path in present_paths if _GPU_NODE.fullmatch(node_path)]
    if _CONTROL_NODE not in present_paths or not gpu_paths:
        missing_path = _CONTROL_NODE if _CONTROL_NODE not in present_paths else "/dev/nvidia0"
        if context.host.container:
            yield fail_finding(
                f"the container was started without a GPU: {missing_path} does not exist",
                _node_evidence(context),
                _CONTAINER_FIX,
            )
        else:
            yield fail_finding(
                f"{missing_path} does not exist",
                _node_evidence(context),
                "sudo nvidia-modprobe -c 0 -u",
                "or: sudo nvidia-smi",
            )
    elif _UVM_NODE not in present_paths:
        fix = _CONTAINER_FIX if context.host.container else "sudo nvidia-modprobe -u -c 0"
        yield fail_finding(
            f"{_UVM_NODE} does not exist, so CUDA cannot start (999)", _node_evidence(context), fix
        )


def _refused_nodes(context: RunContext) -> Iterator[Finding]:
    for node in context.driver.device_nodes:
        if not node.error or not (
            _GPU_NODE.fullmatch(node.path) or node.path in (_CONTROL_NODE, _UVM_NODE)
        ):
            continue
        evidence = {node.path: f"{node.error} ({node.mode})"}
        if node.error == "EPERM" and context.host.container:
            yield fail_finding(
                "the container has no permission to use the GPU (EPERM)",
                evidence,
                "restart the container",
                "permanently, on the host: nvidia-ctk system create-dev-char-symlinks --create-all, "
                "or start containers with CDI (--device nvidia.com/gpu=all)",
            )
        elif node.error in ("EACCES", "EPERM"):
            yield fail_finding(
                f"no permission to open {node.path} ({node.error})",
                evidence,
                f"join the group of the file (ls -l {node.path}): sudo usermod -aG video $USER",
            )
        else:
            yield fail_finding(
                f"{node.path} cannot be opened ({node.error}): the driver cannot access the device",
                evidence,
                _LOG_COMMAND,
            )


def _node_evidence(context: RunContext) -> dict[str, str]:
    return {
        node.path: node.error or f"can be opened ({node.mode})"
        for node in context.driver.device_nodes
    } or {"/dev/nvidia*": "not found"}


def gpus_on_bus(context: RunContext) -> Finding:
    """NVML should report every NVIDIA GPU that is on the PCI bus.

    The registers of a GPU that has fallen off the bus read as all ones (revision ff in lspci), and the
    kernel log usually has an Xid 79; causes are power, heat or a loose card. A GPU that the driver could
    not initialize is on the bus but not in NVML. A container sees the bus of its host, but only its own
    GPUs in NVML.
    """
    require_driver(context)
    bus_gpus = [gpu for gpu in context.driver.pci_gpus if gpu.driver not in _PASS_THROUGH_DRIVERS]
    failed_addresses = [gpu.address for gpu in bus_gpus if gpu.is_gone]
    if failed_addresses:
        return fail_finding(
            f"a GPU has fallen off the bus: {', '.join(failed_addresses)}",
            {"revision": "0xff"},
            "reboot; if it returns, check power, cooling and the PCIe slot (CK033 shows Xid errors)",
        )
    gpus = [device for device in require_nvml(context).devices if device.parent is None]
    lost_addresses = {
        f"GPU {gpu.index}": gpu.uuid.reason for gpu in gpus if isinstance(gpu.uuid, Unavailable)
    }
    if lost_addresses:
        return fail_finding(
            f"NVML cannot access {', '.join(lost_addresses)}", lost_addresses, _LOG_COMMAND
        )
    if bus_gpus:
        return _compare_with_bus(context, bus_gpus, gpus)
    if not gpus:
        return fail_finding("NVML answers but reports no GPU", {}, _LOG_COMMAND)
    raise NotCheckable("the PCI bus cannot be read here")


def _compare_with_bus(
    context: RunContext, bus_gpus: list[PciGpu], nvml_gpus: list[DeviceFacts]
) -> Finding:
    nvml_addresses = {
        _without_leading_zeros(gpu.pci_bus_id)
        for gpu in nvml_gpus
        if isinstance(gpu.pci_bus_id, str)
    }
    missing_gpus = [
        gpu for gpu in bus_gpus if _without_leading_zeros(gpu.address) not in nvml_addresses
    ]
    if not missing_gpus:
        return ok_finding(f"NVML reports every GPU on the PCI bus ({len(bus_gpus)})")
    evidence = {gpu.address: gpu.driver or "no driver" for gpu in missing_gpus}
    if context.host.container and nvml_gpus:
        return ok_finding(
            f"this container has {len(nvml_gpus)} of the host's {len(bus_gpus)} GPUs", evidence
        )
    make_finding = warn_finding if nvml_gpus else fail_finding
    return make_finding(
        f"the driver did not initialize {len(missing_gpus)} of {len(bus_gpus)} GPUs",
        evidence,
        _LOG_COMMAND,
    )


def _without_leading_zeros(address: str) -> str:
    # The PCI domain has 4 or 8 digits, depending on the source of the address.
    domain, _, suffix = address.lower().partition(":")
    return f"{int(domain, 16):x}:{suffix}"
