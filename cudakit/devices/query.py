"""Query the devices of a machine and merge the answers of NVML and CUDA."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from cudakit.devices.result import Cuda, CudaFailure, Device, DevicesResult, Pair, field_registry
from cudakit.errors import GpuUnavailable
from cudakit.gpu.api.facts import (
    INSTANCE_GROUP,
    CudaView,
    DeviceFacts,
    Field,
    FieldInfo,
    Kind,
    Link,
    Machine,
    NvmlView,
    Process,
    Telemetry,
    throttling_cause,
)
from cudakit.units import Unavailable

_NOT_IN_NVML = Unavailable("NVML does not report the device")
_NOT_IN_CUDA = Unavailable("CUDA does not see the device")
_NOT_FROM_CUDA = Unavailable("CUDA did not report it")


def open_query(machine: Machine) -> Query:
    """Find the devices of a machine.

    Raises GpuUnavailable if neither NVML nor CUDA sees a device.
    """
    # NVML is queried first, because a child process queries CUDA at the same time.
    nvml, cuda = machine.nvml(), machine.cuda()
    matched_devices = match_devices(nvml, cuda)
    if matched_devices:
        return Query(machine, nvml, cuda, matched_devices, field_registry())
    if isinstance(nvml, Unavailable) and isinstance(cuda, Unavailable):
        raise GpuUnavailable(cuda.reason)
    nvml_reason = nvml.reason if isinstance(nvml, Unavailable) else "NVML reports none"
    if isinstance(cuda, Unavailable):
        cuda_reason = cuda.reason
    else:
        cuda_reason = f"CUDA: {cuda.error[1] if cuda.error else 'no device'}"
    raise GpuUnavailable(
        f"no GPU found: {nvml_reason}; {cuda_reason}", hint="cudakit doctor finds the cause"
    )


def read_devices(
    machine: Machine, *, processes: bool = False, topology: bool = False
) -> DevicesResult:
    """Read all fields of the devices of a machine once.

    Raises GpuUnavailable if neither NVML nor CUDA sees a device.
    """
    return open_query(machine).read(processes=processes, topology=topology)


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
            reading = self.machine.activity(nvml, names) if nvml else self._nvml_reason
            fields |= self._fields_of(reading, "activity", names)
        for info in (*self._fields_of_kind("fact"), *self._fields_of_kind("telemetry", names)):
            if info.name not in fields and (device.is_instance or info.group != INSTANCE_GROUP):
                fields[info.name] = self._missing_reason(device, info)
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
            fields={key: fields[key] for key in fields if not names or key in names},
            processes=self._read_processes(device) if processes else None,
        )

    def _fields_of(
        self, reading: Telemetry | Unavailable, kind: Kind, names: Collection[str]
    ) -> Mapping[str, Field]:
        """Return the fields of a reading. If the reading failed, return the reason for every field."""
        if isinstance(reading, Telemetry):
            return reading.fields
        return {field.name: reading for field in self._fields_of_kind(kind, names)}

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
    causes = [
        throttling_cause(str(reason))
        for reason in (reasons if isinstance(reasons, tuple) else ())
        if reason not in _NORMAL_REASONS
    ]
    if causes:
        yield f"throttled: {', '.join(causes)}"
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


def _hiding_reason(visible_devices: str | None) -> str:
    return (
        f"hidden by {VARIABLE}={visible_devices}"
        if visible_devices
        else f"hidden: {VARIABLE} is empty"
    )


# --- Match the devices of CUDA with those of NVML by UUID, or by PCI address if a UUID is unknown ---
#
# Indices are not compared, because CUDA and NVML may number the devices differently.


@dataclass(frozen=True, slots=True)
class MatchedDevice:
    """One device, as NVML and CUDA describe it."""

    nvml: DeviceFacts | None  # facts from NVML; None if NVML does not report the device
    cuda: DeviceFacts | None  # facts from CUDA; None if CUDA does not see the device
    is_hidden: bool  # whether CUDA_VISIBLE_DEVICES hides the device

    @property
    def uuid(self) -> str | Unavailable:
        return self._first_available("uuid")

    @property
    def pci_bus_id(self) -> str | Unavailable:
        return self._first_available("pci_bus_id")

    @property
    def is_instance(self) -> bool:
        """Whether this is a MIG instance, a part of a GPU."""
        return self.nvml is not None and self.nvml.parent is not None

    @property
    def fields(self) -> Mapping[str, Field]:
        """All facts; NVML's override CUDA's, because NVML ignores CUDA_VISIBLE_DEVICES."""
        merged_fields: dict[str, Field] = dict(self.cuda.fields) if self.cuda else {}
        for name, field_value in (self.nvml.fields if self.nvml else {}).items():
            if name not in merged_fields or not isinstance(field_value, Unavailable):
                merged_fields[name] = field_value
        return merged_fields

    def _first_available(self, name: str) -> str | Unavailable:
        """Return what NVML reports, or else CUDA. If both have no value, return the first reason."""
        values: list[str | Unavailable] = [
            getattr(facts, name) for facts in (self.nvml, self.cuda) if facts
        ]
        return next((value for value in values if isinstance(value, str)), values[0])


def match_devices(
    nvml: NvmlView | Unavailable, cuda: CudaView | Unavailable
) -> tuple[MatchedDevice, ...]:
    """Return NVML's devices in NVML's order, each with its CUDA device, then the devices of CUDA only."""
    nvml_devices = nvml.devices if isinstance(nvml, NvmlView) else ()
    cuda_devices: list[tuple[DeviceFacts, bool]] = []  # and whether CUDA_VISIBLE_DEVICES hides it
    if isinstance(cuda, CudaView):
        cuda_devices += ((device, False) for device in cuda.devices)
        cuda_devices += ((device, True) for device in cuda.hidden)
    matched_devices = []
    for device in nvml_devices:
        found = next((pair for pair in cuda_devices if _is_same_device(device, pair[0])), None)
        if found is None and len(nvml_devices) == len(cuda_devices) == 1:
            # A Jetson has no PCI address, and NVML and CUDA may report different UUIDs for it.
            found = cuda_devices[0]
        if found:
            cuda_devices.remove(found)
        cuda_device, is_hidden = found or (None, False)
        matched_devices.append(MatchedDevice(device, cuda_device, is_hidden))
    matched_devices += (MatchedDevice(None, device, hidden) for device, hidden in cuda_devices)
    return tuple(matched_devices)


def _is_same_device(nvml_device: DeviceFacts, cuda_device: DeviceFacts) -> bool:
    if isinstance(nvml_device.uuid, str) and isinstance(cuda_device.uuid, str):
        return nvml_device.uuid.lower() == cuda_device.uuid.lower()
    # A MIG instance has the PCI address of its GPU, so the address does not identify the instance.
    has_own_address = isinstance(nvml_device.pci_bus_id, str) and nvml_device.parent is None
    return has_own_address and nvml_device.pci_bus_id == cuda_device.pci_bus_id


# --- Links and peer access between the GPUs of a machine, as NVML and CUDA report them -------------


def device_pairs(
    nvml: NvmlView | Unavailable,
    cuda: CudaView | Unavailable,
    matched_devices: Sequence[MatchedDevice],
) -> tuple[Pair, ...]:
    """Return the connection of each pair of GPUs that NVML reports."""
    if isinstance(nvml, Unavailable):
        return ()
    links = {(link.first, link.second): link for link in nvml.links}
    gpus = {
        device.nvml.index: device
        for device in matched_devices
        if device.nvml and device.nvml.parent is None
    }
    unknown = Unavailable("NVML does not report it")
    pairs = []
    for first, second in combinations(sorted(gpus), 2):
        link = links.get((first, second)) or Link(first, second, *[unknown] * 5)
        both = (gpus[first], gpus[second])
        cuda_access = _is_bidirectional(cuda, both, "peer_access")
        pairs.append(
            Pair(
                first=first,
                second=second,
                path=link.path,
                nvlinks=link.nvlinks,
                nvml_read=link.p2p_read,
                nvml_write=link.p2p_write,
                nvml_atomics=link.p2p_atomics,
                cuda_access=cuda_access,
                cuda_atomics=_is_bidirectional(cuda, both, "peer_atomics"),
                disagreement=_disagreement(link, cuda_access),
            )
        )
    return tuple(pairs)


def _is_bidirectional(
    cuda: CudaView | Unavailable, gpus: Sequence[MatchedDevice], attribute: str
) -> bool | Unavailable:
    """Return whether CUDA reports an attribute, such as "peer_access", for both directions of a pair."""
    if isinstance(cuda, Unavailable):
        return Unavailable("CUDA does not answer")
    indices = [gpu.cuda.index for gpu in gpus if gpu.cuda and not gpu.is_hidden]
    if len(indices) < 2:
        return Unavailable("not both devices are visible to CUDA")
    first, second = indices
    return {(first, second), (second, first)} <= set(getattr(cuda, attribute))


def _disagreement(link: Link, cuda_access: bool | Unavailable) -> str | None:
    """Return a sentence if NVML and CUDA disagree on peer access, else None."""
    states = [link.p2p_read, link.p2p_write]
    if any(isinstance(answer, Unavailable) for answer in (cuda_access, *states)):
        return None
    nvml_access = all(state == "ok" for state in states)
    if nvml_access == cuda_access:
        return None
    reporter, other = ("NVML", "CUDA") if nvml_access else ("CUDA", "NVML")
    gpus = f"NVML {link.first} and {link.second}"
    return f"{gpus}: {reporter} reports peer access, {other} does not"


# --- CUDA_VISIBLE_DEVICES --------------------------------------------------------------------------

# The rules are from the CUDA Programming Guide ("Environment variables") and from experiments with driver
# 580. The driver alone decides which devices are visible; this module explains the driver's decision.

VARIABLE = "CUDA_VISIBLE_DEVICES"

# The driver parses numbers like strtoul: a sign and trailing characters are accepted.
_NUMBER_PATTERN = re.compile(r"\s*([+-]?)([0-9]+)")
_PREFIXES = ("GPU-", "MIG-")
_PREFIX_LENGTH = 4
_ULONG_MAX = 2**64 - 1
_UINT_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Visibility:
    """The effect of a value of CUDA_VISIBLE_DEVICES."""

    visible: tuple[int, ...]  # positions of the visible devices among all devices, in CUDA's order
    notes: tuple[str, ...]  # sentences on invalid entries and their effect


def visibility(value: str | None, uuids: Sequence[str]) -> Visibility:
    """Apply a value of CUDA_VISIBLE_DEVICES.

    ``uuids`` are the UUIDs of all devices, in the order that they have without the variable. None (the
    variable is not set) shows all devices, "" hides all. The first entry that matches no device ends the
    list; a repeated device hides all devices. If the first entry is an index, all entries must be indices; if
    it is a UUID, all must be UUIDs.
    """
    if value is None:
        return Visibility(tuple(range(len(uuids))), ())
    if not value.strip():
        return Visibility((), (f"{VARIABLE} is empty, which hides every device",))
    find_position = _find_by_uuid if value.startswith(_PREFIXES) else _find_by_index
    visible_positions: list[int] = []
    entries = value.split(",")
    for entry_number, device_entry in enumerate(entries, start=1):
        position, reason = find_position(device_entry, uuids)
        if position is None:
            is_last = entry_number == len(entries)
            effect = "" if is_last else ", so CUDA ignores this and all later entries"
            return Visibility(tuple(visible_positions), (f"{VARIABLE}={value}: {reason}{effect}",))
        if position in visible_positions:
            repetition_note = f"{device_entry.strip()!r} repeats a device, so CUDA does not start"
            return Visibility((), (f"{VARIABLE}={value}: {repetition_note}",))
        visible_positions.append(position)
    return Visibility(tuple(visible_positions), ())


def _find_by_index(device_entry: str, uuids: Sequence[str]) -> tuple[int | None, str]:
    """Return the position of a device, or None with the reason."""
    match = _NUMBER_PATTERN.match(device_entry)
    if match is None:
        return None, f"{device_entry.strip()!r} is not a number"
    is_negative = match[1] == "-"
    # strtoul saturates at ULONG_MAX; the driver keeps the low 32 bits.
    number = min(int(match[2]), _ULONG_MAX)
    index = (-number if is_negative else number) & _UINT_MAX
    if index < len(uuids):
        return index, ""
    if is_negative:
        return None, f"{device_entry.strip()!r} is negative"
    return None, f"no device has index {int(match[2])} (of {len(uuids)})"


def _find_by_uuid(device_entry: str, uuids: Sequence[str]) -> tuple[int | None, str]:
    """Return the position of the only device with a UUID prefix, or None with the reason."""
    if not device_entry.startswith(_PREFIXES):
        return None, f"{device_entry!r} does not start with GPU- or MIG-"
    # The driver treats GPU- and MIG- alike, and ignores the case of the digits.
    digits = device_entry[_PREFIX_LENGTH:].rstrip().lower()
    positions = [
        position
        for position, uuid in enumerate(uuids)
        if uuid[_PREFIX_LENGTH:].lower().startswith(digits)
    ]
    if not digits or not positions:
        return None, f"no UUID starts with {device_entry!r}"
    if len(positions) > 1:
        return None, f"{len(positions)} UUIDs start with {device_entry!r}"
    return positions[0], ""
