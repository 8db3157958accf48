"""All that is known of a device, by subject."""

from __future__ import annotations

from cudakit.core.devices.fields import FieldInfo, registry
from cudakit.core.devices.present.values import shown
from cudakit.core.devices.result import Device, DevicesResult
from cudakit.core.devices.select import label
from cudakit.document import Facts, Node, Section, Text, Value
from cudakit.units import Unavailable

_UNSET = "not set"


def machine(result: DevicesResult) -> Section:
    """Say what speaks for the machine: the driver and its libraries."""
    rows: list[tuple[str, Value]] = [
        ("driver version", _text(result.driver_version)),
        ("NVML version", _text(result.nvml_version)),
    ]
    cuda = result.cuda
    if isinstance(cuda, Unavailable):
        rows.append(("CUDA", cuda))
    else:
        rows += [
            ("CUDA version", _text(cuda.version)),
            ("libcuda", _text(cuda.library)),
            ("CUDA_VISIBLE_DEVICES", Text(_variable(cuda.visible_devices))),
            ("CUDA_DEVICE_ORDER", Text(_variable(cuda.device_order))),
        ]
    return Section("Driver", (Facts(tuple(rows)),))


def properties(device: Device) -> Section:
    """List every field of a device; what cannot be had says why."""
    fields = [field for field in registry().values() if _has(device, field)]
    groups = dict.fromkeys(field.group for field in fields)
    nodes: list[Node] = []
    for group in groups:
        rows = [_row(device, field) for field in fields if field.group == group]
        nodes.append(Section(group.capitalize(), (Facts(tuple(rows)),)))
    return Section(label(device), tuple(nodes))


def _has(device: Device, field: FieldInfo) -> bool:
    return field.kind == "identity" or field.name in device.fields


def _row(device: Device, field: FieldInfo) -> tuple[str, Value]:
    return field.name, shown(device.field(field.name), field)


def _text(value: str | Unavailable) -> Value:
    return value if isinstance(value, Unavailable) else Text(value)


def _variable(value: str | None) -> str:
    return _UNSET if value is None else value or "empty"
