from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from cudakit.render.json import render, render_line
from cudakit.units import Unavailable


@dataclass(frozen=True)
class Look:
    name: str
    values: tuple[int, ...]
    power: int | Unavailable


LOOK = Look("a\nb\x9b", (1, 2), Unavailable("no permission"))


def test_a_line_is_the_same_json_on_one_line() -> None:
    line = render_line(LOOK)

    assert line.endswith("}\n")
    assert line.count("\n") == 1
    assert json.loads(line) == json.loads(render(LOOK))
    assert "\\u009b" in line


def test_a_line_is_of_a_result_too() -> None:
    with pytest.raises(TypeError, match="a Result is a dataclass instance"):
        render_line({"a": 1})
