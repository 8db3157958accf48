"""Fake machines for tests: GPUs that NVML and CUDA number differently, and their failures."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cudakit.devices import query
from cudakit.devices.result import Device, DevicesResult
from cudakit.errors import NO_DRIVER
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
NOT_COUNTED = Unavailable("the GPU does not measure it")
NO_CUDA = Unavailable(NO_DRIVER)


def uuid(number: int) -> str:
    return f"GPU-{number}a{number}b0000-1111-2222-3333-444444444444"


def gpu(number: int, **fields: Field) -> DeviceFacts:
    """Return a GPU as NVML describes it."""
    known: dict[str, Field] = {
        "name": f"NVIDIA Card {number}",
        "compute_capability": "9.0",
        "memory_total_bytes": 80 * GIB,
        "mig_mode": False,
    }
    return DeviceFacts(number, uuid(number), f"0000:{number}5:00.0", {**known, **fields})


def cuda_gpu(index: int, number: int, **fields: Field) -> DeviceFacts:
    """Return the GPU with NVML index ``number`` as CUDA describes it."""
    known: dict[str, Field] = {"name": f"NVIDIA Card {number}", "multiprocessor_count": 132}
    return DeviceFacts(index, uuid(number), f"0000:{number}5:00.0", {**known, **fields})


def nvml(*gpus: DeviceFacts, links: tuple[Link, ...] = ()) -> NvmlView:
    return NvmlView("580.159.04", "13.580.159.04", gpus, links)


def cuda(*visible: DeviceFacts, **changes: Any) -> CudaView:
    order = tuple(str(device.uuid) for device in (*visible, *changes.get("hidden", ())))
    view = CudaView(
        driver_version=(13, 0),
        devices=visible,
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


def telemetry_of(**fields: Field) -> Telemetry:
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
class FakeMachine:
    """Returns given values; telemetry by NVML index, one per read, and the last one for all later reads."""

    nvml_view: NvmlView | Unavailable
    cuda_view: CudaView | Unavailable
    telemetry_reads: dict[int, Sequence[Telemetry | Unavailable]] = field(default_factory=dict)
    activity_read: Telemetry | Unavailable = NOT_COUNTED
    process_list: tuple[Process, ...] | Unavailable = ()
    simulated: bool = False
    _reads_done: dict[int, int] = field(default_factory=dict)

    def nvml(self, *, links: bool = False) -> NvmlView | Unavailable:
        view = self.nvml_view
        return view if links or isinstance(view, Unavailable) else replace(view, links=())

    def cuda(self) -> CudaView | Unavailable:
        return self.cuda_view

    def telemetry(
        self, device: DeviceFacts, names: Collection[str] = ()
    ) -> Telemetry | Unavailable:
        telemetry_reads = self.telemetry_reads.get(device.index, [telemetry_of()])
        number = self._reads_done.get(device.index, 0)
        self._reads_done[device.index] = number + 1
        devices_found = telemetry_reads[min(number, len(telemetry_reads) - 1)]
        if isinstance(devices_found, Unavailable) or not names:
            return devices_found
        return replace(
            devices_found, fields={n: v for n, v in devices_found.fields.items() if n in names}
        )

    def activity(
        self,
        device: DeviceFacts,  # noqa: ARG002
        names: Collection[str] = (),  # noqa: ARG002
    ) -> Telemetry | Unavailable:
        return self.activity_read

    def processes(
        self,
        device: DeviceFacts,  # noqa: ARG002
    ) -> tuple[Process, ...] | Unavailable:
        return self.process_list


def three_gpus(**changes: Any) -> FakeMachine:
    """Return a machine whose NVML indices 0, 1, 2 are the CUDA indices 2, 0, 1."""
    visible = (cuda_gpu(0, 1), cuda_gpu(1, 2), cuda_gpu(2, 0))
    machine = FakeMachine(nvml(gpu(0), gpu(1), gpu(2)), cuda(*visible))
    return replace(machine, **changes)


def read_devices(machine: FakeMachine, **options: bool) -> DevicesResult:
    return query.read_devices(machine, **options)


def one(result: DevicesResult) -> Device:
    (device,) = result.devices
    return device
