"""Names of streams and call sites."""

from __future__ import annotations

import pytest

from cudakit.sanitize.hints import (
    call_site,
    stream_name,
)
from cudakit.stacks import Frame
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


def test_call_site_is_the_file_and_line() -> None:
    frames = (Frame("f", "", 3), Frame("step", "/home/u/train.py", 7), Frame("m", "/x.py", 1))

    assert call_site(frames) == "train.py:7"
    assert call_site(()) == ""
