"""Store events as records of 96 bytes: the fields common to all kinds, then the body.

Numbers are little-endian, and fields are aligned as in C. ``batch["kind"] == EventKind.COPY`` selects the
copies of a batch; ``view(copies, EventKind.COPY)`` gives access to the fields of their bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from enum import IntEnum, IntFlag
from functools import cache
from typing import Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from cudakit.trace.events import Event, EventBody, Text
from cudakit.trace.kinds import EventKind

Records: TypeAlias = npt.NDArray[np.void]

RECORD_BYTES = 96
# End of the addresses that accesses may have. CUDA's addresses have at most 57 bits.
ADDRESS_END = 1 << 62
_COMMON = (
    ("seq", "<u8"),
    ("time_ns", "<i8"),
    ("thread", "<u4"),
    ("program_call", "<u4"),  # number of the program call; 0 if unknown
    ("stream", "<u4"),  # number of the stream; 0 if events of this kind have no stream
    ("context", "<u4"),
    ("site", "<u4"),
    ("device", "<i2"),
    ("kind", "<u2"),
)
_COMMON_BYTES = 40

RECORD = np.dtype([*_COMMON, ("body", f"V{RECORD_BYTES - _COMMON_BYTES}")])
# A record as one item without fields, because numpy moves records with fields twenty times as slowly.
_OPAQUE_RECORD = np.dtype((np.void, RECORD_BYTES))


@cache
def layout(kind: EventKind) -> np.dtype[np.void]:
    """Return the numpy type of the records of a kind: the common fields, then the body."""
    names = [name for name, _ in _COMMON]
    formats = [type_code for _, type_code in _COMMON]
    offsets = [RECORD.fields[name][1] for name in names] if RECORD.fields else []
    end_offset = _COMMON_BYTES
    for name, type_code in _body_fields(kind):
        dtype = np.dtype(type_code)
        end_offset += -end_offset % dtype.base.alignment
        names.append(name)
        formats.append(type_code)
        offsets.append(end_offset)
        end_offset += dtype.itemsize
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": RECORD_BYTES}
    )


def view(records: Records, kind: EventKind) -> Records:
    """Return a view of records, all of one kind, with the fields of the body."""
    return np.ascontiguousarray(records).view(layout(kind))


def take_records(
    records: Records, selection: npt.NDArray[np.intp] | npt.NDArray[np.bool_]
) -> Records:
    """Return the records that indices or a mask select."""
    indices = np.flatnonzero(selection) if selection.dtype == np.bool_ else selection
    return np.ascontiguousarray(records).view(_OPAQUE_RECORD).take(indices).view(RECORD)


def concatenate_records(record_arrays: Sequence[Records]) -> Records:
    """Return several arrays of records as one; a single array is returned unchanged."""
    if len(record_arrays) == 1:
        return record_arrays[0]
    opaque_arrays = [
        np.ascontiguousarray(record_array).view(_OPAQUE_RECORD) for record_array in record_arrays
    ]
    return np.concatenate(opaque_arrays).view(RECORD)


def find_invalid(records: Records, string_count: int) -> str:
    """Return why records are invalid, or an empty text; ``string_count`` is the length of the string table.

    Checks enumerations, string indices and the addresses of accesses. Records of unknown kinds count as
    valid.
    """
    kinds = records["kind"]
    for kind_number in np.flatnonzero(np.bincount(kinds)).tolist():
        if kind_number not in _BODIES:
            continue
        kind = EventKind(kind_number)
        rows, is_kind = records.view(layout(kind)), kinds == kind  # `view` would copy the records
        for name, minimum, maximum in _bounds(kind):
            field_values = rows[name][is_kind]
            if (
                field_values.max() > (string_count - 1 if maximum is None else maximum)
                or field_values.min() < minimum
            ):
                return f"invalid {name} in a record of kind {kind.name}"
        if kind is EventKind.ACCESS and (
            rows["lo"][is_kind].max() > ADDRESS_END or rows["hi"][is_kind].max() > ADDRESS_END
        ):
            return "invalid address in a record of kind ACCESS"
    return ""


@cache
def _bounds(kind: EventKind) -> tuple[tuple[str, int, int | None], ...]:
    """Return the name, minimum and maximum of each enumeration and string index in a kind's body.

    The maximum of a string index is None, because it depends on the string table.
    """
    bounds: list[tuple[str, int, int | None]] = []
    for name, hint in _type_hints(kind).items():
        if hint is Text:
            bounds.append((name, 0, None))
        elif isinstance(hint, type) and issubclass(hint, IntFlag):
            bounds.append((name, 0, sum(hint)))
        elif isinstance(hint, type) and issubclass(hint, IntEnum):
            bounds.append((name, min(hint), max(hint)))
    return tuple(bounds)


def pack(events: Sequence[Event], string_index: Callable[[str], int]) -> Records:
    """Return events as records; ``string_index`` returns the index of a string in the string table."""
    records = np.zeros(len(events), RECORD)
    for row, event in enumerate(events):
        body = event.body
        record = records[row : row + 1].view(layout(body.kind))
        record["kind"] = body.kind
        for name in _EVENT_FIELDS:
            record[name] = getattr(event, name)
        for name, hint in _type_hints(body.kind).items():
            field_value = getattr(body, name)
            record[name] = string_index(field_value) if hint is Text else field_value
    return records


def unpack(records: Records, strings: Sequence[str]) -> Iterator[Event]:
    """Yield the events of records. This is slow: use it for tests and small traces only."""
    for row in range(len(records)):
        kind = EventKind(int(records["kind"][row]))
        record = records[row : row + 1].view(layout(kind))
        common_fields = {name: int(record[name][0]) for name in _EVENT_FIELDS}
        body_fields = {
            name: _decode(hint, record[name][0].tolist(), strings)
            for name, hint in _type_hints(kind).items()
        }
        yield Event(_BODIES[kind](**body_fields), **common_fields)


def _decode(hint: Any, stored_value: Any, strings: Sequence[str]) -> Any:
    """Return the value of a field from its stored number."""
    if hint is Text:
        return strings[stored_value]
    if get_origin(hint) is Annotated:
        return tuple(stored_value) if isinstance(stored_value, list) else stored_value
    return hint(stored_value)


def _body_fields(kind: EventKind) -> Iterator[tuple[str, str]]:
    """Yield the fields of a body with their type codes; ``stream`` is among the common fields."""
    for name, hint in _type_hints(kind).items():
        if name != "stream":
            yield name, _type_code(hint)


def _type_code(hint: Any) -> str:
    """Return the numpy type of a field; an enumeration is stored in one byte."""
    if get_origin(hint) is Annotated:
        return str(hint.__metadata__[0])
    return "<u1"


@cache
def _type_hints(kind: EventKind) -> dict[str, Any]:
    type_hints = get_type_hints(_BODIES[kind], include_extras=True)
    return {field.name: type_hints[field.name] for field in fields(_BODIES[kind])}


_BODIES: dict[EventKind, type[EventBody]] = {body.kind: body for body in get_args(EventBody)}
_EVENT_FIELDS = tuple(field.name for field in fields(Event) if field.name != "body")
