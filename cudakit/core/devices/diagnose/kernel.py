"""Checks of device nodes, the PCI bus and the kernel log (CK002, CK007, CK033)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from cudakit.core.devices.diagnose.check import (
    Finding,
    NotCheckable,
    combine,
    fail,
    ok,
    require,
    warn,
)
from cudakit.core.devices.diagnose.driver import require_driver, require_nvml
from cudakit.gpu.api.facts import DeviceFacts
from cudakit.gpu.api.run_context import PciGpu, RunContext
from cudakit.units import Unavailable

_GPU = re.compile(r"/dev/nvidia\d+")
_UVM = "/dev/nvidia-uvm"
_CONTROL = "/dev/nvidiactl"
_START = "docker run --gpus all ...  (or --device nvidia.com/gpu=all with CDI)"
_LOG = "sudo dmesg | grep -iE 'nvrm|xid' | tail"
# Kernel drivers that pass a GPU through to a virtual machine.
_PASSED_THROUGH = ("vfio-pci", "pci-stub")


def device_nodes(c: RunContext) -> Finding:
    """A process reaches the driver through files: /dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0 ...

    EPERM means that the control group of the container forbids the device: it was started without the
    GPU, or lost it when systemd reloaded its units on the host (known of cgroup v2 with systemd; NVML
    then says Unknown Error). EACCES means that user and mode of the file do not fit. A missing
    /dev/nvidia-uvm makes cuInit fail with 999: nvidia-modprobe makes it.
    """
    if c.simulated:
        raise NotCheckable("the GPU is simulated")
    require_driver(c)
    if c.host.is_wsl or c.host.is_jetson:
        return _other_platform(c)
    problems = [*_missing_nodes(c), *_refused_nodes(c)]
    if c.cuda_devices and problems:
        return ok("CUDA works, so the device nodes do", _node_evidence(c))
    count = len(c.driver.device_nodes)
    well = ok(f"the device nodes can be opened ({count})", _node_evidence(c))
    return combine(problems, otherwise=well)


def _other_platform(c: RunContext) -> Finding:
    shut = [node for node in c.driver.device_nodes if node.error]
    if shut:
        return fail(
            f"{shut[0].path} cannot be opened ({shut[0].error})",
            _node_evidence(c),
            "sudo usermod -aG video,render $USER, and log in again",
        )
    return ok("the device nodes of this platform can be opened", _node_evidence(c))


def _missing_nodes(c: RunContext) -> Iterator[Finding]:
    there = {node.path for node in c.driver.device_nodes}
    gpus = [path for path in there if _GPU.fullmatch(path)]
    if _CONTROL not in there or not gpus:
        what = _CONTROL if _CONTROL not in there else "/dev/nvidia0"
        if c.host.container:
            yield fail(
                f"the container was started without a GPU: {what} is not there",
                _node_evidence(c),
                _START,
            )
        else:
            yield fail(
                f"{what} is not there",
                _node_evidence(c),
                "sudo nvidia-modprobe -c 0 -u",
                "or: sudo nvidia-smi",
            )
    elif _UVM not in there:
        fix = _START if c.host.container else "sudo nvidia-modprobe -u -c 0"
        yield fail(
            f"{_UVM} is not there, without which CUDA cannot start (999)", _node_evidence(c), fix
        )


def _refused_nodes(c: RunContext) -> Iterator[Finding]:
    for node in c.driver.device_nodes:
        if not node.error or not (_GPU.fullmatch(node.path) or node.path in (_CONTROL, _UVM)):
            continue
        seen = {node.path: f"{node.error} ({node.mode})"}
        if node.error == "EPERM" and c.host.container:
            yield fail(
                "the container may not use its GPU any more, or never might (EPERM)",
                seen,
                "restart the container",
                "for good, on the host: nvidia-ctk system create-dev-char-symlinks --create-all, "
                "or give devices by CDI (--device nvidia.com/gpu=all)",
            )
        elif node.error in ("EACCES", "EPERM"):
            yield fail(
                f"this user may not open {node.path} ({node.error})",
                seen,
                f"ls -l {node.path}, and join the group that may: sudo usermod -aG video $USER",
            )
        else:
            yield fail(
                f"{node.path} cannot be opened ({node.error}): the driver does not reach the device",
                seen,
                _LOG,
            )


def _node_evidence(c: RunContext) -> dict[str, str]:
    return {node.path: node.error or f"opens ({node.mode})" for node in c.driver.device_nodes} or {
        "/dev/nvidia*": "absent"
    }


def gpus_on_bus(c: RunContext) -> Finding:
    """Each NVIDIA GPU on the PCI bus should be one that NVML knows.

    A GPU that fell off the bus reads as all ones (revision ff in lspci) and usually left Xid 79 in the
    kernel's log: a matter of power, heat or seating. One that the driver could not start is on the bus
    but not in NVML. A container sees the bus of its host, and only those GPUs that it was given.
    """
    require_driver(c)
    on_bus = [one for one in c.driver.pci_gpus if one.driver not in _PASSED_THROUGH]
    gone = [one.address for one in on_bus if one.is_gone]
    if gone:
        return fail(
            f"a GPU has fallen off the bus: {', '.join(gone)}",
            {"revision": "0xff"},
            "reboot; if it comes again, look at power, cooling and seating (CK033 shows Xids)",
        )
    gpus = [device for device in require_nvml(c).devices if device.parent is None]
    lost = {
        f"GPU {one.index}": one.uuid.reason for one in gpus if isinstance(one.uuid, Unavailable)
    }
    if lost:
        return fail(f"NVML cannot reach {', '.join(lost)}", lost, _LOG)
    if on_bus:
        return _compare_with_bus(c, on_bus, gpus)
    if not gpus:
        return fail("NVML answers and sees no GPU", {}, _LOG)
    count = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}"
    return ok(f"NVML sees {count}; the PCI bus is not shown here")


def _compare_with_bus(c: RunContext, on_bus: list[PciGpu], known: list[DeviceFacts]) -> Finding:
    answering = {_normalized(one.pci_bus_id) for one in known if isinstance(one.pci_bus_id, str)}
    unknown = [one for one in on_bus if _normalized(one.address) not in answering]
    if not unknown:
        return ok(f"NVML knows every GPU of the PCI bus ({len(on_bus)})")
    seen = {one.address: one.driver or "no driver" for one in unknown}
    if c.host.container and known:
        return ok(
            f"{len(known)} of the host's {len(on_bus)} GPUs are given to this container", seen
        )
    report = warn if known else fail
    return report(f"the driver does not start {len(unknown)} of {len(on_bus)} GPUs", seen, _LOG)


def _normalized(address: str) -> str:
    # The PCI domain has 4 digits or 8.
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):x}:{rest}"


# --- CK033: the kernel log -------------------------------------------------------------------------

# "NVRM: Xid (PCI:0000:65:00): 79, pid=1234, name=python, GPU has fallen off the bus."
_XID = re.compile(r"Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")

# Errors that are mostly caused by programs (Xid Errors, the catalogue).
_PROGRAMS = {
    13: "a kernel's exception, such as an index out of range",
    31: "a kernel used an address that is not mapped",
    43: "a program was ended after an error of its own",
    45: "channels of a program were cleaned up when it ended",
    68: "an exception of the video processor",
    69: "an exception of the graphics engine",
}
# Errors of the hardware or the driver.
_HARDWARE = {
    32: "corrupted commands, often of the PCIe link",
    38: "the driver's firmware failed",
    46: "the GPU stopped processing",
    48: "memory error that could not be corrected",
    54: "auxiliary power is not connected",
    61: "internal breakpoint of the micro-controller",
    62: "internal halt of the micro-controller",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "the GPU fell off the bus",
    94: "contained memory error: the program was ended",
    95: "uncontained memory error: reset the GPU",
    109: "context switch timed out",
    110: "security fault",
    119: "the GPU's system processor did not answer",
    120: "the GPU's system processor failed",
    121: "chip-to-chip link error",
    136: "NVLink error",
    140: "memory error that could not be corrected",
    143: "the GPU could not be initialised",
    144: "NVLink error",
    145: "NVLink error",
    149: "NVLink error",
}
# Notices, which are no failures by themselves.
_NOTICES = {
    63: "a memory row was remapped or a page retired: see CK028",
    92: "many corrected memory errors",
    154: "the recovery that the driver asks for has changed: see CK028",
}
_CATALOGUE = "https://docs.nvidia.com/deploy/xid-errors/"


def xids(c: RunContext) -> Finding:
    """Xids are the driver's error messages in the kernel's log, each kind with a number.

    13, 31, 43 and 45 are mostly bugs of programs; 48, 63, 64, 92, 94 and 95 tell of memory, 74 of
    NVLink, 79 that the GPU fell off the bus, 119 and 120 that its own processor failed. The log goes
    back to the start of the machine or as far as its buffer lasts, and reading it needs privilege on most
    systems. The catalogue: https://docs.nvidia.com/deploy/xid-errors/
    """
    log = require(c.driver.kernel_log)
    matches = (_XID.search(line) for line in log if "Xid" in line)
    found = Counter((match[1], int(match[2])) for match in matches if match)
    if not found:
        return ok("the kernel's log tells of no Xid")
    meanings = {**_PROGRAMS, **_NOTICES, **_HARDWARE}
    evidence = {
        f"Xid {number} on {where}": f"{count}×, {meanings.get(number, 'see the catalogue')}"
        for (where, number), count in sorted(found.items())
    }
    numbers = sorted({number for _, number in found})
    listed = ", ".join(map(str, numbers))
    if all(number in _PROGRAMS for number in numbers):
        return warn(
            f"programs made errors on a GPU since the machine started (Xid {listed})",
            evidence,
            "compute-sanitizer PROGRAM shows the kernel and the line",
        )
    report = fail if any(number in _HARDWARE for number in numbers) else warn
    return report(
        f"the driver has told of errors of a GPU since the machine started (Xid {listed})",
        evidence,
        f"look the numbers up: {_CATALOGUE}",
        "if they come again after a reset or reboot, have the GPU tested (dcgmi diag -r 3)",
    )
