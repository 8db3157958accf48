"""Machines made for tests: GPUs that NVML and CUDA number differently, and what goes wrong with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cudakit.core.devices.query import devices
from cudakit.core.devices.result import Device, DevicesResult
from cudakit.gpu.api.facts import (
    CudaView,
    DeviceFacts,
    Field,
    Link,
    NvmlView,
    Process,
    Telemetry,
)
from cudakit.units import Unavailable

GIB = 2**30
NO_NVML = Unavailable("the library of NVML cannot be loaded")
NOT_COUNTED = Unavailable("the GPU does not count it")
NO_CUDA = Unavailable("the CUDA driver's library cannot be loaded")


def uuid(number: int) -> str:
    return f"GPU-{number}a{number}b0000-1111-2222-3333-444444444444"


def gpu(number: int, **fields: Field) -> DeviceFacts:
    """Make NVML's view of a GPU."""
    known: dict[str, Field] = {
        "name": f"NVIDIA Card {number}",
        "compute_capability": "9.0",
        "memory_total_bytes": 80 * GIB,
        "mig_mode": False,
    }
    return DeviceFacts(number, uuid(number), f"0000:{number}5:00.0", {**known, **fields})


def seen(index: int, number: int, **fields: Field) -> DeviceFacts:
    """Make CUDA's view of the GPU that NVML calls ``number``."""
    known: dict[str, Field] = {"name": f"NVIDIA Card {number}", "multiprocessor_count": 132}
    return DeviceFacts(index, uuid(number), f"0000:{number}5:00.0", {**known, **fields})


def nvml(*gpus: DeviceFacts, links: tuple[Link, ...] = ()) -> NvmlView:
    return NvmlView("580.159.04", "13.580.159.04", gpus, links)


def cuda(*shown: DeviceFacts, **changes: Any) -> CudaView:
    order = tuple(str(device.uuid) for device in (*shown, *changes.get("hidden", ())))
    view = CudaView(
        driver_version=(13, 0),
        devices=shown,
        hidden=(),
        peer_access=(),
        peer_atomics=(),
        error=None,
        libcuda="/usr/lib/libcuda.so.580.159.04",
        visible_devices=None,
        device_order=None,
        order=order,
    )
    return replace(view, **changes)


def moving(**fields: Field) -> Telemetry:
    known: dict[str, Field] = {
        "memory_used_bytes": 10 * GIB,
        "memory_free_bytes": 70 * GIB,
        "utilization_gpu_percent": 30,
        "temperature_gpu_c": 50,
        "power_draw_w": 300.0,
        "power_limit_enforced_w": 700.0,
        "clock_event_reasons": (),
    }
    return Telemetry(1, {**known, **fields})


@dataclass
class MadeMachine:
    """Says what it is made to say; telemetry is by NVML index, one for each look, the last for ever."""

    of_nvml: NvmlView | Unavailable
    of_cuda: CudaView | Unavailable
    looks: dict[int, Sequence[Telemetry | Unavailable]] = field(default_factory=dict)
    doing: Telemetry | Unavailable = NOT_COUNTED
    users: tuple[Process, ...] | Unavailable = ()
    simulated: bool = False
    _looked: dict[int, int] = field(default_factory=dict)

    def nvml(self, *, links: bool = False) -> NvmlView | Unavailable:
        view = self.of_nvml
        return view if links or isinstance(view, Unavailable) else replace(view, links=())

    def cuda(self) -> CudaView | Unavailable:
        return self.of_cuda

    def telemetry(
        self, device: DeviceFacts, names: Collection[str] = ()
    ) -> Telemetry | Unavailable:
        looks = self.looks.get(device.index, [moving()])
        number = self._looked.get(device.index, 0)
        self._looked[device.index] = number + 1
        found = looks[min(number, len(looks) - 1)]
        if isinstance(found, Unavailable) or not names:
            return found
        return replace(found, fields={n: v for n, v in found.fields.items() if n in names})

    def activity(
        self,
        device: DeviceFacts,  # noqa: ARG002
        names: Collection[str] = (),  # noqa: ARG002
    ) -> Telemetry | Unavailable:
        return self.doing

    def processes(
        self,
        device: DeviceFacts,  # noqa: ARG002
    ) -> tuple[Process, ...] | Unavailable:
        return self.users


def crossed(**changes: Any) -> MadeMachine:
    """Make a machine of three GPUs that CUDA numbers 2, 0, 1."""
    shown = (seen(0, 1), seen(1, 2), seen(2, 0))
    machine = MadeMachine(nvml(gpu(0), gpu(1), gpu(2)), cuda(*shown))
    return replace(machine, **changes)


def looked(machine: MadeMachine, **options: bool) -> DevicesResult:
    return devices(machine, **options)


def one(result: DevicesResult) -> Device:
    (device,) = result.devices
    return device
