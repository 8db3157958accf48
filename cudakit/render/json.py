"""A Result as JSON: every command's ``--json``.

Reads the frozen dataclasses of a Result, not a Document: what is true, not how it reads. Field
order is key order, so that the same Result always gives the same text.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

from cudakit.document import Unavailable
from cudakit.errors import CudakitError

if TYPE_CHECKING:
    import numpy.typing as npt

# A lone surrogate has no UTF-8; a terminal may obey the control characters that JSON lets through.
_UNSAFE = re.compile("[\x7f-\x9f\ud800-\udfff]")

# Deep enough for a list of rows under a list of devices: each row is then a line.
_INDENTED_LEVELS = 4

_Reasons: TypeAlias = dict[str, str]


def render(result: object) -> str:
    """Write a Result as one JSON object, its outer levels indented by 2, ending in a newline.

    A dataclass becomes an object by field name: ``schema`` (a field or a class attribute) comes
    first, ``metadata={"json": name}`` renames a field, ``metadata={"json": None}`` leaves it out.
    An Enum becomes its lower-case name. NaN and infinities become null, and so does an Unavailable,
    whose reason stands beside it: ``{"power": null, "unavailable": {"power": reason}}``, under
    ``fans[1]`` or ``limits.power`` for one in a list or a mapping. The text is valid UTF-8.

    Raises TypeError for what JSON has no form for (bytes, sets, dates) and for a key used twice.
    """
    if not _is_record(result):
        raise TypeError(f"a Result is a dataclass instance, not {type(result).__name__}")
    return _text(_record(result))


def render_line(result: object) -> str:
    """Write a Result as ``render`` does, on one line: for streams of many (NDJSON)."""
    if not _is_record(result):
        raise TypeError(f"a Result is a dataclass instance, not {type(result).__name__}")
    return _text(_record(result), indented_levels=0)


def render_error(error: CudakitError) -> str:
    """Write an error as JSON: ``{"error": {"kind", "message", "hint", "exit_code"}}``."""
    return _text(
        {
            "error": {
                "kind": type(error).__name__,
                "message": error.message,
                "hint": error.hint,
                "exit_code": error.exit_code,
            }
        }
    )


def _text(plain: object, *, indented_levels: int = _INDENTED_LEVELS) -> str:
    text = "".join(_laid_out(plain, 0, indented_levels))
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def _laid_out(plain: object, depth: int, levels: int) -> Iterator[str]:
    """Indent the outer levels; what lies deeper is a line each, as fast as ``json`` writes it."""
    if depth == levels or not plain or not isinstance(plain, (dict, list)):
        yield json.dumps(plain, ensure_ascii=False, allow_nan=False)
        return
    members = _members_of(plain)
    opening, closing = "{}" if isinstance(plain, dict) else "[]"
    margin = "  " * depth
    for index, (name, item) in enumerate(members):
        yield f"{',' if index else opening}\n{margin}  {name}"
        yield from _laid_out(item, depth + 1, levels)
    yield f"\n{margin}{closing}"


def _members_of(plain: dict[str, object] | list[object]) -> Iterator[tuple[str, object]]:
    if isinstance(plain, list):
        return (("", item) for item in plain)
    return ((f"{json.dumps(key, ensure_ascii=False)}: ", item) for key, item in plain.items())


def _is_record(value: object) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _record(record: Any) -> dict[str, object]:
    plain: dict[str, object] = {}
    reasons: _Reasons = {}
    for name, value in _members(record):
        if name in plain or name == "unavailable":
            raise TypeError(f"{type(record).__name__}: the JSON key {name!r} is taken")
        plain[name] = _plain(value, name, reasons)
    if reasons:
        plain["unavailable"] = reasons
    return plain


def _members(record: Any) -> Iterator[tuple[str, object]]:
    schema = getattr(record, "schema", None)
    if isinstance(schema, str):
        yield "schema", schema
    for field in fields(record):
        name = field.metadata.get("json", field.name)
        if name is not None and not (field.name == "schema" and isinstance(schema, str)):
            yield name, getattr(record, field.name)


def _plain(value: object, name: str, reasons: _Reasons) -> object:
    """Reduce to what ``json`` writes; ``name`` is the path from the enclosing record."""
    match value:
        case Enum():
            return value.name.lower()
        case None | bool() | int() | str():
            return value
        case float():
            return float(value) if math.isfinite(value) else None
        case Unavailable():
            reasons[name] = value.reason
            return None
        case _ if _is_of_numpy(value):
            return _numbers(value, name, reasons)
        case Mapping():
            return _object(value, name, reasons)
        case list() | tuple():
            return [_plain(item, f"{name}[{i}]", reasons) for i, item in enumerate(value)]
        case _ if _is_record(value):
            return _record(value)
    raise TypeError(f"{name}: JSON has no form for {type(value).__name__}")


def _is_of_numpy(value: object) -> bool:
    # Slow to import, and what nobody has imported has no instances.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _numbers(value: object, name: str, reasons: _Reasons) -> object:
    import numpy as np

    array: npt.NDArray[Any] = np.asarray(value)
    if array.dtype.kind in "biu":
        return array.tolist()
    if array.dtype.kind == "f":
        doubles = array.astype(np.float64)
        plain = doubles.tolist()
        return plain if np.isfinite(doubles).all() else _plain(plain, name, reasons)
    if array.dtype.kind in "OU":
        return _plain(array.tolist(), name, reasons)
    raise TypeError(f"{name}: JSON has no form for an array of {array.dtype}")


def _object(mapping: Mapping[Any, object], name: str, reasons: _Reasons) -> dict[str, object]:
    plain: dict[str, object] = {}
    for key, value in mapping.items():
        word = _key(key, name)
        plain[word] = _plain(value, f"{name}.{word}", reasons)
    return plain


def _key(key: object, name: str) -> str:
    if isinstance(key, Enum):
        return key.name.lower()
    if isinstance(key, (str, int)):
        return str(key)
    raise TypeError(f"{name}: a JSON key is a word or an integer, not {type(key).__name__}")
