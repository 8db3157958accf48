"""Output streams: files that appear complete or not at all, and the terminal."""

from __future__ import annotations

import errno
import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, TextIO

from cudakit.errors import EnvironmentUnusable, UsageError

# Width in pipes and files: call stacks need more than 80 columns, and wider text wraps in mails and issues.
DEFAULT_WIDTH = 100
# Tables are unreadable below this width.
MINIMUM_WIDTH = 40
# Number of lines of a screen if the output is not a terminal.
DEFAULT_HEIGHT = 50


@dataclass(frozen=True, slots=True)
class Output:
    """An open text stream and its properties."""

    stream: TextIO
    name: str
    width: int  # width of a line, in columns
    color: bool
    ascii_only: bool = False  # whether lines and curves are drawn with ASCII characters only
    height: int = DEFAULT_HEIGHT  # number of lines of the screen

    def write(self, text: str | Iterable[str]) -> None:
        """Write a text, or several texts in order.

        A character that the stream cannot encode is escaped. Raises EnvironmentUnusable if the disk is full.
        """
        for chunk in (text,) if isinstance(text, str) else text:
            with _os_errors_reported(self.name):
                self._write(chunk)

    def write_bytes(self, writer: Callable[[BinaryIO], None]) -> None:
        """Call ``writer`` with the binary stream. Raises EnvironmentUnusable if the disk is full."""
        with _os_errors_reported(self.name):
            self.stream.flush()
            writer(self.stream.buffer)

    def flush(self) -> None:
        """Flush the stream. Raises EnvironmentUnusable if the disk is full."""
        with _os_errors_reported(self.name):
            self.stream.flush()

    def _write(self, chunk: str) -> None:
        try:
            self.stream.write(chunk)
        except UnicodeEncodeError:
            encoding = self.stream.encoding
            self.stream.write(chunk.encode(encoding, "backslashreplace").decode(encoding))


@contextmanager
def open_file(path: str, *, force: bool = False) -> Iterator[Output]:
    """Open a text file for writing, with the rules of ``open_binary_file``."""
    with _open_new(path, "t", force=force) as stream:
        yield Output(stream, path, terminal_width(stream), is_capable_terminal(stream))


@contextmanager
def open_binary_file(path: str, *, force: bool = False) -> Iterator[BinaryIO]:
    """Open a binary file for writing.

    The bytes go to a temporary file, which replaces the target if the block succeeds and is deleted if it
    fails. A device or a pipe is written directly. Raises UsageError, before the block runs, if the file
    exists without ``force``, is a directory or cannot be written.
    """
    with _open_new(path, "b", force=force) as stream:
        yield stream


def refuse_unwritable(path: str, *, force: bool = False) -> None:
    """Raise UsageError for a file that another process is to write later, as ``open_binary_file`` does."""
    target = Path(os.path.realpath(path))
    _refuse_unusable_target(_file_mode(target, name=path), name=path, force=force)
    if not target.parent.is_dir():
        raise unwritable_error(path, FileNotFoundError())
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise unwritable_error(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


@contextmanager
def _open_new(path: str, stream_kind: Literal["b", "t"], *, force: bool) -> Iterator[Any]:
    target = Path(os.path.realpath(path))
    mode = _file_mode(target, name=path)
    _refuse_unusable_target(mode, name=path, force=force)
    temporary_path = _temporary_path(target) if mode is None or stat.S_ISREG(mode) else None
    stream = _create_file(temporary_path or target, stream_kind, name=path)
    try:
        yield stream
        with _os_errors_reported(path):
            stream.close()
            if temporary_path:
                temporary_path.replace(target)
    except BaseException:
        _discard_file(stream, temporary_path)
        raise


def terminal_width(stream: TextIO) -> int:
    """Return the number of columns: ``COLUMNS``, or that of the terminal, or 100; at least 40."""
    columns_variable = os.environ.get("COLUMNS", "")
    columns = int(columns_variable) if columns_variable.isdecimal() else 0
    if not columns and stream.isatty():
        columns = os.get_terminal_size(stream.fileno()).columns
    return max(columns or DEFAULT_WIDTH, MINIMUM_WIDTH)


def terminal_height(stream: TextIO) -> int:
    """Return the number of lines: ``LINES``, or that of the terminal, or 50."""
    lines_variable = os.environ.get("LINES", "")
    line_count = int(lines_variable) if lines_variable.isdecimal() else 0
    if not line_count and stream.isatty():
        line_count = os.get_terminal_size(stream.fileno()).lines
    return line_count or DEFAULT_HEIGHT


def wants_color(stream: TextIO) -> bool:
    """Return whether to use colors: by ``NO_COLOR`` (no-color.org), ``FORCE_COLOR``, or else the terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return is_capable_terminal(stream)


def is_capable_terminal(stream: TextIO | None) -> bool:
    """Return whether the stream is a terminal that supports colors and cursor movement."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def printable(text: str) -> str:
    """Return untrusted text as one line, with control characters escaped."""
    from cudakit.report.escape import escape_invisible

    return escape_invisible(" ".join(line.strip() for line in text.splitlines()))


def standard_output() -> Output:
    """Return standard output. Raises UsageError if it is closed."""
    # sys.stdout is None in a process started with ``>&-``, contrary to its declared type.
    stdout: TextIO | None = sys.stdout
    if stdout is None:
        raise UsageError("standard output is closed", hint="write to a file with -o FILE")
    return _terminal(stdout, "standard output")


def standard_error() -> Output:
    """Return standard error."""
    return _terminal(sys.stderr, "standard error")


def _terminal(stream: TextIO, name: str) -> Output:
    return Output(
        stream,
        name,
        terminal_width(stream),
        wants_color(stream),
        wants_ascii(stream),
        terminal_height(stream),
    )


def wants_ascii(stream: TextIO) -> bool:
    """Return whether the encoding of a stream, or ``LC_ALL=C``, allows ASCII only.

    Python writes UTF-8 in the C locale too (PEP 540); only the locale names the encoding of the terminal.
    """
    locale = os.environ.get("LC_ALL") or os.environ.get("LC_CTYPE") or os.environ.get("LANG")
    if locale in ("C", "POSIX"):
        return True
    try:
        "━⣤✓".encode(stream.encoding or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return True
    return False


def _file_mode(target: Path, *, name: str) -> int | None:
    try:
        return target.stat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unwritable_error(name, error) from error


def _refuse_unusable_target(mode: int | None, *, name: str, force: bool) -> None:
    if name.endswith(os.sep) or (mode is not None and stat.S_ISDIR(mode)):
        raise UsageError(f"{name} is a directory", hint="name a file in it")
    if mode is not None and stat.S_ISREG(mode) and not force:
        raise UsageError(f"{name} exists", hint="-f replaces it")


def _temporary_path(target: Path) -> Path:
    # The rename is atomic because both names are in one directory. The temporary name does not contain the
    # target's name, which may already have the maximum length.
    return target.with_name(f".cudakit-{os.getpid()}-{os.urandom(4).hex()}.partial")


def _create_file(path: Path, stream_kind: Literal["b", "t"], *, name: str) -> IO[Any]:
    # A temporary file must not exist yet; a device or a named pipe exists.
    mode = "w" if path.exists() else "x"
    try:
        if stream_kind == "b":
            return path.open(f"{mode}b")
        return path.open(mode, encoding="utf-8", errors="backslashreplace", newline="\n")
    except OSError as error:
        raise unwritable_error(name, error) from error


def unwritable_error(name: str, error: OSError) -> UsageError:
    """Return the error for a file that cannot be created; ``error`` is Python's exception."""
    directory = os.path.dirname(name) or "."
    if isinstance(error, FileNotFoundError):
        return UsageError(
            f"cannot write {name}: the directory {directory} does not exist",
            hint=f"create it with: mkdir -p {shlex.quote(directory)}",
        )
    return UsageError(
        f"cannot write {name}: {error.strerror}",
        hint="check the permissions of the directory, or choose another file"
        if isinstance(error, PermissionError)
        else "choose another file",
    )


def _discard_file(stream: IO[Any], partial_path: Path | None) -> None:
    with suppress(OSError):
        stream.close()
    if partial_path:
        partial_path.unlink(missing_ok=True)


@contextmanager
def _os_errors_reported(name: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise EnvironmentUnusable(
            f"cannot write {name}: {error.strerror}",
            hint="free space on the disk, or write to another directory",
        ) from error
