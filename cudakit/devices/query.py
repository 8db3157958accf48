"""Query the devices of a machine and merge the answers of NVML and CUDA."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from cudakit.devices.fields import field_registry
from cudakit.devices.match import MatchedDevice, match_devices
from cudakit.devices.result import Cuda, CudaFailure, Device, DevicesResult
from cudakit.devices.topology import device_pairs
from cudakit.devices.visible_devices import VARIABLE, visibility
from cudakit.errors import GpuUnavailable
from cudakit.gpu.api.facts import (
    CudaView,
    Field,
    Machine,
    NvmlView,
    Process,
    Telemetry,
    throttling_cause,
)
from cudakit.gpu.api.fields import INSTANCE_GROUP, FieldInfo, Kind
from cudakit.units import Unavailable

_NOT_IN_NVML = Unavailable("NVML does not report the device")
_NOT_IN_CUDA = Unavailable("CUDA does not see the device")
_NOT_FROM_CUDA = Unavailable("CUDA did not report it")


def open_query(machine: Machine) -> Query:
    """Find the devices of a machine.

    Raises GpuUnavailable if neither NVML nor CUDA sees a device.
    """
    # NVML is queried first, because a child process queries CUDA at the same time.
    nvml_view, cuda_view = machine.nvml(), machine.cuda()
    matched_devices = match_devices(nvml_view, cuda_view)
    if not matched_devices:
        raise _no_device_error(nvml_view, cuda_view)
    return Query(machine, nvml_view, cuda_view, matched_devices, field_registry())


def read_devices(
    machine: Machine, *, processes: bool = False, topology: bool = False
) -> DevicesResult:
    """Read all fields of the devices of a machine once.

    Raises GpuUnavailable if neither NVML nor CUDA sees a device.
    """
    return open_query(machine).read(processes=processes, topology=topology)


def _no_device_error(nvml: NvmlView | Unavailable, cuda: CudaView | Unavailable) -> GpuUnavailable:
    if isinstance(nvml, Unavailable) and isinstance(cuda, Unavailable):
        return GpuUnavailable(cuda.reason)
    nvml_reason = nvml.reason if isinstance(nvml, Unavailable) else "NVML reports none"
    if isinstance(cuda, Unavailable):
        cuda_reason = cuda.reason
    else:
        cuda_reason = f"CUDA: {cuda.error[1] if cuda.error else 'no device'}"
    return GpuUnavailable(
        f"no GPU found: {nvml_reason}; {cuda_reason}", hint="cudakit doctor finds the cause"
    )


@dataclass(frozen=True, slots=True)
class Query:
    """The devices of a machine; each read returns their current state."""

    machine: Machine
    nvml: NvmlView | Unavailable
    cuda: CudaView | Unavailable
    matched_devices: tuple[MatchedDevice, ...]
    fields: Mapping[str, FieldInfo]

    def read(
        self,
        *,
        names: Collection[str] = (),
        activity: bool = False,
        processes: bool = False,
        topology: bool = False,
    ) -> DevicesResult:
        """Read the telemetry and merge it with the facts. If there are ``names``, read only these fields.

        ``activity`` adds the activity since the previous call with ``activity``.
        """
        nvml = self.nvml
        return DevicesResult(
            simulated=self.machine.simulated,
            time_ns=time.time_ns(),
            driver_version=nvml if isinstance(nvml, Unavailable) else nvml.driver_version,
            nvml_version=nvml if isinstance(nvml, Unavailable) else nvml.nvml_version,
            cuda=_cuda_state(self.cuda),
            devices=tuple(
                self._read_device(matched_device, names, activity=activity, processes=processes)
                for matched_device in self.matched_devices
            ),
            pairs=device_pairs(self.machine.nvml(links=True), self.cuda, self.matched_devices)
            if topology
            else None,
            notes=tuple(_machine_notes(self.nvml, self.cuda)),
        )

    def _read_device(
        self, device: MatchedDevice, names: Collection[str], *, activity: bool, processes: bool
    ) -> Device:
        nvml, fields = device.nvml, dict(device.fields)
        telemetry = self.machine.telemetry(nvml, names) if nvml else self._nvml_reason
        fields |= self._fields_of(telemetry, "telemetry", names)
        if activity:
            activity_reading = self.machine.activity(nvml, names) if nvml else self._nvml_reason
            fields |= self._fields_of(activity_reading, "activity", names)
        self._add_missing(device, names, fields)
        lost_reason = telemetry.reason if nvml and isinstance(telemetry, Unavailable) else None
        notes = _device_notes(
            device, fields, lost_reason=lost_reason, visible_devices=self._visible_devices
        )
        name = fields["name"]
        return Device(
            cuda_index=self._cuda_index(device),
            nvml_index=nvml.index if nvml else _NOT_IN_NVML,
            parent=nvml.parent if nvml else None,
            uuid=device.uuid,
            pci_bus_id=device.pci_bus_id,
            name=name if isinstance(name, Unavailable) else str(name),
            hidden=device.is_hidden,
            lost=lost_reason is not None,
            notes=tuple(notes),
            fields={
                field_name: fields[field_name]
                for field_name in fields
                if not names or field_name in names
            },
            processes=self._read_processes(device) if processes else None,
        )

    def _fields_of(
        self, activity: Telemetry | Unavailable, kind: Kind, names: Collection[str]
    ) -> Mapping[str, Field]:
        """Return the fields of a reading. If the reading failed, return the reason for every field."""
        if isinstance(activity, Telemetry):
            return activity.fields
        return {field.name: activity for field in self._fields_of_kind(kind, names)}

    def _add_missing(
        self, device: MatchedDevice, names: Collection[str], fields: dict[str, Field]
    ) -> None:
        """Add the missing fields as Unavailable, with the reason."""
        fact_fields, telemetry_fields = (
            self._fields_of_kind("fact"),
            self._fields_of_kind("telemetry", names),
        )
        for field in (*fact_fields, *telemetry_fields):
            is_instance_field = field.group == INSTANCE_GROUP
            if field.name not in fields and (device.is_instance or not is_instance_field):
                fields[field.name] = self._missing_reason(device, field)

    def _fields_of_kind(self, kind: Kind, names: Collection[str] = ()) -> list[FieldInfo]:
        return [
            field
            for field in self.fields.values()
            if field.kind == kind and (not names or field.name in names)
        ]

    def _missing_reason(self, device: MatchedDevice, field: FieldInfo) -> Unavailable:
        if not field.source.startswith(("nvml", "NVML")):
            if isinstance(self.cuda, Unavailable):
                return self.cuda
            return _NOT_FROM_CUDA if device.cuda else _NOT_IN_CUDA
        return Unavailable("NVML did not report it") if device.nvml else self._nvml_reason

    def _read_processes(self, device: MatchedDevice) -> tuple[Process, ...] | Unavailable:
        if device.nvml is None:
            return _NOT_IN_NVML
        if device.nvml.fields.get("mig_mode") is True and not device.is_instance:
            return Unavailable("the GPU is in MIG mode; see its instances")
        return self.machine.processes(device.nvml)

    def _cuda_index(self, device: MatchedDevice) -> int | Unavailable:
        if device.cuda and not device.is_hidden:
            return device.cuda.index
        if device.is_hidden:
            return Unavailable(_hiding_reason(self._visible_devices))
        if isinstance(self.cuda, Unavailable):
            return self.cuda
        return Unavailable(self.cuda.error[1]) if self.cuda.error else _NOT_IN_CUDA

    @property
    def _nvml_reason(self) -> Unavailable:
        """Return the reason why NVML reports nothing about a device."""
        return self.nvml if isinstance(self.nvml, Unavailable) else _NOT_IN_NVML

    @property
    def _visible_devices(self) -> str | None:
        return self.cuda.visible_devices if isinstance(self.cuda, CudaView) else None


def _cuda_state(cuda_view: CudaView | Unavailable) -> Cuda | Unavailable:
    if isinstance(cuda_view, Unavailable):
        return cuda_view
    version = cuda_view.driver_version
    return Cuda(
        version=version if isinstance(version, Unavailable) else f"{version[0]}.{version[1]}",
        library=cuda_view.libcuda,
        error=CudaFailure(*cuda_view.error) if cuda_view.error else None,
        visible_devices=cuda_view.visible_devices,
        device_order=cuda_view.device_order,
    )


# --- notes -----------------------------------------------------------------------------------------


# Clock event reasons that do not count as throttling.
_NORMAL_REASONS = ("idle", "application clocks setting", "display clock setting")


def _machine_notes(nvml: NvmlView | Unavailable, cuda: CudaView | Unavailable) -> Iterator[str]:
    """Yield notes on missing libraries and on invalid entries of CUDA_VISIBLE_DEVICES."""
    if isinstance(nvml, Unavailable):
        yield f"no clocks, power and utilization without NVML: {nvml.reason}"
    if isinstance(cuda, Unavailable):
        yield f"no CUDA indices and limits without CUDA: {cuda.reason}"
        return
    if cuda.error:
        _, error_name, explanation = cuda.error
        yield f"CUDA does not start: {error_name}: {explanation}"
    if cuda.visible_devices is not None:
        yield from visibility(cuda.visible_devices, cuda.order).notes


def _device_notes(
    device: MatchedDevice,
    fields: dict[str, Field],
    *,
    lost_reason: str | None,
    visible_devices: str | None,
) -> Iterator[str]:
    """Yield notes on an unusual state of a device. ``lost_reason`` is not None if NVML lost the device."""
    if device.is_hidden:
        yield _hiding_reason(visible_devices)
    if lost_reason:
        yield lost_reason
    if fields.get("integrated") is True:
        yield "integrated GPU: it uses the memory of the host"
    if fields.get("mig_mode") is True and device.nvml and device.nvml.parent is None:
        yield "MIG mode is on: a CUDA process sees one MIG instance only"
    compute_mode = fields.get("compute_mode", "default")
    if isinstance(compute_mode, str) and compute_mode != "default":
        yield f"compute mode: {compute_mode}"
    reasons = fields.get("clock_event_reasons")
    throttling_reasons = (
        [throttling_cause(str(reason)) for reason in reasons if reason not in _NORMAL_REASONS]
        if isinstance(reasons, tuple)
        else []
    )
    if throttling_reasons:
        yield f"throttled: {', '.join(throttling_reasons)}"
    yield from _memory_error_note(fields)


def _hiding_reason(visible_devices: str | None) -> str:
    return (
        f"hidden by {VARIABLE}={visible_devices}"
        if visible_devices
        else f"hidden: {VARIABLE} is empty"
    )


def _memory_error_note(fields: dict[str, Field]) -> Iterator[str]:
    error_count = sum(
        field_value
        for name in ("ecc_sram_uncorrected_volatile", "ecc_dram_uncorrected_volatile")
        if isinstance(field_value := fields.get(name), int)
    )
    if error_count:
        yield f"{error_count} uncorrectable ECC errors"
    if fields.get("remapped_rows_pending") is True:
        yield "reset the GPU to remap memory rows"
    if fields.get("remapped_rows_failed") is True:
        yield "memory rows cannot be remapped"
    action = fields.get("recovery_action", "none")
    if isinstance(action, str) and action != "none":
        yield f"the driver requests: {action}"
