"""From plain JSON values back to the frozen dataclasses they were written of, by their annotations.

The inverse of ``render.json``: a null whose reason stands in ``unavailable`` beside it is Unavailable,
a key that the dataclass does not have is left alone, so that newer files can be read.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cudakit.units import Unavailable

_T = TypeVar("_T")
_Reasons = Mapping[str, object]


class Mismatch(ValueError):
    """A value that is not of the kind that its place asks for; says which place."""


def read(kind: type[_T], plain: object, place: str = "") -> _T:
    """Make a dataclass of a JSON object. Raises Mismatch, which names the first place that is wrong."""
    if not isinstance(plain, dict):
        raise _wrong(place, "an object", plain)
    hints = get_type_hints(kind)
    reasons = plain.get("unavailable")
    reasons = reasons if isinstance(reasons, dict) else {}
    values = {
        field.name: _member(field, hints[field.name], plain, place, reasons)
        for field in fields(kind)  # type: ignore[arg-type]  # every T here is a dataclass
        if field.init and get_origin(hints[field.name]) is not ClassVar
    }
    return kind(**values)


def _member(
    field: Field[Any], hint: Any, plain: Mapping[str, object], place: str, reasons: _Reasons
) -> object:
    name = field.name
    where = f"{place}.{name}" if place else name
    if name in plain:
        return _value(hint, plain[name], where, name, reasons)
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    raise Mismatch(f"{where} is missing")


def _value(hint: Any, plain: object, place: str, path: str, reasons: _Reasons) -> object:
    """Read by an annotation; ``path`` is what ``unavailable`` calls the place."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _one_of(arguments, plain, place, path, reasons)
    if origin is Literal:
        if plain not in arguments:
            raise _wrong(place, " or ".join(map(repr, arguments)), plain)
        return plain
    if origin is tuple:
        return _tuple(arguments, plain, place, path, reasons)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments[1], plain, place, path, reasons)
    return _scalar(hint, plain, place)


def _one_of(
    kinds: tuple[Any, ...], plain: object, place: str, path: str, reasons: _Reasons
) -> object:
    if plain is None:
        return _nothing(kinds, place, path, reasons)
    problems = []
    for kind in kinds:
        if kind not in (Unavailable, types.NoneType):
            try:
                return _value(kind, plain, place, path, reasons)
            except Mismatch as problem:
                problems.append(problem)
    # The first kind is the usual one; of what is nearly that, the deepest problem says most.
    raise max(problems, key=lambda problem: str(problem).count("."))


def _nothing(kinds: tuple[Any, ...], place: str, path: str, reasons: _Reasons) -> object:
    reason = reasons.get(path)
    if Unavailable in kinds and (reason is not None or types.NoneType not in kinds):
        return Unavailable(str(reason) if reason is not None else "the file does not say why")
    if types.NoneType in kinds:
        return None
    raise _wrong(place, "a value", None)


def _tuple(
    kinds: tuple[Any, ...], plain: object, place: str, path: str, reasons: _Reasons
) -> tuple[object, ...]:
    if not isinstance(plain, list):
        raise _wrong(place, "a list", plain)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        if kinds[0] is float and set(map(type, plain)) <= {float, int}:
            with suppress(OverflowError):  # which is said below, with its place
                return tuple(map(float, plain))  # samples, of which there are many
        kinds = (kinds[0],) * len(plain)
    if len(kinds) != len(plain):
        raise _wrong(place, f"a list of {len(kinds)}", plain)
    return tuple(
        _value(kind, item, f"{place}[{i}]", f"{path}[{i}]", reasons)
        for i, (kind, item) in enumerate(zip(kinds, plain, strict=True))
    )


def _mapping(
    kind: Any, plain: object, place: str, path: str, reasons: _Reasons
) -> dict[str, object]:
    if not isinstance(plain, dict):
        raise _wrong(place, "an object", plain)
    return {
        name: _value(kind, item, f"{place}.{name}", f"{path}.{name}", reasons)
        for name, item in plain.items()
    }


def _scalar(kind: Any, plain: object, place: str) -> object:
    if is_dataclass(kind) and isinstance(kind, type):
        return read(kind, plain, place)
    if isinstance(kind, type) and issubclass(kind, Enum):
        if isinstance(plain, str) and plain.upper() in kind.__members__:
            return kind[plain.upper()]
        raise _wrong(place, " or ".join(name.lower() for name in kind.__members__), plain)
    if kind is float and isinstance(plain, (int, float)) and not isinstance(plain, bool):
        # Neither infinite nor NaN, for which JSON has no form.
        if abs(plain) <= sys.float_info.max:
            return float(plain)
    elif type(plain) is kind:
        return plain
    raise _wrong(place, _WORDS.get(kind, str(kind)), plain)


_WORDS = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}


def _wrong(place: str, expected: str, seen: object) -> Mismatch:
    text = "null" if seen is None else repr(seen)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return Mismatch(f"{place or 'the file'} should be {expected}, not {shown}")
