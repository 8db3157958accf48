from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.errors import MissingDependency, SnapshotError
from cudakit.report.json import render, render_error, render_line
from cudakit.stacks import Frame
from cudakit.units import Unavailable


class Pool(Enum):
    SMALL = "s"
    LARGE = "l"


class Level(IntEnum):
    LOW = 0
    HIGH = 1


@dataclass(frozen=True, slots=True)
class Item:
    """A result with one field."""

    value: object


@dataclass(frozen=True, slots=True)
class Report:
    name: str
    schema: str = "cudakit.report/1"


@dataclass(frozen=True, slots=True)
class Versioned:
    schema: ClassVar[str] = "cudakit.versioned/2"
    name: str


def value_of(value: object) -> Any:
    return json.loads(render(Item(value)))["value"]


def test_keys_follow_the_order_of_the_fields_after_the_schema() -> None:
    assert list(json.loads(render(Report("a")))) == ["schema", "name"]


def test_schema_of_the_class_is_written_first() -> None:
    assert render(Versioned("a")) == ('{\n  "schema": "cudakit.versioned/2",\n  "name": "a"\n}\n')


def test_frame_is_its_name_file_and_line() -> None:
    frame = Frame(name="step", filename="train.py", line=7)
    assert value_of(frame) == {"name": "step", "filename": "train.py", "line": 7}


def test_enums_are_lower_case_names_as_values_and_as_keys() -> None:
    assert value_of((Pool.SMALL, Level.HIGH)) == ["small", "high"]
    assert value_of({Pool.LARGE: 1, 2: 3}) == {"large": 1, "2": 3}


@pytest.mark.parametrize(
    ("number", "plain"),
    [
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.int32(-5), -5),
        (np.bool_(True), True),
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.longdouble(0.25), 0.25),
        (np.arange(3, dtype=np.uint8), [0, 1, 2]),
        (np.array([[1.5], [2.5]]), [[1.5], [2.5]]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([True]), [True]),
        (np.zeros(0), []),
    ],
)
def test_numpy_values_become_plain_ones(number: object, plain: object) -> None:
    assert value_of(number) == plain
    assert type(value_of(number)) is type(plain)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), np.float32("-inf")])
def test_nan_and_infinities_are_null(number: object) -> None:
    assert value_of(number) is None
    assert value_of(np.array([[1.0], [number]])) == [[1.0], [None]]


def test_unavailable_value_is_null_with_its_reason_beside_it() -> None:
    @dataclass(frozen=True, slots=True)
    class Device:
        power: float | Unavailable
        fans: tuple[int | Unavailable, ...]
        limits: Mapping[str, int | Unavailable]

    device = Device(
        Unavailable("no permission"), (30, Unavailable("absent")), {"sm": Unavailable("old")}
    )
    assert json.loads(render(device)) == {
        "power": None,
        "fans": [30, None],
        "limits": {"sm": None},
        "unavailable": {"power": "no permission", "fans[1]": "absent", "limits.sm": "old"},
    }


def test_reason_is_in_its_own_record() -> None:
    plain = json.loads(render(Item((Item(Unavailable("why")), Item(1)))))
    assert plain == {"value": [{"value": None, "unavailable": {"value": "why"}}, {"value": 1}]}


def test_metadata_renames_a_field_or_leaves_it_out() -> None:
    @dataclass(frozen=True)
    class Named:
        ns: int = field(default=1, metadata={"json": "time_ns"})
        cache: int = field(default=2, metadata={"json": None})

    assert json.loads(render(Named())) == {"time_ns": 1}


def test_key_used_twice_is_rejected() -> None:
    @dataclass(frozen=True)
    class Twice:
        a: int = 1
        b: int = field(default=2, metadata={"json": "a"})

    with pytest.raises(TypeError, match="'a' is taken"):
        render(Twice())


def test_field_named_unavailable_is_rejected() -> None:
    @dataclass(frozen=True)
    class Reserved:
        unavailable: int = 1

    with pytest.raises(TypeError, match="'unavailable' is taken"):
        render(Reserved())


def test_non_ascii_text_is_not_escaped() -> None:
    assert '"größe 模型 🚀"' in render(Item("größe 模型 🚀"))


def test_lone_surrogate_is_escaped_and_read_back() -> None:
    text = render(Item({"k\udc00": "a\ud800z"}))
    text.encode()
    assert json.loads(text)["value"] == {"k\udc00": "a\ud800z"}


def test_control_and_bidirectional_characters_are_escaped() -> None:
    text = render(Item("\x1b[31m\x9b2J\x7f"))
    assert not any(
        ord(letter) < 32 or 0x7F <= ord(letter) < 0xA0 for letter in text.replace("\n", "")
    )
    assert json.loads(text)["value"] == "\x1b[31m\x9b2J\x7f"


@pytest.mark.parametrize("value", [b"raw", {1, 2}, 1j, np.datetime64("2020-01-01"), Item])
def test_value_without_json_form_is_rejected_with_its_path(value: object) -> None:
    with pytest.raises(TypeError, match=r"value\[1\]\.deep: JSON has no form for"):
        render(Item((1, {"deep": value})))


def test_key_of_another_type_is_rejected() -> None:
    with pytest.raises(TypeError, match="value: a JSON key"):
        render(Item({(1, 2): 3}))


def test_result_that_is_not_a_dataclass_is_rejected() -> None:
    with pytest.raises(TypeError, match="not list"):
        render([1, 2])


def test_error_carries_its_kind_hint_and_exit_code() -> None:
    assert json.loads(render_error(SnapshotError("cut off", hint="record it again"), 2)) == {
        "error": {
            "kind": "SnapshotError",
            "message": "cut off",
            "hint": "record it again",
            "exit_code": 2,
        }
    }
    missing = json.loads(render_error(MissingDependency("torch", purpose="recording"), 3))
    assert missing["error"]["exit_code"] == 3


_plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def as_result(plain: object) -> object:
    """Return a JSON value as a Result has it: tuples for lists, dataclasses for some objects."""
    match plain:
        case list():
            return tuple(map(as_result, plain))
        case dict() if "value" in plain and len(plain) == 1:
            return Item(as_result(plain["value"]))
        case dict():
            return {key: as_result(item) for key, item in plain.items()}
    return plain


@given(_plain)
def test_text_is_utf8_and_parses_to_the_same_tree(plain: object) -> None:
    nested = {"value": {"value": plain}}
    text = render(as_result(nested))
    assert json.loads(text.encode()) == json.loads(json.dumps(nested))


def test_render_line_is_the_same_json_on_one_line() -> None:
    item = Item({"name": "a\nb\x9b", "power": Unavailable("no permission"), "values": (1, 2)})
    line = render_line(item)

    assert line.endswith("}\n")
    assert line.count("\n") == 1
    assert json.loads(line) == json.loads(render(item))
    assert "\\u009b" in line


def test_render_line_rejects_a_value_that_is_not_a_result() -> None:
    with pytest.raises(TypeError, match="a Result is a dataclass instance"):
        render_line({"a": 1})
