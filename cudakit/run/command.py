"""What to run: the words behind ``cudakit run``, as a program and its arguments."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cudakit.errors import UsageError
from cudakit.run.python import active_python, closed, interpreter

_USAGE = "cudakit run [options] script.py | -m module | -c code | command [arguments]"


class CommandNotFound(UsageError):
    """There is no such program."""

    exit_code = 127  # as of a shell, env and timeout


class CommandNotExecutable(UsageError):
    """The program is there, and cannot be run."""

    exit_code = 126


@dataclass(frozen=True, slots=True)
class Command:
    """A program and its arguments, ready to be started."""

    program: str  # the path of the file that is executed
    argv: tuple[str, ...]  # with the program's own name
    python: str | None = None  # the interpreter that runs it, where it is known to be Python
    unwatched: str = ""  # why nothing can be watched in it; empty where it can be


def resolve(
    words: Sequence[str], *, python: str | None = None, environment: Mapping[str, str] | None = None
) -> Command:
    """Return what a user means by ``script.py``, ``-m module``, ``-c code`` or a command, with arguments.

    ``python`` runs what is no command, and is that of the active environment unless one is named. Raises
    CommandNotFound, CommandNotExecutable, and UsageError where the first word is an option of Python.
    """
    environment = os.environ if environment is None else environment
    if not words:
        raise UsageError("there is nothing to run", hint=_USAGE)
    first = words[0]
    if first.startswith(("-m", "-c")) or first == "-" or _is_script(first, environment):
        program = _chosen(python, environment)
        return Command(program, (program, *words), program)
    if first.startswith("-"):
        raise UsageError(
            f"{first} is no option of cudakit run",
            hint=f"options of Python go behind its name: cudakit run -- python {first} ...",
        )
    program = _executable(first, environment)
    running = interpreter(program)
    is_python = running == (program,)
    line = (program, *words[1:]) if is_python else running
    return Command(program, tuple(words), running[0] if running else None, closed(line or ("",)))


def _chosen(python: str | None, environment: Mapping[str, str]) -> str:
    return _executable(python, environment) if python else active_python(environment)


def _is_script(word: str, environment: Mapping[str, str]) -> bool:
    """Say whether Python is to run a file: one of its own, or one that does not run by itself."""
    path = Path(word)
    if path.is_dir():
        return (path / "__main__.py").is_file()
    if not path.is_file() or not os.access(path, os.R_OK):
        return False
    if path.suffix in (".py", ".pyw", ".pyz"):
        return True
    return not os.access(path, os.X_OK) and not _on_path(word, environment)


def _executable(word: str, environment: Mapping[str, str]) -> str:
    if found := _on_path(word, environment):
        return found
    path = Path(word)
    if os.sep not in word or not path.exists():
        kind = "script" if path.suffix == ".py" else "command"
        raise CommandNotFound(f"there is no {kind} {word!r}", hint=_USAGE)
    if path.is_dir() or not os.access(path, os.X_OK):
        what = "is a directory" if path.is_dir() else "cannot be executed: permission denied"
        raise CommandNotExecutable(f"{word} {what}", hint=_USAGE)
    return word


def _on_path(word: str, environment: Mapping[str, str]) -> str | None:
    if os.sep in word:
        return None
    return shutil.which(word, path=environment.get("PATH"))
