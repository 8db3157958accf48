"""The registry of fields: what can be known of a device, in which unit, from where, and what it means."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from cudakit.core.devices.fields.management import ACTIVITY, FACTS, TELEMETRY
from cudakit.errors import UsageError
from cudakit.gpu.api.attributes import Attribute, attributes

# Fields of this group are of MIG instances, and absent from whole GPUs.
INSTANCE_GROUP = "MIG instance"

Kind = Literal["identity", "fact", "telemetry", "activity"]


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field of a device."""

    name: str
    unit: str  # as written behind a number; "" for none, "bytes", "bool" and "hex" for the form
    source: str  # the function, value or attribute that it comes from
    description: str
    group: str
    kind: Kind  # who reads it, and whether it moves


@dataclass(frozen=True, slots=True)
class FieldsList:
    """All fields, as ``--list-fields`` gives them."""

    schema: ClassVar[str] = "cudakit.devices.list-fields/1"
    fields: tuple[FieldInfo, ...]  # in the order of a first reading


_IDENTITY = (
    ("cuda_index", "the driver", "Number that CUDA gives the device"),
    ("nvml_index", "nvmlDeviceGetIndex", "Number that NVML and nvidia-smi give the device"),
    ("uuid", "nvmlDeviceGetUUID, cuDeviceGetUuid", "UUID, the same for all who ask"),
    ("pci_bus_id", "nvmlDeviceGetPciInfo, cuDeviceGetPCIBusId", "Address on the PCI bus"),
    ("notes", "cudakit", "What is worth knowing"),
)
_OF_CUDA = (("usable_memory_bytes", "bytes", "cuDeviceTotalMem", "Memory that CUDA can give out"),)


def registry() -> Mapping[str, FieldInfo]:
    """Return all fields by name, in the order of a first reading."""
    found: dict[str, FieldInfo] = {}
    for field in (
        *(
            FieldInfo(name, "", source, text, "identity", "identity")
            for name, source, text in _IDENTITY
        ),
        *_read(FACTS, "fact"),
        *_read(TELEMETRY, "telemetry"),
        *_read(ACTIVITY, "activity"),
        *(
            FieldInfo(name, unit, source, text, "memory", "fact")
            for name, unit, source, text in _OF_CUDA
        ),
        *map(_attribute, attributes()),
    ):
        # What NVML knows too is told once.
        found.setdefault(field.name, field)
    return found


def named(names: Sequence[str]) -> tuple[FieldInfo, ...]:
    """Look fields up. Raises UsageError, with what was probably meant, for an unknown name."""
    known = registry()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            raise UsageError(f"no field {name!r}", hint=f"{meant}--list-fields lists them all")
    return tuple(known[name] for name in names)


def _read(table: str, kind: Kind) -> Iterator[FieldInfo]:
    group = ""
    for line in table.strip().splitlines():
        if line.startswith("["):
            group = line.strip("[]")
            continue
        name, unit, source, description = line.split(" ", 3)
        yield FieldInfo(name, unit.replace("-", ""), source, description, group, kind)


def _attribute(attribute: Attribute) -> FieldInfo:
    return FieldInfo(
        attribute.name,
        attribute.unit.replace("word", "").replace("mask", ""),
        f"cuDeviceGetAttribute({attribute.number})",
        attribute.description,
        _group(attribute),
        "fact",
    )


def _group(attribute: Attribute) -> str:
    if attribute.name.startswith("maximum_"):
        return "textures and surfaces"
    if attribute.name.startswith(("pci_", "gpu_pci_")):
        return "place"
    return "abilities" if attribute.unit == "bool" else "compute"
