"""Chosen fields, a row for each device; and the list of fields to choose from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from cudakit.core.devices.fields import FieldInfo
from cudakit.core.devices.present.titles import title
from cudakit.core.devices.present.values import shown
from cudakit.core.devices.result import DevicesResult
from cudakit.document import Column, Columns, Document, Table, Text
from cudakit.gpu.api.facts import Field
from cudakit.units import Unavailable


def table(fields: Sequence[FieldInfo], result: DevicesResult) -> Document:
    """Show fields as a table."""
    columns = tuple(
        Column(field.name, "number" if _is_number(field) else "text") for field in fields
    )
    rows = tuple(
        tuple(shown(device.field(field.name), field) for field in fields)
        for device in result.devices
    )
    faint = frozenset(at for at, device in enumerate(result.devices) if device.hidden)
    return Document(title(result), (Table(columns, rows, faint=faint),))


def columns(fields: Sequence[FieldInfo], result: DevicesResult) -> Document:
    """Hold fields as arrays, raw and in their units; what cannot be had is an empty cell."""
    arrays = {
        field.name: _array([device.field(field.name) for device in result.devices])
        for field in fields
    }
    return Document(title(result), (Columns("devices", arrays),))


def listing(fields: Iterable[FieldInfo]) -> Document:
    """List fields, with what they mean."""
    names = (Column("field"), Column("unit"), Column("meaning"), Column("source"))
    rows = tuple(
        (Text(field.name), Text(field.unit), Text(field.description), Text(field.source))
        for field in fields
    )
    return Document("Fields of a device", (Table(names, rows),))


def _is_number(field: FieldInfo) -> bool:
    return field.unit not in ("", "bool", "hex")


def _array(values: Sequence[Field]) -> npt.NDArray[np.generic]:
    known = [value for value in values if not isinstance(value, Unavailable)]
    if known and all(type(value) is int for value in known):
        filled = [value if type(value) is int else 0 for value in values]
        missing = [isinstance(value, Unavailable) for value in values]
        return np.ma.masked_array(np.array(filled, dtype=np.int64), mask=missing)
    if known and all(isinstance(value, float) for value in known):
        return np.array([value if isinstance(value, float) else np.nan for value in values])
    return np.array([_word(value) for value in values], dtype=object)


def _word(value: Field) -> str:
    match value:
        case Unavailable():
            return ""
        case tuple():
            return "; ".join(map(str, value))
        case bool():
            return "true" if value else "false"
    return str(value)
