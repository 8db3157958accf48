"""Conversion of dataclasses to JSON values and back; tests/report/test_json.py tests single values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.serialize import Mismatch, from_plain, to_plain
from cudakit.units import Unavailable


class Colour(Enum):
    RED = auto()
    DEEP_BLUE = auto()


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    power: float | Unavailable
    fans: tuple[int | Unavailable, ...] = ()


@dataclass(frozen=True, slots=True)
class Whole:
    schema: ClassVar[str] = "test.whole/1"
    parts: tuple[Part, ...]
    limits: Mapping[str, int | float | Unavailable]
    kind: Literal["new", "old"]
    colour: Colour
    pair: tuple[int, str] | None
    number: int = field(metadata={"json": "count"})
    hidden: str = field(default="", metadata={"json": None})


reasons = st.builds(Unavailable, st.text())
numbers = st.floats(allow_nan=False, allow_infinity=False)
parts = st.builds(
    Part, st.text(), numbers | reasons, st.lists(st.integers() | reasons, max_size=3).map(tuple)
)
wholes = st.builds(
    Whole,
    st.lists(parts, max_size=3).map(tuple),
    st.dictionaries(st.text(), st.integers() | numbers | reasons, max_size=3),
    st.sampled_from(["new", "old"]),
    st.sampled_from(Colour),
    st.none() | st.tuples(st.integers(), st.text()),
    st.integers(),
)

WHOLE = Whole((Part("a", Unavailable("off"), (1,)),), {"x": 1}, "new", Colour.RED, (1, "b"), 7)


@given(wholes, st.booleans())
def test_from_plain_inverts_to_plain_in_both_forms(made: Whole, inline_reasons: bool) -> None:
    plain = json.loads(json.dumps(to_plain(made, inline_reasons=inline_reasons)))
    strict = inline_reasons and plain.pop("schema") != ""  # a class attribute is no field

    assert from_plain(Whole, plain, strict=strict) == made


def test_keys_are_renamed_and_left_out_by_field_metadata() -> None:
    plain = to_plain(WHOLE)

    assert list(plain) == ["schema", "parts", "limits", "kind", "colour", "pair", "count"]


def test_reasons_are_beside_the_values_or_in_their_place() -> None:
    (beside,) = to_plain(WHOLE)["parts"]  # type: ignore[misc]
    (inline,) = to_plain(WHOLE, inline_reasons=True)["parts"]  # type: ignore[misc]

    assert beside == {
        "name": "a",
        "power": None,
        "fans": [1],
        "unavailable": {"power": "off"},
    }
    assert inline == {"name": "a", "power": {"unavailable": "off"}, "fans": [1]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"count": True}, "count should be a whole number, not True"),
        ({"count": None}, "count should be a whole number, not null"),
        ({"kind": "odd"}, "kind should be 'new' or 'old', not 'odd'"),
        ({"colour": "green"}, "colour should be red or deep_blue, not 'green'"),
        ({"pair": [1]}, "pair should be a list of 2, not [1]"),
        ({"limits": {"x": "?"}}, "limits.x should be a whole number, not '?'"),
        ({"parts": [{}]}, "parts[0].name is missing"),
        ({"parts": [{"name": "a", "power": 1e999}]}, "parts[0].power should be a number, not inf"),
    ],
)
def test_mismatch_names_the_place(changed: dict[str, object], message: str) -> None:
    with pytest.raises(Mismatch) as caught:
        from_plain(Whole, {**to_plain(WHOLE), **changed})
    assert str(caught.value) == message


def test_unknown_keys_are_ignored_unless_strict() -> None:
    newer = {**to_plain(Part("a", 1.0)), "weight": 3}

    assert from_plain(Part, newer) == Part("a", 1.0)
    with pytest.raises(Mismatch, match="the file has an unknown key 'weight'"):
        from_plain(Part, newer, strict=True)


def test_null_without_a_reason_is_unavailable_too() -> None:
    read = from_plain(Part, {"name": "a", "power": None})

    assert read.power == Unavailable("the file gives no reason")
