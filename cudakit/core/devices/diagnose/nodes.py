"""Can this process reach the driver, and the driver every GPU?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cudakit.core.devices.diagnose.check import CannotTell, Finding, fail, ok, together, warn
from cudakit.core.devices.diagnose.driver import require_driver
from cudakit.gpu.api.run_context import DeviceNode, PciGpu, RunContext
from cudakit.units import Unavailable

_GPU = re.compile(r"/dev/nvidia\d+")
_UVM = "/dev/nvidia-uvm"
_CONTROL = "/dev/nvidiactl"
_START = "docker run --gpus all ...  (or --device nvidia.com/gpu=all with CDI)"
_LOG = "sudo dmesg | grep -iE 'nvrm|xid' | tail"
# Bound to these, a GPU is meant for a virtual machine.
_PASSED_ON = ("vfio-pci", "pci-stub")


def nodes_open(c: RunContext) -> Finding:
    """A process reaches the driver through files: /dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0 ...

    EPERM means that the control group of the container forbids the device: it was started without the
    GPU, or lost it when systemd reloaded its units on the host (known of cgroup v2 with systemd; NVML
    then says Unknown Error). EACCES means that user and mode of the file do not fit. A missing
    /dev/nvidia-uvm makes cuInit fail with 999: nvidia-modprobe makes it.
    """
    if c.simulated:
        raise CannotTell("the GPU is simulated")
    require_driver(c)
    if c.host.is_wsl or c.host.is_jetson:
        return _of_other_platforms(c)
    problems = [*_missing(c), *_refused(c.driver.device_nodes, in_container=bool(_container(c)))]
    if _cuda_works(c) and problems:
        return ok("CUDA works, so the device nodes do", _shown(c))
    return together(
        problems,
        otherwise=ok(f"the device nodes can be opened ({len(c.driver.device_nodes)})", _shown(c)),
    )


def _of_other_platforms(c: RunContext) -> Finding:
    shut = [node for node in c.driver.device_nodes if node.error]
    if shut:
        return fail(
            f"{shut[0].path} cannot be opened ({shut[0].error})",
            _shown(c),
            "sudo usermod -aG video,render $USER, and log in again",
        )
    return ok("the device nodes of this platform can be opened", _shown(c))


def _missing(c: RunContext) -> Iterator[Finding]:
    there = {node.path for node in c.driver.device_nodes}
    gpus = [path for path in there if _GPU.fullmatch(path)]
    if _CONTROL not in there or not gpus:
        what = _CONTROL if _CONTROL not in there else "/dev/nvidia0"
        if _container(c):
            yield fail(
                f"the container was started without a GPU: {what} is not there", _shown(c), _START
            )
        else:
            yield fail(
                f"{what} is not there",
                _shown(c),
                "sudo nvidia-modprobe -c 0 -u",
                "or: sudo nvidia-smi",
            )
    elif _UVM not in there:
        fix = _START if _container(c) else "sudo nvidia-modprobe -u -c 0"
        yield fail(f"{_UVM} is not there, without which CUDA cannot start (999)", _shown(c), fix)


def _refused(nodes: tuple[DeviceNode, ...], *, in_container: bool) -> Iterator[Finding]:
    for node in nodes:
        if not node.error or not (_GPU.fullmatch(node.path) or node.path in (_CONTROL, _UVM)):
            continue
        seen = {node.path: f"{node.error} ({node.mode})"}
        if node.error == "EPERM" and in_container:
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


def _shown(c: RunContext) -> dict[str, str]:
    return {node.path: node.error or f"opens ({node.mode})" for node in c.driver.device_nodes} or {
        "/dev/nvidia*": "absent"
    }


def _container(c: RunContext) -> str:
    return c.host.container


def _cuda_works(c: RunContext) -> bool:
    return not isinstance(c.cuda, Unavailable) and bool(c.cuda.devices)


def every_gpu_answers(c: RunContext) -> Finding:
    """Each NVIDIA GPU on the PCI bus should be one that NVML knows.

    A GPU that fell off the bus reads as all ones (revision ff in lspci) and usually left Xid 79 in the
    kernel's log: a matter of power, heat or seating. One that the driver could not start is on the bus
    but not in NVML. A container sees the bus of its host, and only those GPUs that it was given.
    """
    require_driver(c)
    on_bus = [one for one in c.driver.pci_gpus if one.driver not in _PASSED_ON]
    gone = [one.address for one in on_bus if one.is_gone]
    if gone:
        return fail(
            f"a GPU has fallen off the bus: {', '.join(gone)}",
            {"revision": "0xff"},
            "reboot; if it comes again, look at power, cooling and seating (CK033 shows Xids)",
        )
    if isinstance(c.nvml, Unavailable):
        raise CannotTell("NVML does not answer (CK003)")
    known = [device for device in c.nvml.devices if device.parent is None]
    lost = {
        f"GPU {one.index}": one.uuid.reason for one in known if isinstance(one.uuid, Unavailable)
    }
    if lost:
        return fail(f"NVML cannot reach {', '.join(lost)}", lost, _LOG)
    if not on_bus:
        return _without_bus(len(known))
    silent = _silent(on_bus, [device.pci_bus_id for device in known])
    if not silent:
        return ok(f"NVML knows every GPU of the PCI bus ({len(on_bus)})")
    seen = {one.address: one.driver or "no driver" for one in silent}
    if _container(c) and known:
        return ok(
            f"{len(known)} of the host's {len(on_bus)} GPUs are given to this container", seen
        )
    judged = warn if known else fail
    return judged(
        f"the driver does not start {len(silent)} of {len(on_bus)} GPUs",
        seen,
        _LOG,
    )


def _without_bus(known: int) -> Finding:
    if not known:
        return fail("NVML answers and sees no GPU", {}, _LOG)
    return ok(f"NVML sees {known} GPU{'' if known == 1 else 's'}; the PCI bus is not shown here")


def _silent(on_bus: list[PciGpu], known: list[str | Unavailable]) -> list[PciGpu]:
    # The same address may be written with a domain of 4 digits or of 8.
    answering = {_short(one) for one in known if isinstance(one, str)}
    return [one for one in on_bus if _short(one.address) not in answering]


def _short(address: str) -> str:
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):x}:{rest}"
