"""Present fields: as values, as a table, as CSV columns, and as the list of all properties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cudakit.devices.fields import field_registry
from cudakit.devices.result import Device, DevicesResult
from cudakit.devices.select import label
from cudakit.gpu.api.attributes import BIT_NAMES
from cudakit.gpu.api.facts import Field, Scalar
from cudakit.gpu.api.fields import FieldInfo
from cudakit.report.document import (
    Bytes,
    Column,
    Columns,
    Count,
    Document,
    Facts,
    Note,
    Rate,
    Seconds,
    Section,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable, capitalized

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


_ACTIVITY_NOTE = Note(
    "info", "Measured between two reads: only --watch and --fields show these fields."
)
_SECONDS_PER_UNIT = {"ns": 1e-9, "us": 1e-6}


def field_value(field: Field, field_info: FieldInfo) -> Value:
    """Return a field as a Value. A number becomes text with its unit if no type of Value has this unit."""
    match field:
        case Unavailable():
            return field
        case tuple():
            return Text(", ".join(_with_unit(item, field_info) for item in field) or "none")
        case bool():
            return Text("yes" if field else "no")
        case str():
            return Text(field or "none")
    if field_info.name in BIT_NAMES:
        return Text(_bits_text(int(field), BIT_NAMES[field_info.name]))
    if field_info.unit == "bytes":
        return Bytes(int(field))
    if field_info.unit in _SECONDS_PER_UNIT:
        return Seconds(field * _SECONDS_PER_UNIT[field_info.unit])
    if field_info.unit == "B/s":
        return Rate(field, "B")
    if field_info.unit or isinstance(field, float):
        return Text(_with_unit(field, field_info))
    return Count(field)


def _bits_text(mask: int, names: Sequence[str]) -> str:
    """Return the names of the bits that are set; a bit without a name is shown as its number."""
    set_bits = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    return ", ".join(names[bit] if bit < len(names) else f"bit {bit}" for bit in set_bits) or "none"


def _with_unit(value: Scalar, field_info: FieldInfo) -> str:
    number_text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return f"{number_text}{_unit_suffix(field_info.unit)}"


def number_with_unit(field: Field, unit: str) -> Value:
    """Return a number with its unit for a column: ``692 W``, ``97%``."""
    if isinstance(field, Unavailable):
        return field
    number = f"{field:.0f}" if isinstance(field, float) else str(field)
    return Text(f"{number}{_unit_suffix(unit)}")


def _unit_suffix(unit: str) -> str:
    """Return a unit as it follows a number: `` W``, but ``%`` without a space."""
    return unit if unit in ("", "%") else f" {unit}"


def nvml_index_text(device: Device) -> Value:
    """Return the NVML index; for a MIG instance ``GPU/instance``, such as ``0/1``."""
    if device.parent is None:
        return as_text(device.nvml_index)
    return Text(f"{device.parent}/{device.nvml_index}")


def as_text(value: object) -> Value:
    """Return a name or a number as text."""
    return value if isinstance(value, Unavailable) else Text(str(value))


def report_title(result: DevicesResult) -> str:
    """Return the title of the report, with the driver version and a label for simulated GPUs."""
    title_parts = ["Simulated GPUs" if result.simulated else "GPUs of this machine"]
    if isinstance(result.driver_version, str):
        title_parts.append(f"driver {result.driver_version}")
    if not isinstance(result.cuda, Unavailable) and isinstance(result.cuda.version, str):
        title_parts.append(f"CUDA {result.cuda.version}")
    return ", ".join(title_parts)


# --- rows and columns ------------------------------------------------------------------------------


def field_table(fields: Sequence[FieldInfo], result: DevicesResult) -> Document:
    """Return fields as a table with a row for each device."""
    columns = tuple(
        Column(field.name, "number" if _is_number(field) else "text") for field in fields
    )
    table_rows = tuple(
        tuple(_device_field_value(device, field) for field in fields) for device in result.devices
    )
    hidden_rows = frozenset(row for row, device in enumerate(result.devices) if device.hidden)
    return Document(report_title(result), (Table(columns, table_rows, faint_rows=hidden_rows),))


def _device_field_value(device: Device, field_info: FieldInfo) -> Value:
    if field_info.name == "nvml_index":
        return nvml_index_text(device)
    return field_value(device.field(field_info.name), field_info)


def field_columns(fields: Sequence[FieldInfo], result: DevicesResult) -> Document:
    """Return fields as arrays of raw values; an unavailable value is an empty cell."""
    arrays = {
        field.name: _masked_array([device.field(field.name) for device in result.devices])
        for field in fields
    }
    return Document(report_title(result), (Columns("devices", arrays),))


def field_list(fields: Iterable[FieldInfo]) -> Document:
    """Return the fields by group, each with its meaning, unit and source."""
    rows_by_group: dict[str, list[tuple[str, Value]]] = {}
    for field in fields:
        unit = f", in {field.unit}" if field.unit not in ("", "bool") else ""
        meaning = Text(f"{field.description}{unit}{_bits_of_mask(field)} ({field.source})")
        rows_by_group.setdefault(field.group, []).append((field.name, meaning))
    sections = (
        Section(
            capitalized(group_name),
            (
                *([_ACTIVITY_NOTE] if group_name == "activity" else []),
                Facts(tuple(field_rows)),
            ),
        )
        for group_name, field_rows in rows_by_group.items()
    )
    source_note = Note("info", "The last parentheses contain the source of the value.")
    return Document("Fields of a device", (source_note, *sections))


def _bits_of_mask(field_info: FieldInfo) -> str:
    names = BIT_NAMES.get(field_info.name, ())
    bits_text = ", ".join(f"{1 << bit} {name}" for bit, name in enumerate(names))
    return f"; bits: {bits_text}" if bits_text else ""


def _is_number(field_info: FieldInfo) -> bool:
    return field_info.unit not in ("", "bool", "hex")


def _masked_array(values: Sequence[Field]) -> npt.NDArray[np.generic]:
    import numpy as np  # imported here, because it is slow to import and only CSV needs it

    available_values = [value for value in values if not isinstance(value, Unavailable)]
    if available_values and all(type(value) is int for value in available_values):
        integers = [value if type(value) is int else 0 for value in values]
        is_missing = [isinstance(value, Unavailable) for value in values]
        return np.ma.masked_array(np.array(integers, dtype=np.int64), mask=is_missing)
    if available_values and all(isinstance(value, float) for value in available_values):
        return np.array([value if isinstance(value, float) else np.nan for value in values])
    return np.array([_cell_value(value) for value in values], dtype=object)


def _cell_value(field: Field) -> str:
    match field:
        case Unavailable():
            return ""
        case tuple():
            return "; ".join(map(str, field))
        case bool():
            return "true" if field else "false"
    return str(field)


# --- all fields of a device ------------------------------------------------------------------------


def machine_facts(result: DevicesResult) -> Section:
    """Return the versions of the driver and its libraries."""
    fact_rows: list[tuple[str, Value]] = [
        ("driver version", as_text(result.driver_version)),
        ("NVML version", as_text(result.nvml_version)),
    ]
    cuda = result.cuda
    if isinstance(cuda, Unavailable):
        fact_rows.append(("CUDA", cuda))
    else:
        fact_rows += [
            ("CUDA version", as_text(cuda.version)),
            ("libcuda", as_text(cuda.library)),
            ("CUDA_VISIBLE_DEVICES", Text(_variable_text(cuda.visible_devices))),
            ("CUDA_DEVICE_ORDER", Text(_variable_text(cuda.device_order))),
        ]
    return Section("Driver", (Facts(tuple(fact_rows)),))


def property_sections(device: Device) -> Section:
    """Return every field of a device. An unavailable field is shown with its reason."""
    rows_by_group: dict[str, list[tuple[str, Value]]] = {}
    for name, field in field_registry().items():
        if field.kind == "identity" or name in device.fields:
            rows_by_group.setdefault(field.group, []).append((name, _property_value(device, field)))
    return Section(
        label(device),
        tuple(
            Section(capitalized(group), (Facts(tuple(field_rows)),))
            for group, field_rows in rows_by_group.items()
        ),
    )


def _property_value(device: Device, field_info: FieldInfo) -> Value:
    value = _device_field_value(device, field_info)
    is_threshold = field_info.kind == "fact" and field_info.name.endswith("_margin_c")
    # Without these words, a threshold reads as the margin that is left.
    return (
        Text(f"when temperature_margin_c is {value.value}")
        if is_threshold and isinstance(value, Text)
        else value
    )


def _variable_text(value: str | None) -> str:
    return "not set" if value is None else value or "empty"
