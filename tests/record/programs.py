"""Run programs plain and supervised, with the same standard streams."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from cudakit.record.command import resolve
from cudakit.record.protocol import AgentMessage, Settings
from cudakit.record.supervise import supervise
from cudakit.trace.spool import Batch

RECORDING = Settings(sanitize=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The status and the output of a program."""

    status: int
    stdout: str
    stderr: str


def plain(words: Sequence[str], *, cwd: Path, stdin: str = "", **more: str) -> Outcome:
    """Run a command as a shell does; ``python`` is the Python of these tests."""
    first = sys.executable if words[0] == "python" else words[0]
    completed = subprocess.run(
        [first, *words[1:]],
        cwd=cwd,
        env=environment(more),
        input=stdin,
        close_fds=False,  # as a shell does
        check=False,
        capture_output=True,
        text=True,
    )
    return Outcome(completed.returncode, completed.stdout, completed.stderr)


def supervised(
    words: Sequence[str],
    *,
    cwd: Path,
    stdin: str = "",
    settings: Settings = RECORDING,
    on_batch: Callable[[Batch], bool] = lambda _: False,
    on_message: Callable[[AgentMessage], None] = lambda _: None,
    on_stop: Callable[[], None] = lambda: None,
    seconds_to_end: float = 5.0,
    **more: str,
) -> Outcome:
    """Run the words that a user types after ``cudakit run``, supervised by this process."""
    with TemporaryFile() as stdin_file, TemporaryFile() as stdout, TemporaryFile() as stderr:
        stdin_file.write(stdin.encode())
        stdin_file.seek(0)
        with _working_in(cwd), _redirected(stdin_file, stdout, stderr):
            status = supervise(
                resolve(words, python=sys.executable),
                settings=settings,
                on_batch=on_batch,
                on_message=on_message,
                on_stop=on_stop,
                environment=environment(more),
                seconds_to_end=seconds_to_end,
            )
        return Outcome(status, _content(stdout), _content(stderr))


def environment(more: Mapping[str, str]) -> dict[str, str]:
    variables = {name: os.environ[name] for name in os.environ if not name.startswith("PYTHON")}
    # Plain and supervised runs must leave the same files.
    return {**variables, "PYTHONDONTWRITEBYTECODE": "1", **more}


@contextmanager
def _working_in(directory: Path) -> Iterator[None]:
    previous_directory = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(previous_directory)


@contextmanager
def _redirected(*files: BinaryIO) -> Iterator[None]:
    saved = [os.dup(number) for number in range(3)]
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        for number, copy in enumerate(saved):
            os.dup2(copy, number)
            os.close(copy)


def _content(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode()
