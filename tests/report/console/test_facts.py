"""Facts on the terminal."""

from __future__ import annotations

from cudakit.report.console import facts_lines
from cudakit.report.document import Bytes, Count, Facts, Rate, Seconds, Stack, Text
from cudakit.stacks import Frame
from cudakit.units import Unavailable


def drawn(facts: Facts, width: int = 80) -> list[str]:
    return [line.plain for line in facts_lines(facts, width)]


def test_values_begin_in_one_column() -> None:
    facts = Facts((("peak", Bytes(3 << 30)), ("requested", Bytes(1 << 30, derived=True))))
    assert drawn(facts) == ["peak       3.00 GiB", "requested  ~1.00 GiB"]


def test_wide_terminal_shows_two_columns_read_downwards() -> None:
    facts = Facts(tuple((f"fact {i}", Count(i)) for i in range(5)))
    assert drawn(facts, 115) == [f"fact {i}  {i}" for i in range(5)]
    assert drawn(facts, 116) == [
        "fact 0  0      fact 3  3",
        "fact 1  1      fact 4  4",
        "fact 2  2      ",
    ]


def test_unavailable_fact_has_its_reason() -> None:
    facts = Facts((("free", Unavailable("no device")), ("power", Unavailable(""))))
    assert drawn(facts) == ["free   n/a (no device)", "power  n/a"]


def test_value_that_is_not_a_number_is_not_available() -> None:
    facts = Facts((("a", Seconds(float("inf"))), ("b", Rate(float("nan"), "B"))))
    assert drawn(facts) == ["a  n/a", "b  n/a"]


def test_long_value_wraps_in_its_column() -> None:
    facts = Facts((("note", Text("one two three four")),))
    assert drawn(facts, 15) == ["note  one two", "      three", "      four"]


def test_stack_shows_its_callers_below() -> None:
    stack = Stack((Frame("forward", "model.py", 9), Frame("step", "a/b/train.py", 20)))
    assert drawn(Facts((("at", stack),))) == ["at  model.py:9 forward", "    ← b/train.py:20 step"]
