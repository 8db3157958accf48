"""Convert frozen dataclasses to JSON values (dicts, lists, texts, numbers, bools and None) and back.

This is the only encoder and decoder of Results: ``--json`` writes the values of ``to_plain``, ``from_plain``
reads them by the annotations of the dataclass. Each field is a key. ``metadata={"json": name}`` renames the
key, ``metadata={"json": None}`` leaves the field out.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from cudakit.units import Unavailable

if TYPE_CHECKING:
    import numpy.typing as npt

_T = TypeVar("_T")
_Reasons: TypeAlias = dict[str, str]  # the reasons why values are unavailable, by path
_REASONS_KEY = "unavailable"  # the key under which a record has the reasons

# --- from dataclasses to JSON values ---------------------------------------------------------------


def to_plain(record: object, *, inline_reasons: bool = False) -> dict[str, object]:
    """Return a dataclass instance as dicts, lists and scalars.

    ``schema`` (a field or a class attribute) comes first. An Enum becomes its lower-case name. NaN and
    infinities become None. An Unavailable becomes None too, and the record that contains it gets its reason:
    ``{"power": None, "unavailable": {"power": reason}}``. The key of a reason is a path such as ``fans[1]``
    or ``limits.power`` inside of lists and mappings. With ``inline_reasons`` an Unavailable becomes
    ``{"unavailable": reason}``.

    Raises TypeError for values without a JSON form (bytes, sets, dates) and for a key used twice.
    """
    if not _is_record(record):
        raise TypeError(f"a Result is a dataclass instance, not {type(record).__name__}")
    return _json_record(record, inline_reasons)


def _is_record(value: object) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _json_name(field: Field[Any]) -> str | None:
    name: str | None = field.metadata.get("json", field.name)
    return name


def _json_record(record: Any, inline_reasons: bool) -> dict[str, object]:
    members: dict[str, object] = {}
    schema = getattr(record, "schema", None)
    if isinstance(schema, str):
        members["schema"] = schema
    reasons: _Reasons | None = None if inline_reasons else {}
    for field in fields(record):
        name = _json_name(field)
        if name is None or (field.name == "schema" and isinstance(schema, str)):
            continue
        if name in members or name == _REASONS_KEY:
            raise TypeError(f"{type(record).__name__}: the JSON key {name!r} is taken")
        members[name] = _json_value(getattr(record, field.name), name, reasons)
    if reasons:
        members[_REASONS_KEY] = reasons
    return members


def _json_value(value: object, path: str, reasons: _Reasons | None) -> object:
    """Return the JSON form of a value at a path in its record.

    Reasons of unavailable values are added to ``reasons``; if it is None, they are inline.
    """
    match value:
        case Enum():
            return value.name.lower()
        case None | bool() | int() | str():
            return value
        case float():
            return float(value) if math.isfinite(value) else None
        case Unavailable(reason):
            if reasons is None:
                return {_REASONS_KEY: reason}
            reasons[path] = reason
            return None
        case _ if _is_numpy_value(value):
            return _json_array(value, path, reasons)
        case Mapping():
            members: dict[str, object] = {}
            for key, item in value.items():
                if not isinstance(key, (Enum, str, int)):
                    raise TypeError(
                        f"{path}: a JSON key is a word or an integer, not {type(key).__name__}"
                    )
                name = key.name.lower() if isinstance(key, Enum) else str(key)
                members[name] = _json_value(item, f"{path}.{name}", reasons)
            return members
        case list() | tuple():
            return [
                _json_value(item, f"{path}[{index}]", reasons) for index, item in enumerate(value)
            ]
        case _ if _is_record(value):
            return _json_record(value, reasons is None)
    raise TypeError(f"{path}: JSON has no form for {type(value).__name__}")


def _is_numpy_value(value: object) -> bool:
    # numpy is not imported here, because that is slow. Without numpy, no value is an array.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _json_array(value: object, path: str, reasons: _Reasons | None) -> object:
    import numpy as np

    array: npt.NDArray[Any] = np.asarray(value)
    if array.dtype.kind not in "biufOU":
        raise TypeError(f"{path}: JSON has no form for an array of {array.dtype}")
    if array.dtype.kind == "f":
        array = array.astype(np.float64)
    items = array.tolist()
    is_plain = array.dtype.kind in "biu" or (array.dtype.kind == "f" and np.isfinite(array).all())
    return items if is_plain else _json_value(items, path, reasons)


# --- from JSON values to dataclasses ---------------------------------------------------------------


class Mismatch(ValueError):
    """A JSON value does not fit the annotation of its field. The message has the path of the value."""


def from_plain(
    kind: type[_T], json_value: object, path_in_file: str = "", *, strict: bool = False
) -> _T:
    """Return the dataclass instance that ``to_plain`` converted, with or without inline reasons.

    A field whose key is missing gets its default value. Unknown keys are ignored, so that files of newer
    versions can be read; with ``strict``, they raise Mismatch. Raises Mismatch with the path of the first
    wrong value.
    """
    if not isinstance(json_value, dict):
        raise _mismatch(path_in_file, "an object", json_value)
    # The fields that the constructor takes, with their JSON names and annotations.
    record_type: Any = kind
    hints = _type_hints(record_type)
    members = [
        (field, _json_name(field), hints[field.name])
        for field in fields(record_type)
        if field.init and get_origin(hints[field.name]) is not ClassVar
    ]
    unknown_keys = json_value.keys() - {name for _, name, _ in members} - {_REASONS_KEY}
    if strict and unknown_keys:
        raise Mismatch(f"{path_in_file or 'the file'} has an unknown key {min(unknown_keys)!r}")
    reasons = json_value.get(_REASONS_KEY)
    reader = _Reader(reasons if isinstance(reasons, dict) else {}, strict)
    values: dict[str, Any] = {}
    for field, name, hint in members:
        where = f"{path_in_file}.{name}" if path_in_file else str(name)
        if name is not None and name in json_value:
            values[field.name] = reader.read(hint, json_value[name], where, name)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise Mismatch(f"{where} is missing")
    return kind(**values)


@cache
def _type_hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the values of one record by their annotations.

    ``where`` is the path of a value in the file; its ``path`` in the record is the key of the reason why it
    is unavailable.
    """

    reasons: Mapping[str, object]
    strict: bool

    def read(self, hint: Any, value: object, where: str, path: str) -> object:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return self._read_union(arguments, value, where, path)
        if origin is Literal:
            if value not in arguments:
                raise _mismatch(where, " or ".join(map(repr, arguments)), value)
            return value
        if origin is tuple:
            return self._read_tuple(arguments, value, where, path)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            if not isinstance(value, dict):
                raise _mismatch(where, "an object", value)
            return {
                name: self.read(arguments[1], item, f"{where}.{name}", f"{path}.{name}")
                for name, item in value.items()
            }
        if is_dataclass(hint) and isinstance(hint, type):
            return from_plain(hint, value, where, strict=self.strict)
        return _read_scalar(hint, value, where)

    def _read_union(self, kinds: tuple[Any, ...], value: object, where: str, path: str) -> object:
        if value is None:
            reason = self.reasons.get(path)
            if Unavailable in kinds and (reason is not None or types.NoneType not in kinds):
                return Unavailable(
                    str(reason) if reason is not None else "the file gives no reason"
                )
            if types.NoneType in kinds:
                return None
            raise _mismatch(where, "a value", None)
        if Unavailable in kinds and isinstance(value, dict) and value.keys() == {_REASONS_KEY}:
            return Unavailable(_read_scalar(str, value[_REASONS_KEY], where))
        problems = []
        # The type of the value is tried first, so that an integer stays an int if int and float are allowed.
        for kind in sorted(kinds, key=lambda kind: kind is not type(value)):
            if kind not in (Unavailable, types.NoneType):
                try:
                    return self.read(kind, value, where, path)
                except Mismatch as problem:
                    problems.append(problem)
        # The type whose problem has the longest path fits the value best, so its problem is reported.
        raise max(problems, key=lambda problem: str(problem).count("."))

    def _read_tuple(
        self, kinds: tuple[Any, ...], value: object, where: str, path: str
    ) -> tuple[object, ...]:
        if not isinstance(value, list):
            raise _mismatch(where, "a list", value)
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            if kinds[0] is float and set(map(type, value)) <= {float, int}:
                # A fast path for long lists of numbers. The code below reports an OverflowError with its
                # path.
                with suppress(OverflowError):
                    return tuple(map(float, value))
            kinds = (kinds[0],) * len(value)
        if len(kinds) != len(value):
            raise _mismatch(where, f"a list of {len(kinds)}", value)
        return tuple(
            self.read(kind, item, f"{where}[{index}]", f"{path}[{index}]")
            for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
        )


def _read_scalar(kind: Any, json_value: object, path_in_file: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        if isinstance(json_value, str) and json_value.upper() in kind.__members__:
            return kind[json_value.upper()]
        raise _mismatch(
            path_in_file, " or ".join(name.lower() for name in kind.__members__), json_value
        )
    if kind is float and isinstance(json_value, (int, float)) and not isinstance(json_value, bool):
        # JSON has no infinity and no NaN.
        if abs(json_value) <= sys.float_info.max:
            return float(json_value)
    elif type(json_value) is kind:
        return json_value
    raise _mismatch(path_in_file, _TYPE_NAMES.get(kind, str(kind)), json_value)


_TYPE_NAMES = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}


def _mismatch(path_in_file: str, expected: str, actual: object) -> Mismatch:
    actual_text = "null" if actual is None else repr(actual)
    shortened_text = actual_text if len(actual_text) <= 60 else f"{actual_text[:57]}..."
    return Mismatch(f"{path_in_file or 'the file'} should be {expected}, not {shortened_text}")
