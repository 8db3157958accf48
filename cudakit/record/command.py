"""Resolve the arguments of ``cudakit run`` to a program, and find the Python that runs it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cudakit.errors import UsageError

_HINT = "name a script, -m MODULE, -c CODE or a command; see cudakit run --help"

_PYTHON_NAME = re.compile(r"python(\d+(\.\d+)*)?t?")
_MAX_SHEBANG_BYTES = 256  # the kernel reads this number of bytes (BINPRM_BUF_SIZE)

# Options with which Python does not start the agent, each with the reason.
_ISOLATING_OPTIONS = {
    "I": "ignores PYTHONPATH",
    "E": "ignores PYTHONPATH",
    "S": "does not import sitecustomize",
}


class CommandNotFound(UsageError):
    """The program does not exist."""

    exit_code = 127  # the exit code of a shell, env and timeout in this case


class CommandNotExecutable(UsageError):
    """The program exists and cannot be executed."""

    exit_code = 126


@dataclass(frozen=True, slots=True)
class Command:
    """A program and its arguments, ready to be started."""

    program: str  # path of the executable file
    argv: tuple[str, ...]  # arguments, after the name of the program
    # Path of the Python interpreter; None if the program is not run by Python.
    python: str | None = None
    # Reason why the agent does not start in the program; empty if the agent starts.
    not_instrumented: str = ""


def resolve(
    command_words: Sequence[str],
    *,
    python: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Command:
    """Return the command for ``script.py``, ``-m module``, ``-c code`` or a program, with arguments.

    ``python`` runs scripts, modules and code; by default the Python of the active environment. Raises
    CommandNotFound, CommandNotExecutable, and UsageError if the first word is another option of Python.
    """
    environment = os.environ if environment is None else environment
    if not command_words:
        raise UsageError("no program to run", hint=_HINT)
    first_word = command_words[0]
    is_of_python = first_word.startswith(("-m", "-c")) or first_word == "-"
    if is_of_python or _is_script(first_word, environment):
        try:
            program = _executable(python, environment) if python else active_python(environment)
        except CommandNotFound:
            raise CommandNotFound(
                f"--python {python}: no such interpreter",
                hint="name an interpreter, for example --python python3",
            ) from None
        return Command(program, (program, *command_words), program)
    if first_word.startswith("-"):
        raise UsageError(
            f"unknown option {first_word}",
            hint=f"pass options of Python after its name: cudakit run -- python {first_word} ...",
        )
    program = _executable(first_word, environment)
    interpreter_words = interpreter(program)
    is_python = interpreter_words == (program,)
    python_command = (program, *command_words[1:]) if is_python else interpreter_words
    reason = why_not_instrumented(python_command or ("",))
    python_path = interpreter_words[0] if interpreter_words else None
    return Command(program, tuple(command_words), python_path, reason)


def _is_script(word: str, environment: Mapping[str, str]) -> bool:
    """Return whether Python must run a file: a Python file, or a file that is not executable."""
    path = Path(word)
    if path.is_dir():
        return (path / "__main__.py").is_file()
    if not path.is_file() or not os.access(path, os.R_OK):
        return False
    if path.suffix in (".py", ".pyw", ".pyz"):
        return True
    return not os.access(path, os.X_OK) and not _on_path(word, environment)


def _executable(word: str, environment: Mapping[str, str]) -> str:
    if executable_path := _on_path(word, environment):
        return executable_path
    path = Path(word)
    is_path = path.suffix == ".py" or os.sep in word
    if path.is_dir():
        raise CommandNotExecutable(f"{word} is a directory", hint=_HINT)
    if path.is_file() and not (os.access(path, os.R_OK) or os.access(path, os.X_OK)):
        raise CommandNotExecutable(
            f"{word} cannot be read: Permission denied",
            hint="check the name and the permissions of the file",
        )
    if not is_path:
        raise CommandNotFound(f"command not found: {word}", hint=_HINT)
    if not path.exists():
        raise CommandNotFound(f"{word} does not exist", hint="check the file name")
    if not os.access(path, os.X_OK):
        raise CommandNotExecutable(f"{word} cannot be executed: Permission denied", hint=_HINT)
    return word


def _on_path(word: str, environment: Mapping[str, str]) -> str | None:
    if os.sep in word:
        return None
    return shutil.which(word, path=environment.get("PATH"))


# --- the Python interpreter


def active_python(
    environment: Mapping[str, str], *, cudakit_python: str = sys.executable, started_as: str = ""
) -> str:
    """Return the Python of the active environment, as a shell starts it for ``python3``.

    It is the Python of VIRTUAL_ENV, else the first one in PATH. ``cudakit_python`` is the Python that runs
    cudakit, possibly in another environment. It is returned if the user named it: ``python -m cudakit``, or
    ``.venv/bin/cudakit`` of an inactive environment. ``started_as`` replaces sys.argv[0].
    """
    started_as = started_as or sys.argv[0]
    directory = os.path.dirname(os.path.abspath(started_as))
    path_directories = environment.get("PATH", "").split(os.pathsep)
    active_directory = os.path.join(environment.get("VIRTUAL_ENV", ""), "bin")
    is_beside_python = directory == os.path.dirname(cudakit_python)
    if os.path.basename(started_as) == "__main__.py" or (
        is_beside_python and directory not in (*path_directories, active_directory)
    ):
        return cudakit_python
    candidate: str | None = os.path.join(active_directory, "python")
    if not environment.get("VIRTUAL_ENV") or not os.access(str(candidate), os.X_OK):
        search_path = environment.get("PATH")
        candidate = shutil.which("python3", path=search_path) or shutil.which(
            "python", path=search_path
        )
    if not candidate:
        return cudakit_python
    # The Python of cudakit may have another name in the same directory.
    candidate = os.path.abspath(candidate)
    is_same = os.path.dirname(candidate) == os.path.dirname(cudakit_python)
    return cudakit_python if is_same else candidate


def interpreter(program: str) -> tuple[str, ...]:
    """Return the Python that runs an executable file, and its options, or nothing if no Python runs it."""
    if _PYTHON_NAME.fullmatch(os.path.basename(program)):
        return (program,)
    try:
        with Path(program).open("rb") as file:
            shebang_line = file.readline(_MAX_SHEBANG_BYTES)
    except OSError:
        return ()
    if not shebang_line.startswith(b"#!"):
        return ()
    words = shebang_line[2:].decode(errors="replace").split()
    if words and os.path.basename(words[0]) == "env":  # #!/usr/bin/env -S python3 -I
        words = [word for word in words[1:] if word != "-S" and "=" not in word]
    is_python = bool(words) and _PYTHON_NAME.fullmatch(os.path.basename(words[0]))
    return tuple(words) if is_python else ()


def why_not_instrumented(command: Sequence[str]) -> str:
    """Return why the agent does not start in a Python with these arguments; empty if the agent starts."""
    for option in _options(command[1:]):
        if option in _ISOLATING_OPTIONS:
            python = shlex.join((os.path.basename(command[0]), f"-{option}"))
            return f"the program is not recorded: {python} {_ISOLATING_OPTIONS[option]}"
    return ""


def _options(arguments: Sequence[str]) -> list[str]:
    """List the one-letter options that precede the program."""
    options: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--check-hash-based-pycs":
            next(words, None)
        elif not word.startswith("-") or word == "-":
            break
        for position, letter in enumerate("" if word.startswith("--") else word[1:], start=2):
            options.append(letter)
            if letter in "cm":  # the program follows
                return options
            if letter in "WX":  # its value is the rest of the word, or else the next word
                if position == len(word):
                    next(words, None)
                break
    return options
