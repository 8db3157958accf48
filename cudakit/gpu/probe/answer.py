"""The child's JSON as a CudaView."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cudakit.gpu.api.attributes import Attribute, attributes
from cudakit.gpu.api.facts import CudaView, DeviceFacts, Field
from cudakit.gpu.architectures import Capability
from cudakit.units import Unavailable

_UNKNOWN = Unavailable("this driver does not know the attribute")

# CUcomputemode and CUdeviceNumaConfig (cuda.h).
_WORDS: Mapping[str, Mapping[int, str]] = {
    "compute_mode": {0: "default", 2: "prohibited", 3: "exclusive process"},
    "numa_config": {0: "none", 1: "a node of its own"},
}


def cuda_view(
    visible: dict[str, Any] | str,
    everything: dict[str, Any] | str | None,
    *,
    visible_devices: str | None,
    device_order: str | None,
) -> CudaView | Unavailable:
    """Make one view of what a child found with CUDA_VISIBLE_DEVICES, and another without it."""
    if isinstance(visible, str):
        return Unavailable(visible)
    if "missing" in visible:
        return Unavailable(f"the CUDA driver's library cannot be loaded: {visible['missing']}")
    devices = tuple(_devices(visible))
    seen = {device.uuid for device in devices}
    rest = tuple(_devices(everything)) if isinstance(everything, dict) else ()
    return CudaView(
        driver_version=_version(visible["version"]),
        devices=devices,
        hidden=tuple(_unnumbered(device) for device in rest if device.uuid not in seen),
        peer_access=tuple((one, other) for one, other, _ in visible.get("peers", ())),
        peer_atomics=tuple((one, other) for one, other, full in visible.get("peers", ()) if full),
        error=tuple(visible["error"]) if "error" in visible else None,
        libcuda=visible["libcuda"] or Unavailable("/proc/self/maps does not say"),
        visible_devices=visible_devices,
        device_order=device_order,
        order=tuple(device.uuid for device in rest or devices if isinstance(device.uuid, str)),
    )


def _devices(found: dict[str, Any]) -> Iterator[DeviceFacts]:
    for index, device in enumerate(found.get("devices", ())):
        yield DeviceFacts(
            index=index,
            uuid=_uuid(device),
            pci_bus_id=_pci_bus_id(device["pci_bus_id"]),
            fields=dict(_fields(device)),
        )


def _unnumbered(device: DeviceFacts) -> DeviceFacts:
    return DeviceFacts(-1, device.uuid, device.pci_bus_id, device.fields)


def _fields(device: dict[str, Any]) -> Iterator[tuple[str, Field]]:
    raw = device["attributes"]
    yield "name", _field(device["name"])
    yield "usable_memory_bytes", _field(device["memory"])
    major, minor = raw.get("75"), raw.get("76")
    if isinstance(major, int) and isinstance(minor, int):
        capability = Capability(major, minor)
        yield "compute_capability", str(capability)
        yield "architecture", capability.architecture
    for attribute in attributes():
        yield attribute.name, _attribute(attribute, raw.get(str(attribute.number)))


def _attribute(attribute: Attribute, value: Any) -> Field:
    if value is None:
        return _UNKNOWN
    match attribute.unit:
        case "bool":
            return _field(value, bool)
        case "hex":
            return _field(value, lambda number: f"{number & 0xFFFFFFFF:#010x}")
        case "word":
            words = _WORDS[attribute.name]
            return _field(value, lambda number: words.get(number, f"unknown ({number})"))
    return _field(value)


def _field(value: Any, convert: Callable[[Any], Field] = lambda value: value) -> Field:
    """Convert a value; an error that the child noted in its place becomes Unavailable."""
    return _reason(value) if isinstance(value, dict) else convert(value)


def _reason(noted: dict[str, Any]) -> Unavailable:
    _, name, explanation = noted["error"]
    return Unavailable(f"{name}: {explanation}" if name else explanation)


def _pci_bus_id(value: Any) -> str | Unavailable:
    return _reason(value) if isinstance(value, dict) else str(value).lower()


def _version(number: Any) -> tuple[int, int] | Unavailable:
    # CUDA_VERSION is 1000 major + 10 minor (cuda.h).
    return _reason(number) if isinstance(number, dict) else (number // 1000, number % 1000 // 10)


def _uuid(device: dict[str, Any]) -> str | Unavailable:
    own = device["uuid"]
    if isinstance(own, dict):
        return _reason(own)
    # A MIG instance has a UUID of its own beside that of its GPU.
    instance = isinstance(device["gpu_uuid"], str) and device["gpu_uuid"] != own
    return f"{'MIG' if instance else 'GPU'}-{uuid.UUID(hex=own)}"
