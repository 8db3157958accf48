"""Run a command line in the process of the test; a terminal in memory."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from cudakit.cli import main


@dataclass(frozen=True, slots=True)
class CliRun:
    """The exit code and the output of a command."""

    exit_code: int
    stdout: str
    stderr: str


# The type of the fixture ``cli``.
Cli: TypeAlias = Callable[..., CliRun]


def run_cli(*arguments: str | Path) -> CliRun:
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        exit_code = main([str(argument) for argument in arguments])
    return CliRun(exit_code, stdout.getvalue(), stderr.getvalue())


class Terminal(io.StringIO):
    """A stream whose isatty returns True."""

    def isatty(self) -> bool:
        return True
