"""Call stacks on one line."""

from __future__ import annotations

import pytest

from cudakit.report.console.table import stack_line, two_stack_lines
from cudakit.report.document import Stack
from cudakit.stacks import Frame

TORCH = "/opt/venv/lib/python3.12/site-packages/torch/nn/functional.py"
SITE = Frame("forward", "/home/ada/llm/model/attention.py", 97)
STEP = Frame("step", "/home/ada/llm/train/loop.py", 214)
MAIN = Frame("<module>", "/home/ada/llm/train/main.py", 131)
STACK = Stack((Frame("linear", TORCH, 5560), SITE, Frame("call", TORCH, 9), STEP, MAIN), site=1)


def line(stack: Stack, width: int, *, with_callers: bool = False) -> str:
    return stack_line(stack, width=width, with_callers=with_callers).plain


def test_stack_line_has_call_site_and_innermost_frame_as_far_as_they_fit() -> None:
    site = "model/attention.py:97 forward"
    assert line(STACK, 66) == f"{site} (torch/nn/functional.py:5560 linear)"
    assert line(STACK, 65) == f"{site} (…/functional.py:5560 linear)"
    assert line(STACK, 58) == f"{site} (…/functional.py:5560)"
    assert line(STACK, 48) == "…/attention.py:97 forward (…/functional.py:5560)"
    assert line(STACK, 39) == site


def test_path_of_an_installed_package_begins_at_the_package() -> None:
    frame = Frame("linear", TORCH, 5560)
    assert line(Stack((frame,)), 80) == "torch/nn/functional.py:5560 linear"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (29, "model/attention.py:97 forward"),
        (28, "…/attention.py:97 forward"),
        (22, "…/attention.py:97 for…"),
        (1, "…"),
    ],
)
def test_long_call_site_is_cut_at_its_folder_first(width: int, shown: str) -> None:
    assert line(STACK, width) == shown


def test_callers_outside_of_libraries_follow_while_they_fit() -> None:
    both = (
        "model/attention.py:97 forward (torch/nn/functional.py:5560 linear)"
        " ← train/loop.py:214 step ← train/main.py:131 <module>"
    )
    assert line(STACK, len(both), with_callers=True) == both
    assert line(STACK, len(both) - 1, with_callers=True) == both.rpartition(" ← ")[0]


def test_stack_of_libraries_only_shows_the_callers_that_it_has() -> None:
    stack = Stack((Frame("linear", TORCH, 1), Frame("call", TORCH, 2)))
    shown = "torch/nn/functional.py:1 linear ← torch/nn/functional.py:2 call"
    assert line(stack, 80, with_callers=True) == shown


def test_frame_without_a_file_is_its_function() -> None:
    assert line(Stack((Frame("at::native::add", "??", 0),)), 80) == "at::native::add"


def test_empty_stack_has_a_sentence() -> None:
    assert line(Stack(()), 80, with_callers=True) == "no stack recorded"
    assert line(Stack(()), 8) == "no stac…"


def test_very_deep_stack_is_formatted_quickly() -> None:
    deep = Stack((SITE,) + (STEP,) * 100_000)
    assert line(deep, 160, with_callers=True).count("←") == 5


def test_distinct_frame_inside_the_call_site_keeps_its_line() -> None:
    inner = Frame("softmax", TORCH, 7)
    stack = Stack((inner, Frame("linear", TORCH, 5560), SITE), site=2, distinct_index=1)
    assert line(stack, 80) == "model/attention.py:97 forward (torch/nn/functional.py:5560 linear)"
    assert line(stack, 55) == "model/attention.py:97 forward (…/functional.py:5560)"
    assert line(stack, 51) == "…/attention.py:97 forward (…/functional.py:5560)"
    assert line(stack, 47) == "model/attention.py:97 forward"


def test_second_line_of_a_stack_has_the_frame_beside_the_call_site() -> None:
    lines = [text.plain for text in two_stack_lines(STACK, width=34)]
    assert lines == ["model/attention.py:97 forward", "  (…/functional.py:5560 linear)"]
    distant = Stack(STACK.frames, site=1, distinct_index=3)
    lines = [text.plain for text in two_stack_lines(distant, width=24)]
    assert lines == ["…/attention.py:97 forwa…", "  ← …/loop.py:214 step"]
    assert len(two_stack_lines(Stack((SITE,)), width=24)) == 1


def test_distinct_caller_is_shown_after_the_call_site() -> None:
    distant, direct = (Stack(STACK.frames, site=1, distinct_index=index) for index in (3, 2))
    site = "model/attention.py:97 forward"
    assert line(distant, 92) == f"{site} (…/functional.py:5560 linear) ← … train/loop.py:214 step"
    assert line(distant, 56) == f"{site} ← … train/loop.py:214 step"
    assert line(distant, 55) == "…/attention.py:97 forward ← …/loop.py:214 step"
    assert line(distant, 45) == "…/attention.py:97 forward ← …/loop.py:214"
    assert line(direct, 64) == f"{site} ← torch/nn/functional.py:9 call"
