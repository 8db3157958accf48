"""Convert frozen dataclasses to JSON values (dicts, lists, texts, numbers, bools and None) and back.

This is the only encoder and decoder of Results: ``--json`` writes the values of ``to_plain``, ``from_plain``
reads them by the annotations of the dataclass. Each field is a key. ``metadata={"json": name}`` renames the
key, ``metadata={"json": None}`` leaves the field out.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
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
    reason_by_path: _Reasons | None = None if inline_reasons else {}
    for name, value in _json_members(record):
        if name in members or name == _REASONS_KEY:
            raise TypeError(f"{type(record).__name__}: the JSON key {name!r} is taken")
        members[name] = _json_value(value, name, reason_by_path)
    if reason_by_path:
        members[_REASONS_KEY] = reason_by_path
    return members


def _json_members(record: Any) -> Iterator[tuple[str, object]]:
    schema = getattr(record, "schema", None)
    if isinstance(schema, str):
        yield "schema", schema
    for field in fields(record):
        name = _json_name(field)
        if name is not None and not (field.name == "schema" and isinstance(schema, str)):
            yield name, getattr(record, field.name)


def _json_value(value: object, path_in_record: str, reason_by_path: _Reasons | None) -> object:
    """Return the JSON form of a value.

    Reasons of unavailable values are added to ``reason_by_path``; if it is None, they are inline.
    """
    match value:
        case Enum():
            return value.name.lower()
        case None | bool() | int() | str():
            return value
        case float():
            return float(value) if math.isfinite(value) else None
        case Unavailable(reason):
            if reason_by_path is None:
                return {_REASONS_KEY: reason}
            reason_by_path[path_in_record] = reason
            return None
        case _ if _is_numpy_value(value):
            return _json_array(value, path_in_record, reason_by_path)
        case Mapping():
            return _json_mapping(value, path_in_record, reason_by_path)
        case list() | tuple():
            return [
                _json_value(item, f"{path_in_record}[{index}]", reason_by_path)
                for index, item in enumerate(value)
            ]
        case _ if _is_record(value):
            return _json_record(value, reason_by_path is None)
    raise TypeError(f"{path_in_record}: JSON has no form for {type(value).__name__}")


def _is_numpy_value(value: object) -> bool:
    # numpy is not imported here, because that is slow. Without numpy, no value is an array.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _json_array(value: object, path_in_record: str, reason_by_path: _Reasons | None) -> object:
    import numpy as np

    array: npt.NDArray[Any] = np.asarray(value)
    if array.dtype.kind in "biu":
        return array.tolist()
    if array.dtype.kind == "f":
        doubles = array.astype(np.float64)
        items = doubles.tolist()
        return (
            items
            if np.isfinite(doubles).all()
            else _json_value(items, path_in_record, reason_by_path)
        )
    if array.dtype.kind in "OU":
        return _json_value(array.tolist(), path_in_record, reason_by_path)
    raise TypeError(f"{path_in_record}: JSON has no form for an array of {array.dtype}")


def _json_mapping(
    mapping: Mapping[Any, object], path_in_record: str, reason_by_path: _Reasons | None
) -> dict[str, object]:
    members: dict[str, object] = {}
    for key, value in mapping.items():
        name = _json_key(key, path_in_record)
        members[name] = _json_value(value, f"{path_in_record}.{name}", reason_by_path)
    return members


def _json_key(key: object, path_in_record: str) -> str:
    if isinstance(key, Enum):
        return key.name.lower()
    if isinstance(key, (str, int)):
        return str(key)
    raise TypeError(
        f"{path_in_record}: a JSON key is a word or an integer, not {type(key).__name__}"
    )


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
    hinted_fields = _hinted_fields(kind)
    known_keys = {_json_name(field) for field, _ in hinted_fields} | {_REASONS_KEY}
    unknown_keys = sorted(json_value.keys() - known_keys) if strict else ()
    if unknown_keys:
        raise Mismatch(f"{path_in_file or 'the file'} has an unknown key {unknown_keys[0]!r}")
    reasons = json_value.get(_REASONS_KEY)
    reader = _Reader(reasons if isinstance(reasons, dict) else {}, strict)
    return kind(
        **{
            f.name: reader.read_member(f, hint, json_value, path_in_file)
            for f, hint in hinted_fields
        }
    )


@cache
def _type_hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _hinted_fields(kind: Any) -> list[tuple[Field[Any], Any]]:
    """Return the fields that the constructor takes, with their annotations."""
    type_hints = _type_hints(kind)
    return [
        (field, type_hints[field.name])
        for field in fields(kind)
        if field.init and get_origin(type_hints[field.name]) is not ClassVar
    ]


class _Reader:
    """Reads the fields of one record by their annotations.

    ``path_in_record`` of an unavailable value is the key of its reason.
    """

    def __init__(self, reason_by_path: Mapping[str, object], strict: bool) -> None:
        self._reason_by_path = reason_by_path
        self._strict = strict

    def read_member(
        self, field: Field[Any], hint: Any, json_value: Mapping[str, object], path_in_file: str
    ) -> Any:
        name = _json_name(field)
        member_path = f"{path_in_file}.{name}" if path_in_file else str(name)
        if name is not None and name in json_value:
            return self._read_value(hint, json_value[name], member_path, name)
        if field.default is not MISSING:
            return field.default
        if field.default_factory is not MISSING:
            return field.default_factory()
        raise Mismatch(f"{member_path} is missing")

    def _read_value(
        self, hint: Any, json_value: object, path_in_file: str, path_in_record: str
    ) -> object:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return self._read_union(arguments, json_value, path_in_file, path_in_record)
        if origin is Literal:
            if json_value not in arguments:
                raise _mismatch(path_in_file, " or ".join(map(repr, arguments)), json_value)
            return json_value
        if origin is tuple:
            return self._read_tuple(arguments, json_value, path_in_file, path_in_record)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return self._read_mapping(arguments[1], json_value, path_in_file, path_in_record)
        if is_dataclass(hint) and isinstance(hint, type):
            return from_plain(hint, json_value, path_in_file, strict=self._strict)
        return _read_scalar(hint, json_value, path_in_file)

    def _read_union(
        self, kinds: tuple[Any, ...], json_value: object, path_in_file: str, path_in_record: str
    ) -> object:
        if json_value is None:
            return self._read_null(kinds, path_in_file, path_in_record)
        if (
            Unavailable in kinds
            and isinstance(json_value, dict)
            and json_value.keys() == {_REASONS_KEY}
        ):
            return Unavailable(_read_scalar(str, json_value[_REASONS_KEY], path_in_file))
        problems = []
        # The type of the value is tried first, so that an integer stays an int if int and float are allowed.
        for kind in sorted(kinds, key=lambda kind: kind is not type(json_value)):
            if kind not in (Unavailable, types.NoneType):
                try:
                    return self._read_value(kind, json_value, path_in_file, path_in_record)
                except Mismatch as problem:
                    problems.append(problem)
        # The type whose problem has the longest path fits the value best, so its problem is reported.
        raise max(problems, key=lambda problem: str(problem).count("."))

    def _read_null(
        self, kinds: tuple[Any, ...], path_in_file: str, path_in_record: str
    ) -> Unavailable | None:
        reason = self._reason_by_path.get(path_in_record)
        if Unavailable in kinds and (reason is not None or types.NoneType not in kinds):
            return Unavailable(str(reason) if reason is not None else "the file gives no reason")
        if types.NoneType in kinds:
            return None
        raise _mismatch(path_in_file, "a value", None)

    def _read_tuple(
        self, kinds: tuple[Any, ...], json_value: object, path_in_file: str, path_in_record: str
    ) -> tuple[object, ...]:
        if not isinstance(json_value, list):
            raise _mismatch(path_in_file, "a list", json_value)
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            if kinds[0] is float and set(map(type, json_value)) <= {float, int}:
                # A fast path for long lists of numbers. The code below reports an OverflowError with its
                # path.
                with suppress(OverflowError):
                    return tuple(map(float, json_value))
            kinds = (kinds[0],) * len(json_value)
        if len(kinds) != len(json_value):
            raise _mismatch(path_in_file, f"a list of {len(kinds)}", json_value)
        return tuple(
            self._read_value(kind, item, f"{path_in_file}[{index}]", f"{path_in_record}[{index}]")
            for index, (kind, item) in enumerate(zip(kinds, json_value, strict=True))
        )

    def _read_mapping(
        self, kind: Any, json_value: object, path_in_file: str, path_in_record: str
    ) -> dict[str, object]:
        if not isinstance(json_value, dict):
            raise _mismatch(path_in_file, "an object", json_value)
        return {
            name: self._read_value(kind, item, f"{path_in_file}.{name}", f"{path_in_record}.{name}")
            for name, item in json_value.items()
        }


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
