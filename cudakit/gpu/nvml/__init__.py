"""Read facts, telemetry, processes and links of GPUs through NVML, with nvidia-ml-py (``pynvml``).

Nothing is changed and no CUDA context is created; a process that has used NVML can still fork. A field that
NVML cannot read is Unavailable with the reason; the other fields are still read.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from cudakit.gpu.api.facts import DeviceFacts, Link, NvmlView, Process, Telemetry
from cudakit.gpu.nvml.activity import Activity
from cudakit.gpu.nvml.links import links
from cudakit.gpu.nvml.processes import processes
from cudakit.gpu.nvml.reader import INVALID_ARGUMENT, NOT_SUPPORTED, UNKNOWN, Call, Reader
from cudakit.gpu.nvml.readings import (
    FACT_READINGS,
    INSTANCE_READINGS,
    OLD_MEMORY_READINGS,
    TELEMETRY_READINGS,
)
from cudakit.units import Unavailable

_WSL_REASONS = {UNKNOWN: "the WSL driver does not report it (NVML: Unknown Error)"}
_NOT_FOR_MIG = "not reported for a MIG instance: see its GPU"
# Neither a MIG instance nor its GPU has a utilization (nvml.h, nvmlDeviceGetUtilizationRates).
_NO_MIG_UTILIZATION = Unavailable("utilization is not counted where MIG is on")
_MIG_REASONS = {NOT_SUPPORTED: _NOT_FOR_MIG, INVALID_ARGUMENT: _NOT_FOR_MIG}


def open_nvml(lib: Any = None, *, is_wsl: bool | None = None) -> Nvml | Unavailable:
    """Initialize NVML, or return why it fails. ``lib`` replaces pynvml, ``is_wsl`` the detection of WSL."""
    if lib is None:
        try:
            lib = import_module("pynvml")
        except ImportError:
            return Unavailable("nvidia-ml-py is not installed: pip install nvidia-ml-py")
    try:
        lib.nvmlInit()
    except lib.NVMLError as error:
        return Unavailable(_init_failure(error))
    runs_in_wsl = Path("/dev/dxg").exists() if is_wsl is None else is_wsl
    return Nvml(lib, _WSL_REASONS if runs_in_wsl else {})


def _init_failure(error: Any) -> str:
    # The nvmlReturn_t values that nvmlInit returns (nvml.h).
    return {
        4: "no permission to open /dev/nvidia*",
        9: "the NVIDIA kernel driver is not loaded",
        12: "libnvidia-ml.so.1 (NVML) cannot be loaded",
        18: "the kernel driver and libnvidia-ml have different versions",
    }.get(error.value, f"NVML cannot be initialized: {error}")


@dataclass(slots=True)
class Nvml:
    """The initialized NVML; it stays initialized until the process ends."""

    lib: Any
    reasons: Mapping[int, str]  # texts by error code, which replace the default texts
    _handles: dict[tuple[int | None, int], Any] = field(default_factory=dict)
    _activity_by_device: dict[tuple[int | None, int], Activity] = field(default_factory=dict)

    def view(self) -> NvmlView:
        """Return the devices with their constant facts, without links."""
        reader = Reader(self.lib, None)
        return NvmlView(
            driver_version=reader.attempt(self.lib.nvmlSystemGetDriverVersion),
            nvml_version=reader.attempt(self.lib.nvmlSystemGetNVMLVersion),
            devices=tuple(self._devices()),
            links=(),
        )

    def capabilities(self) -> frozenset[tuple[int, int]] | Unavailable:
        """Return the compute capabilities of all GPUs; Unavailable if one cannot be read."""
        capabilities = set()
        for index in range(self._device_count()):
            reader = Reader(self.lib, None, self.reasons)
            handle = reader.attempt(partial(self.lib.nvmlDeviceGetHandleByIndex, index))
            if isinstance(handle, Unavailable):
                return handle
            capability = reader.attempt(
                partial(self.lib.nvmlDeviceGetCudaComputeCapability, handle)
            )
            if isinstance(capability, Unavailable):
                return capability
            major, minor = capability
            capabilities.add((major, minor))
        return frozenset(capabilities)

    def links(self, view: NvmlView) -> tuple[Link, ...]:
        """Return the links between the GPUs of a view."""
        gpus = [device for device in view.devices if device.parent is None]
        return tuple(
            links(self.lib, {gpu.index: self._handles.get((None, gpu.index)) for gpu in gpus})
        )

    def telemetry(
        self, device: DeviceFacts, names: Collection[str] = ()
    ) -> Telemetry | Unavailable:
        """Read the telemetry, limited to ``names``; Unavailable if the device is lost."""
        reader = self._reader(device)
        if isinstance(reader, Unavailable):
            return reader
        fields = reader.read(TELEMETRY_READINGS, names)
        if isinstance(fields.get("memory_used_bytes"), Unavailable) and not reader.is_lost:
            fields |= reader.read(OLD_MEMORY_READINGS, names)
        if reader.is_lost:
            return Unavailable("the GPU has fallen off the bus")
        return Telemetry(
            time.time_ns(),
            {
                name: _NO_MIG_UTILIZATION
                if name.startswith("utilization_") and value == Unavailable(_NOT_FOR_MIG)
                else value
                for name, value in fields.items()
            },
        )

    def activity(self, device: DeviceFacts, names: Collection[str] = ()) -> Telemetry | Unavailable:
        """Read the activity since the previous call, limited to ``names``."""
        reader = self._reader(device)
        if isinstance(reader, Unavailable):
            return reader
        key = (device.parent, device.index)
        if key not in self._activity_by_device:
            parent_handle = (
                self._handles.get((None, device.parent)) if device.parent is not None else None
            )
            self._activity_by_device[key] = Activity(
                parent_handle or reader.handle, _gpu_instance_id(device)
            )
        return self._activity_by_device[key].since_last(reader, names)

    def processes(self, device: DeviceFacts) -> tuple[Process, ...] | Unavailable:
        """Return the processes that use a device."""
        reader = self._reader(device)
        return reader if isinstance(reader, Unavailable) else processes(reader)

    def _devices(self) -> Iterator[DeviceFacts]:
        for index in range(self._device_count()):
            facts = self._gpu(index)
            yield facts
            if facts.fields.get("mig_mode") is True:
                yield from self._instances(facts)

    def _device_count(self) -> int:
        device_count = Reader(self.lib, None).attempt(self.lib.nvmlDeviceGetCount)
        return 0 if isinstance(device_count, Unavailable) else int(device_count)

    def _gpu(self, index: int) -> DeviceFacts:
        reader = Reader(self.lib, None, self.reasons)
        handle = reader.attempt(lambda: self.lib.nvmlDeviceGetHandleByIndex(index))
        if isinstance(handle, Unavailable):
            return DeviceFacts(index, uuid=handle, pci_bus_id=handle, fields={})
        self._handles[None, index] = reader.handle = handle
        return DeviceFacts(
            index,
            uuid=reader.result(Call("nvmlDeviceGetUUID")),
            pci_bus_id=_pci_address(reader.result(Call("nvmlDeviceGetPciInfo"))),
            fields=reader.read(FACT_READINGS),
        )

    def _instances(self, gpu: DeviceFacts) -> Iterator[DeviceFacts]:
        parent_handle = self._handles[None, gpu.index]
        max_instances = gpu.fields.get("mig_instances_max")
        for index in range(max_instances if isinstance(max_instances, int) else 0):
            reader = Reader(self.lib, None, {**self.reasons, **_MIG_REASONS})
            get_handle = partial(self.lib.nvmlDeviceGetMigDeviceHandleByIndex, parent_handle, index)
            handle = reader.attempt(get_handle)
            if isinstance(handle, Unavailable):
                continue  # no MIG instance has this index
            self._handles[gpu.index, index] = reader.handle = handle
            yield DeviceFacts(
                index,
                uuid=reader.result(Call("nvmlDeviceGetUUID")),
                pci_bus_id=gpu.pci_bus_id,
                fields=reader.read({**FACT_READINGS, **INSTANCE_READINGS}),
                parent=gpu.index,
            )

    def _reader(self, device: DeviceFacts) -> Reader | Unavailable:
        handle = self._handles.get((device.parent, device.index))
        if handle is None:
            uuid = device.uuid
            return (
                uuid
                if isinstance(uuid, Unavailable)
                else Unavailable("NVML does not report the device")
            )
        return Reader(
            self.lib,
            handle,
            self.reasons if device.parent is None else {**self.reasons, **_MIG_REASONS},
        )


def _gpu_instance_id(device: DeviceFacts) -> int | None:
    instance_id = device.fields.get("gpu_instance_id")
    return instance_id if isinstance(instance_id, int) and device.parent is not None else None


def _pci_address(info: Any) -> str | Unavailable:
    """Return a PCI address with four digits of the domain, as Linux and CUDA write it; NVML writes eight."""
    if isinstance(info, Unavailable):
        return info
    text = (info.busId.decode() if isinstance(info.busId, bytes) else str(info.busId)).lower()
    domain, _, remainder = text.partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{remainder}"
