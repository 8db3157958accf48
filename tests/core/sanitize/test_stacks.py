"""Which frame of a stack is the program's own."""

from __future__ import annotations

import pytest

from cudakit.core.sanitize.stacks import place, site
from cudakit.document import Frame


@pytest.mark.parametrize(
    "library",
    [
        "/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py",
        "/usr/lib/python3/dist-packages/cupy/core.py",
        "/usr/lib/python3.12/threading.py",
        "/src/cudakit/gpu/sim/device.py",
        "<frozen importlib._bootstrap>",
        "",
    ],
)
def test_the_innermost_frame_outside_libraries_is_seen_first(library: str) -> None:
    frames = (Frame("f", library, 3), Frame("step", "/home/u/train.py", 7), Frame("m", "/x.py", 1))

    assert site(frames) == 1
    assert place(frames) == "train.py:7"


@pytest.mark.parametrize("typed", ["<stdin>", "<string>", "<ipython-input-3>"])
def test_what_a_person_typed_is_no_library(typed: str) -> None:
    assert site((Frame("run", typed, 1), Frame("main", "/x.py", 2))) == 0


def test_a_stack_of_libraries_alone_begins_at_its_innermost_frame() -> None:
    frames = (Frame("f", "<generated>", 3), Frame("g", "/v/site-packages/a/b.py", 9))

    assert site(frames) == 0


def test_no_stack_is_nowhere() -> None:
    assert (site(()), place(())) == (0, "")
