"""Events as records of fixed size: common fields, then the fields of the kind.

A record has 96 bytes, little-endian, with fields aligned as in C. ``batch["kind"] == Kind.COPY`` selects the
copies of a batch; ``view(copies, Kind.COPY)`` gives access to their fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from enum import IntEnum, IntFlag
from functools import cache
from typing import Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from cudakit.trace.events import Event, Fact, Text
from cudakit.trace.kinds import Kind

Records: TypeAlias = npt.NDArray[np.void]

RECORD_BYTES = 96
_COMMON = (
    ("seq", "<u8"),
    ("time_ns", "<i8"),
    ("thread", "<u8"),
    ("stream", "<u4"),  # 0 if the kind has none
    ("context", "<u4"),
    ("site", "<u4"),
    ("device", "<i2"),
    ("kind", "<u2"),
)
_COMMON_BYTES = 40

RECORD = np.dtype([*_COMMON, ("own", f"V{RECORD_BYTES - _COMMON_BYTES}")])


@cache
def layout(kind: Kind) -> np.dtype[np.void]:
    """Return the numpy type of a kind's records: the common fields, then its own."""
    names = [name for name, _ in _COMMON]
    formats = [form for _, form in _COMMON]
    offsets = [RECORD.fields[name][1] for name in names] if RECORD.fields else []
    end = _COMMON_BYTES
    for name, form in _own_fields(kind):
        dtype = np.dtype(form)
        end += -end % dtype.base.alignment
        names.append(name)
        formats.append(form)
        offsets.append(end)
        end += dtype.itemsize
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": RECORD_BYTES}
    )


def view(records: Records, kind: Kind) -> Records:
    """Return a view of records, all of one kind, with the fields of that kind."""
    return np.ascontiguousarray(records).view(layout(kind))


def find_invalid(records: Records, strings: int) -> str:
    """Return why records cannot be valid, or an empty text; ``strings`` is the length of the string table.

    Checks enumerations and numbers of strings. Unknown kinds are valid.
    """
    kinds = records["kind"]
    for number in np.flatnonzero(np.bincount(kinds)).tolist():
        if number not in _FACTS:
            continue
        kind = Kind(number)
        rows, is_kind = records.view(layout(kind)), kinds == kind  # a view without a copy
        for name, least, most in _bounds(kind):
            values = rows[name][is_kind]
            if values.max() > (strings - 1 if most is None else most) or values.min() < least:
                return f"invalid {name} in a record of kind {kind.name}"
    return ""


@cache
def _bounds(kind: Kind) -> tuple[tuple[str, int, int | None], ...]:
    """Return the limits of the enumerations of a kind, and of its numbers of strings (None)."""
    bounds: list[tuple[str, int, int | None]] = []
    for name, hint in _hints(kind).items():
        if hint is Text:
            bounds.append((name, 0, None))
        elif isinstance(hint, type) and issubclass(hint, IntFlag):
            bounds.append((name, 0, sum(hint)))
        elif isinstance(hint, type) and issubclass(hint, IntEnum):
            bounds.append((name, min(hint), max(hint)))
    return tuple(bounds)


def pack(events: Sequence[Event], number: Callable[[str], int]) -> Records:
    """Return events as records; ``number`` returns the index of a string in the string table."""
    records = np.zeros(len(events), RECORD)
    for row, event in enumerate(events):
        fact = event.fact
        record = records[row : row + 1].view(layout(fact.kind))
        record["kind"] = fact.kind
        for name in _EVENT_FIELDS:
            record[name] = getattr(event, name)
        for name, hint in _hints(fact.kind).items():
            value = getattr(fact, name)
            record[name] = number(value) if hint is Text else value
    return records


def unpack(records: Records, strings: Sequence[str]) -> Iterator[Event]:
    """Yield the events of records; slow, for tests and small traces."""
    for row in range(len(records)):
        kind = Kind(int(records["kind"][row]))
        record = records[row : row + 1].view(layout(kind))
        common = {name: int(record[name][0]) for name in _EVENT_FIELDS}
        own = {
            name: _value(hint, record[name][0].tolist(), strings)
            for name, hint in _hints(kind).items()
        }
        yield Event(_FACTS[kind](**own), **common)


def _value(hint: Any, raw: Any, strings: Sequence[str]) -> Any:
    if hint is Text:
        return strings[raw]
    if get_origin(hint) is Annotated:
        return tuple(raw) if isinstance(raw, list) else raw
    return hint(raw)


def _own_fields(kind: Kind) -> Iterator[tuple[str, str]]:
    for name, hint in _hints(kind).items():
        if name != "stream":
            yield name, _form(hint)


def _form(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return str(hint.__metadata__[0])
    return "<u1"


@cache
def _hints(kind: Kind) -> dict[str, Any]:
    hints = get_type_hints(_FACTS[kind], include_extras=True)
    return {field.name: hints[field.name] for field in fields(_FACTS[kind])}


_FACTS: dict[Kind, type[Fact]] = {fact.kind: fact for fact in get_args(Fact)}
_EVENT_FIELDS = tuple(field.name for field in fields(Event) if field.name != "fact")
