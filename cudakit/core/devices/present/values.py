"""Fields as values of a Document: each in the form that its unit asks for."""

from __future__ import annotations

from cudakit.core.devices.fields import FieldInfo
from cudakit.core.devices.result import Device
from cudakit.document import Bytes, Count, Rate, Seconds, Text, Value
from cudakit.gpu.api.facts import Field, Scalar
from cudakit.units import Unavailable

_TIMES = {"ns": 1e-9, "us": 1e-6}


def shown(value: Field, field: FieldInfo) -> Value:
    """Make a value of a field; numbers of what renderers have no kind for carry their unit."""
    match value:
        case Unavailable():
            return value
        case tuple():
            return Text(", ".join(_words(item, field) for item in value) or "none")
        case bool():
            return Text("yes" if value else "no")
        case str():
            return Text(value or "none")
    if field.unit == "bytes":
        return Bytes(int(value))
    if field.unit in _TIMES:
        return Seconds(value * _TIMES[field.unit])
    if field.unit == "B/s":
        return Rate(value, "B")
    if field.unit or isinstance(value, float):
        return Text(_words(value, field))
    return Count(value)


def _words(value: Scalar, field: FieldInfo) -> str:
    number = f"{value:.1f}" if isinstance(value, float) else str(value)
    return f"{number} {field.unit}" if field.unit else number


def measured(value: Field, unit: str) -> Value:
    """Write a number with its unit in the width that a column has room for: ``692 W``."""
    if isinstance(value, Unavailable):
        return value
    return Text(f"{value:.0f} {unit}" if isinstance(value, float) else f"{value} {unit}")


def nvml_number(device: Device) -> Value:
    """Write NVML's number; a MIG instance's behind that of its GPU."""
    if device.parent is None:
        return index(device.nvml_index)
    return Text(f"{device.parent}/{device.nvml_index}")


def index(value: int | Unavailable) -> Value:
    """Write a number that names."""
    return value if isinstance(value, Unavailable) else Text(str(value))
