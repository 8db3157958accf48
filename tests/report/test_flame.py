"""Weighted call stacks for speedscope, and as collapsed stacks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.report.flame import collapsed, speedscope
from cudakit.report.timeline import Flame, Flames
from cudakit.stacks import Frame


def stack(*names: str) -> tuple[Frame, ...]:
    return tuple(Frame(name, "", 0) for name in names)


def graph(*stacks: tuple[tuple[Frame, ...], int], name: str = "all") -> Flames:
    return Flames("Memory", [Flame(name, "bytes", stacks)])


def lines_of(flames: Flames) -> list[str]:
    return "".join(collapsed(flames)).splitlines()


def content_of(flames: Flames) -> dict[str, Any]:
    content: dict[str, Any] = json.loads("".join(speedscope(flames)).encode())
    return content


def test_line_is_a_stack_and_its_bytes() -> None:
    flames = graph((stack("all", "train"), 10), ((Frame("step", "/a/train.py", 3),), 60))
    assert lines_of(flames) == ["all;train 10", "/a/train.py:3 step 60"]


@pytest.mark.parametrize(
    ("label", "written"),
    [
        ("a;b", "a:b"),
        ("a\r\nb", r"a\r\nb"),
        ("\x1b[2Ja\u2028\x85\u202eb", r"\x1b[2Ja\u2028\x85\u202eb"),
        ("", "?"),
        (" ", "?"),
        ("f (train.py:3)", "f (train.py:3)"),
        ("größe\ud800", r"größe\ud800"),
    ],
)
def test_label_never_breaks_its_line(label: str, written: str) -> None:
    assert lines_of(graph((stack(label), 1))) == [f"{written} 1"]


def test_several_processes_are_the_first_frames_of_collapsed_stacks() -> None:
    flames = [
        Flame(f"{pid} (simulated)", "nanoseconds", [(stack("f"), 2)], prefix=pid) for pid in "ab"
    ]
    assert lines_of(Flames("t", flames)) == ["a;f 2", "b;f 2"]
    assert lines_of(Flames("t", flames[:1])) == ["f 2"]


def test_deep_stack_is_written() -> None:
    flames = graph((stack(*["f"] * 20_000), 1))
    (line,) = lines_of(flames)
    assert line.count(";") == 19_999
    (profile,) = content_of(flames)["profiles"]
    assert [len(sample) for sample in profile["samples"]] == [20_000]


def test_speedscope_file_names_its_format_its_title_and_its_first_profile() -> None:
    content = content_of(graph((stack("all"), 1)))
    assert content["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert (content["name"], content["activeProfileIndex"]) == ("Memory", 0)


def test_samples_are_stacks_with_their_weights() -> None:
    frame = Frame("f", "/a/train.py", 3)
    content = content_of(graph((stack("all"), 3), ((*stack("all"), frame, *stack("all")), 7)))
    assert content["shared"] == {
        "frames": [{"name": "all"}, {"name": "f", "file": "/a/train.py", "line": 3}]
    }
    assert content["profiles"] == [
        {
            "type": "sampled",
            "name": "all",
            "unit": "bytes",
            "startValue": 0,
            "endValue": 10,
            "samples": [[0], [0, 1, 0]],
            "weights": [3, 7],
        }
    ]


def test_every_flame_is_a_profile_and_frames_are_shared() -> None:
    first = Flame("at peak", "bytes", [(stack("at peak", "f"), 2)])
    second = Flame("f", "bytes", [(stack("f"), 3)])
    content = content_of(Flames("Two", [first, second]))
    assert [profile["name"] for profile in content["profiles"]] == ["at peak", "f"]
    assert [profile["samples"] for profile in content["profiles"]] == [[[0, 1]], [[1]]]


@given(st.text(st.characters(exclude_categories=())), st.lists(st.integers(0, 2**50)))
def test_any_label_is_valid_utf8_and_weights_add_up(label: str, weights: list[int]) -> None:
    flames = graph(*((stack(label), weight) for weight in weights), name=label)
    (profile,) = content_of(flames)["profiles"]
    assert profile["endValue"] == sum(profile["weights"]) == sum(weights)
    assert [int(line.rpartition(" ")[2]) for line in lines_of(flames)] == weights
