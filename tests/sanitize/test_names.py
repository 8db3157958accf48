"""Names of streams and call sites."""

from __future__ import annotations

import pytest

from cudakit.report.document import Frame
from cudakit.sanitize.names import (
    BACKWARD_FRAME,
    call_site,
    call_site_index,
    stream_name,
)
from cudakit.trace.kinds import StreamFlag


@pytest.mark.parametrize(
    ("number", "flag", "name"),
    [
        (0, None, "the host"),
        (1, StreamFlag.LEGACY, "the legacy default stream"),
        (7, StreamFlag.NON_BLOCKING, "stream 7 (non-blocking)"),
        (9, StreamFlag.BLOCKING, "stream 9"),
        (11, StreamFlag.PER_THREAD, "per-thread default stream 11"),
        (13, None, "stream 13"),
    ],
)
def test_stream_name_uses_cuda_terms(number: int, flag: StreamFlag | None, name: str) -> None:
    assert stream_name(number, flag) == name


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
def test_call_site_is_innermost_frame_outside_libraries(library: str) -> None:
    frames = (Frame("f", library, 3), Frame("step", "/home/u/train.py", 7), Frame("m", "/x.py", 1))

    assert call_site_index(frames) == 1
    assert call_site(frames) == "train.py:7"


@pytest.mark.parametrize("typed", ["<stdin>", "<string>", "<ipython-input-3>"])
def test_interactive_code_counts_as_program_code(typed: str) -> None:
    assert call_site_index((Frame("run", typed, 1), Frame("main", "/x.py", 2))) == 0


def test_call_site_of_library_only_stack_is_its_innermost_frame() -> None:
    frames = (Frame("f", "<generated>", 3), Frame("g", "/v/site-packages/a/b.py", 9))

    assert call_site_index(frames) == 0


def test_call_site_of_empty_stack_is_empty() -> None:
    assert (call_site_index(()), call_site(())) == (0, "")


def test_call_site_of_backward_pass_is_its_start() -> None:
    synthetic = Frame(BACKWARD_FRAME, "", 0)
    torch = Frame("backward", "/v/site-packages/torch/_tensor.py", 9)

    assert call_site((synthetic, torch, Frame("step", "/home/u/train.py", 7))) == "train.py:7"
    assert call_site((synthetic, torch)) == "_tensor.py:9"
    assert call_site_index((synthetic,)) == 0
