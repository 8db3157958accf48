from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest
from invocation import Terminal

from cudakit.cli.progress import Progress, progress_line


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "40")
    return Terminal()


@contextmanager
def progress_on(stream: io.StringIO | None, *, quiet: bool = False) -> Iterator[Progress]:
    with redirect_stderr(stream), progress_line(quiet=quiet) as progress:
        yield progress


def drawn(stream: io.StringIO) -> list[str]:
    return stream.getvalue().split("\r\x1b[K")[1:]


def test_progress_line_is_cleared_at_the_end(terminal: Terminal) -> None:
    with progress_on(terminal) as progress:
        progress("reading", 0.0)
        progress("reading", 0.5)
        progress("replaying", 1.0)

    assert drawn(terminal) == ["reading   0%", "reading  50%", "replaying 100%", ""]


def test_failure_clears_the_progress_line(terminal: Terminal) -> None:
    with pytest.raises(ValueError, match="broken"), progress_on(terminal) as progress:
        progress("reading", 0.5)
        raise ValueError("broken")

    assert drawn(terminal)[-1] == ""


def test_change_below_one_percent_is_not_drawn(terminal: Terminal) -> None:
    with progress_on(terminal) as progress:
        for step in range(1000):
            progress("reading", 0.5 + step * 1e-7)

    assert drawn(terminal) == ["reading  50%", ""]


def test_stage_is_cut_and_escaped(terminal: Terminal) -> None:
    with progress_on(terminal) as progress:
        progress("\x1b[2J" + "x" * 100, 0.5)

    assert drawn(terminal)[0] == ("\\x1b[2J" + "x" * 100)[:39]


def test_without_work_nothing_is_drawn(terminal: Terminal) -> None:
    with progress_on(terminal):
        pass

    assert terminal.getvalue() == ""


def test_quiet_shows_nothing(terminal: Terminal) -> None:
    with progress_on(terminal, quiet=True) as progress:
        progress("reading", 0.5)

    assert terminal.getvalue() == ""


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_stderr_that_is_no_terminal_shows_nothing(
    stream: io.StringIO | None,
) -> None:
    with progress_on(stream) as progress:
        progress("reading", 0.5)

    assert stream is None or stream.getvalue() == ""


def test_dumb_terminal_shows_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with progress_on(terminal) as progress:
        progress("reading", 0.5)

    assert terminal.getvalue() == ""
