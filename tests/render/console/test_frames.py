"""Stacks in one line."""

from __future__ import annotations

import pytest

from cudakit.document import Frame, Stack
from cudakit.render.console.frames import stack_line

TORCH = "/opt/venv/lib/python3.12/site-packages/torch/nn/functional.py"
SITE = Frame("forward", "/home/ada/llm/model/attention.py", 97)
STEP = Frame("step", "/home/ada/llm/train/loop.py", 214)
MAIN = Frame("<module>", "/home/ada/llm/train/main.py", 131)
STACK = Stack((Frame("linear", TORCH, 5560), SITE, Frame("call", TORCH, 9), STEP, MAIN), site=1)


def line(stack: Stack, room: int, *, with_callers: bool = False) -> str:
    return stack_line(stack, room=room, with_callers=with_callers).plain


def test_a_stack_shows_its_site_and_what_that_called_in_the_end_in_the_words_that_fit() -> None:
    site = "model/attention.py:97 forward"
    assert line(STACK, 66) == f"{site} (torch/nn/functional.py:5560 linear)"
    assert line(STACK, 65) == f"{site} (functional.py:5560 linear)"
    assert line(STACK, 56) == f"{site} (linear)"
    assert line(STACK, 37) == site


def test_a_path_of_an_installed_package_begins_at_the_package() -> None:
    frame = Frame("linear", TORCH, 5560)
    assert line(Stack((frame,)), 80) == "torch/nn/functional.py:5560 linear"


@pytest.mark.parametrize(
    ("room", "shown"),
    [
        (29, "model/attention.py:97 forward"),
        (28, "attention.py:97 forward"),
        (22, "attention.py:97 forwa…"),
        (1, "…"),
    ],
)
def test_a_long_site_loses_its_folder_first_then_the_end_of_its_function(
    room: int, shown: str
) -> None:
    assert line(STACK, room) == shown


def test_callers_follow_as_far_as_they_fit_whole_and_without_libraries() -> None:
    both = (
        "model/attention.py:97 forward (torch/nn/functional.py:5560 linear)"
        " ← train/loop.py:214 step ← train/main.py:131 <module>"
    )
    assert line(STACK, len(both), with_callers=True) == both
    assert line(STACK, len(both) - 1, with_callers=True) == both.rpartition(" ← ")[0]


def test_a_stack_of_libraries_only_shows_the_callers_that_it_has() -> None:
    stack = Stack((Frame("linear", TORCH, 1), Frame("call", TORCH, 2)))
    shown = "torch/nn/functional.py:1 linear ← torch/nn/functional.py:2 call"
    assert line(stack, 80, with_callers=True) == shown


def test_a_frame_without_a_file_is_its_function() -> None:
    assert line(Stack((Frame("at::native::add", "??", 0),)), 80) == "at::native::add"


def test_an_empty_stack_says_so() -> None:
    assert line(Stack(()), 80, with_callers=True) == "no stack recorded"
    assert line(Stack(()), 8) == "no stac…"


def test_a_stack_of_any_depth_is_drawn_at_once() -> None:
    deep = Stack((SITE,) + (STEP,) * 100_000)
    assert line(deep, 160, with_callers=True).count("←") == 5
