"""Output of every command: files that appear complete or not at all, the terminal, reports and progress."""

from __future__ import annotations

import errno
import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal, TextIO, TypeAlias

import click

from cudakit.errors import EnvironmentUnusable, UsageError

if TYPE_CHECKING:
    from cudakit.report.document import Columns, Document, Note, Table
    from cudakit.report.timeline import Flames, Timeline


# Width in pipes and files: call stacks need more than 80 columns, and wider text wraps in mails and issues.
DEFAULT_WIDTH = 100
# Tables are unreadable below this width.
MINIMUM_WIDTH = 40
# Number of lines of a screen if the output is not a terminal.
DEFAULT_HEIGHT = 50


# A file: one text, or its pieces.
Text: TypeAlias = str | Iterable[str]


@dataclass(frozen=True, slots=True)
class Output:
    """An open text stream and its properties."""

    stream: TextIO
    name: str
    width: int  # width of a line, in columns
    color: bool
    ascii_only: bool = False  # whether lines and curves are drawn with ASCII characters only
    height: int = DEFAULT_HEIGHT  # number of lines of the screen

    def write(self, text: Text | Iterable[bytes]) -> None:
        """Write a text, or several texts or bytes in order.

        A character that the stream cannot encode is escaped. Raises EnvironmentUnusable if the disk is full.
        """
        for chunk in (text,) if isinstance(text, str) else text:
            with _os_errors_reported(self.name):
                if isinstance(chunk, bytes):
                    self.stream.buffer.write(chunk)
                    continue
                try:
                    self.stream.write(chunk)
                except UnicodeEncodeError:
                    encoding = self.stream.encoding
                    self.stream.write(chunk.encode(encoding, "backslashreplace").decode(encoding))

    def flush(self) -> None:
        """Flush the stream. Raises EnvironmentUnusable if the disk is full."""
        with _os_errors_reported(self.name):
            self.stream.flush()


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


# --- reports in the formats of -o, --json and --quiet ----------------------------------------------

# Suffix of a format of benchmarks only. Other reports do not write JSON to such a file.
_NVBENCH = "nvbench.json"
# Formats that every report can be written in.
COMMON_FORMATS = ("json", "html", "md", "txt")
# Formats for other tools, of reports with rows, a timeline or weighted call stacks.
ROW_FORMATS = ("csv",)
TIMELINE_FORMATS = ("trace.json", "trace.json.gz", "pftrace", "perfetto.json")
STACK_FORMATS = ("speedscope.json", "collapsed")
# Maximum number of lines of the report that standard error gets if the report is written to a file.
_MAX_SUMMARY_LINES = 3


@dataclass(frozen=True, slots=True)
class Target:
    """A place for the report: a file, or "-" for the terminal; ``suffix`` overrides that of the path."""

    path: str
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The output of a command: places, format, verbosity."""

    json: bool  # whether the result is printed as one JSON document instead of a report
    targets: tuple[Target, ...]
    force: bool  # whether existing files are replaced
    quiet: bool  # whether only the verdict and the findings are printed
    formats: tuple[str, ...]  # suffixes of the formats that the command can write
    report_stream: str = "standard output"  # stream of the report, of -o - and of --json

    def __post_init__(self) -> None:
        if self.json and any(target.path == "-" for target in self.targets):
            raise click.UsageError(
                f"--json and -o - both write to {self.report_stream}; use one of them"
            )

    @property
    def paths(self) -> list[str]:
        """The paths of the files to write."""
        return [target.path for target in self.targets if target.path != "-"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A result and what a file can show of it; ``exports`` replaces or adds formats."""

    result: object
    document: Callable[[], Document]
    rows: Callable[[], Document | Sequence[Columns]] | None = None  # default: those of the document
    timeline: Callable[[], Timeline] | None = None
    stacks: Callable[[], Flames] | None = None
    exports: Mapping[str, Callable[[], Text]] = field(default_factory=dict)
    # A function that returns the verdict and the findings as sentences, or as Notes, which have a symbol. The
    # default is ``brief_sentences(document)``.
    brief_sentences: Callable[[], Sequence[str | Note]] | None = None
    # A function that returns the table whose rows ``--quiet`` prints. The default is the first table of the
    # document; a report with its own sentences has none.
    brief_table: Callable[[], Table] | None = None

    def content(self, suffix: str, target: Output) -> Text | Iterable[bytes]:
        """Return the report in any format, also in those that are not text."""
        if self.timeline and suffix in ("pftrace", "trace.json.gz"):
            from cudakit.report import chrome, perfetto

            write = perfetto.render if suffix == "pftrace" else chrome.render_compressed
            return write(self.timeline())
        return self.text(suffix, target)

    def text(self, suffix: str, target: Output) -> Text:
        """Return the report in a format, with the width and the colors of its target."""
        if suffix in self.exports:
            return self.exports[suffix]()
        if suffix == "json":
            from cudakit.report import json

            return json.render(self.result)
        if suffix == "txt":
            from cudakit.report import console

            return console.render(
                self.document(),
                width=target.width,
                color=target.color,
                ascii_only=target.ascii_only,
                height=target.height,
            )
        if suffix == "html":
            from cudakit.report import html

            return html.render(self.document(), footer=_page_footer())
        if suffix == "md":
            from cudakit.report import markdown

            return markdown.render(self.document())
        return self._export(suffix)

    def _export(self, suffix: str) -> Text:
        """Return the data of the report in a format of other tools."""
        if suffix in ROW_FORMATS:
            from cudakit.report import csv

            return csv.render((self.rows or self.document)())
        if suffix in STACK_FORMATS and self.stacks:
            from cudakit.report import flame

            write = flame.collapsed if suffix == "collapsed" else flame.speedscope
            return write(self.stacks())
        if suffix in TIMELINE_FORMATS and self.timeline:
            from cudakit.report import chrome

            return chrome.render(self.timeline())
        raise ValueError(f"the report has no {suffix}")

    def lines(self, *, with_rows: bool = False) -> tuple[str, ...]:
        """Return the verdict and the findings, one line each; ``with_rows`` adds the main table."""
        if self.brief_sentences:
            return tuple(map(_brief_line, self.brief_sentences()))
        document = self.document()
        rows: Iterable[str] = ()
        if with_rows:
            rows = table_rows(self.brief_table()) if self.brief_table else main_rows(document)
        return tuple(map(_brief_line, (*brief_sentences(document), *rows)))

    def brief_text(self, target: Output, *, with_rows: bool) -> str:
        """Return ``lines`` as a text with the characters that the target can show."""
        return _joined_lines(self.lines(with_rows=with_rows), target)

    def summary_lines(self, formats: Sequence[str]) -> tuple[str, ...]:
        """Return the first line and the most severe ones of ``lines``, and the number of omitted ones.

        ``formats`` are the formats of the written files.
        """
        sentences = (self.brief_sentences or (lambda: brief_sentences(self.document())))()
        has_report = not set(COMMON_FORMATS).isdisjoint(formats)
        return _summary_lines(sentences, has_report=has_report)


def _joined_lines(lines: Iterable[str], target: Output) -> str:
    text = "".join(f"{line}\n" for line in lines)
    return _to_ascii(text) if target.ascii_only else text


def _summary_lines(sentences: Sequence[str | Note], *, has_report: bool) -> tuple[str, ...]:
    first, others = sentences[:1], sentences[1:]
    # The sort is stable: sentences of equal severity stay in the order of the report.
    indices_by_severity = sorted(range(len(others)), key=lambda i: _severity(others[i]))
    shown_indices = sorted(indices_by_severity[: _MAX_SUMMARY_LINES - len(first)])
    lines = [_brief_line(sentence) for sentence in (*first, *(others[i] for i in shown_indices))]
    if omitted_count := len(sentences) - len(lines):
        messages_text = f"{omitted_count:,} more message{'s' * (omitted_count > 1)}"
        verb = "is" if omitted_count == 1 else "are"
        lines.append(
            f"{messages_text} {verb} in the report"
            if has_report
            else f"{messages_text} {verb} in no file: add -o - to print the report"
        )
    return tuple(lines)


def _severity(sentence: str | Note) -> int:
    """Return 0 for an error, 1 for a warning and 2 for other sentences."""
    level = "info" if isinstance(sentence, str) else sentence.level
    return {"error": 0, "warn": 1}.get(level, 2)


def _brief_line(sentence: str | Note) -> str:
    """Return a sentence as one line; a Note begins with its symbol, as in the report."""
    from cudakit.report.document import SYMBOLS

    if isinstance(sentence, str):
        return printable(sentence)
    return f"{SYMBOLS[sentence.level]} {printable(sentence.text)}"


def _page_footer() -> str:
    """Return the versions, the date and the command line, for the footer of an HTML page."""
    from datetime import UTC, datetime
    from importlib.metadata import version
    from platform import python_version

    written_at = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    versions_text = f"cudakit {version('cudakit')}, Python {python_version()}"
    return f"{versions_text}, written {written_at}: {shlex.join(['cudakit', *sys.argv[1:]])}"


def main_rows(document: Document) -> Iterator[str]:
    """Yield the rows of the first table outside of sections."""
    from cudakit.report.document import Table

    for table in [node for node in document.nodes if isinstance(node, Table)][:1]:
        yield from table_rows(table)


def table_rows(table: Table) -> Iterator[str]:
    """Yield the rows of a table as text: ``name H200, memory 1.0 / 140 GiB``.

    Each reason why a row has no value appears once: ``time n/a (not supported)``.
    """
    from cudakit.report.document import format_value
    from cudakit.units import Unavailable

    for row in table.rows:
        cells: list[str] = []
        reasons: set[str] = set()
        for column, value in zip(table.columns, row, strict=True):
            text = format_value(value)
            if isinstance(value, Unavailable):
                if value.reason in reasons:
                    continue
                reasons.add(value.reason)
                text = f"{text} ({value.reason})"
            if text not in ("", "-"):
                cells.append(f"{column.name} {text}".lstrip())
        yield ", ".join(cells)


def brief_sentences(document: Document) -> tuple[str | Note, ...]:
    """Return title, warnings and errors of a document, and the ok notes outside of sections."""
    from cudakit.report.document import Note, walk

    top_level_ids = {id(node) for node in document.nodes}
    notes = [
        node
        for node in walk(document.nodes)
        if isinstance(node, Note)
        and (node.level in ("warn", "error") or (node.level == "ok" and id(node) in top_level_ids))
    ]
    return (document.title, *notes)


def _to_ascii(text: str) -> str:
    from cudakit.report.console.text import ascii_drawing, ascii_symbols

    return ascii_drawing(ascii_symbols(text))


class Outputs:
    """The open files of ``-o``, and the terminal."""

    def __init__(
        self,
        options: OutputOptions,
        files: Sequence[tuple[str, Output]],
        open_files: ExitStack,
        open_terminal: Callable[[], Output],
    ) -> None:
        self._options = options
        self._files = files
        self._open_files = open_files
        self._open_terminal = open_terminal
        # Formats of the report on the terminal. With --quiet or -o FILE, the terminal gets a report only if
        # ``-o -`` or --json asks for it.
        terminal_formats = [
            target.suffix or "txt" for target in options.targets if target.path == "-"
        ]
        self._formats_on_terminal = (
            ["json"]
            if options.json
            else terminal_formats or ([] if files or options.quiet else ["txt"])
        )

    @property
    def terminal_formats(self) -> tuple[str, ...]:
        """The formats of the report on the terminal; empty if the terminal gets only a summary."""
        return tuple(self._formats_on_terminal)

    def write(self, report: Report) -> None:
        """Write the report to every file and to the terminal.

        Files are complete before anything is printed, because the reader of the terminal may close the pipe.
        Raises EnvironmentUnusable if a disk is full.
        """
        for suffix, file in self._files:
            file.write(report.content(suffix, file))
        self._open_files.close()
        for suffix in self._formats_on_terminal:
            terminal = self._open_terminal()
            terminal.write(report.text(suffix, terminal))
        if not self._formats_on_terminal:
            self._print_brief(report)
        self.close()

    def streams(self) -> list[tuple[str, Output]]:
        """Return every open output with its format. A command that writes repeatedly calls ``close`` last."""
        formats = self._formats_on_terminal or ([] if self._files else ["txt"])
        return [*self._files, *((suffix, self._open_terminal()) for suffix in formats)]

    def close(self) -> None:
        """Complete the files, and name them on standard error."""
        self._open_files.close()
        # Standard error must contain nothing else if the JSON document is written to it.
        is_json_on_stderr = self._options.json and self._open_terminal is standard_error
        if not (self._options.quiet or is_json_on_stderr):
            for _, file in self._files:
                click.echo(f"Wrote {printable(file.name)}", err=True)

    def _print_brief(self, report: Report) -> None:
        target = standard_error() if self._files else self._open_terminal()
        if self._files and not self._options.quiet:
            formats = [suffix for suffix, _ in self._files]
            target.write(_joined_lines(report.summary_lines(formats), target))
        else:
            target.write(report.brief_text(target, with_rows=self._options.quiet))


@contextmanager
def open_outputs(
    options: OutputOptions,
    formats: Sequence[str] | None = None,
    *,
    open_terminal: Callable[[], Output] = standard_output,
) -> Iterator[Outputs]:
    """Open the files of ``-o`` before the long work; the block writes the report.

    ``formats`` restricts the formats of the command. ``open_terminal`` returns the
    stream of the report, which is standard error for ``run``. A file appears complete or not at all.

    Raises UsageError for a suffix that is none of ``formats``, for a file named twice, one that exists
    without ``--force``, and one that cannot be written.
    """
    formats = options.formats if formats is None else formats
    files = [target for target in options.targets if target.path != "-"]
    refuse_duplicates(options.paths)
    outputs_by_format = [
        (_target_format(target, formats, options.formats), target.path) for target in files
    ]
    if options.json or len(files) < len(options.targets) or not files:
        open_terminal()  # raises UsageError if standard output is closed
    with ExitStack() as open_files:
        file_outputs = [
            (suffix, open_files.enter_context(open_file(path, force=options.force)))
            for suffix, path in outputs_by_format
        ]
        yield Outputs(options, file_outputs, open_files, open_terminal)


def _target_format(target: Target, formats: Sequence[str], command_formats: Sequence[str]) -> str:
    if not target.suffix:
        return format_of(target.path, formats, command_formats)
    if target.suffix not in formats:
        raise UsageError(
            f"this report cannot be written as {target.suffix}",
            hint=f"use -o FILE with {suffixes(formats)}",
        )
    return target.suffix


def format_of(path: str, formats: Sequence[str], command_formats: Sequence[str] = ()) -> str:
    """Return the format that is the suffix of a file name. Raises UsageError for another suffix.

    ``command_formats`` are all formats of the command, of which only ``formats`` can be written now.
    """
    # Longest suffix first: trace.perfetto.json also ends in .json.
    for suffix in sorted({*formats, *command_formats, _NVBENCH}, key=len, reverse=True):
        if path.lower().endswith(f".{suffix}"):
            if suffix not in formats:
                break
            return suffix
    if os.path.isdir(path):
        raise UsageError(f"{path} is a directory", hint="name a file in it")
    raise UsageError(
        f"cannot write {path or repr(path)}: this report has no format with this suffix",
        hint=f"end the name in {suffixes(formats)}",
    )


def suffixes(formats: Sequence[str]) -> str:
    """Return ".json, .html or .csv" for the formats."""
    *other_suffixes, last_suffix = (f".{suffix}" for suffix in formats)
    return f"{', '.join(other_suffixes)} or {last_suffix}" if other_suffixes else last_suffix


def refuse_duplicates(paths: Sequence[str]) -> None:
    """Raise UsageError if two paths are the same file."""
    resolved_paths = [os.path.realpath(path) for path in paths]
    for path, resolved_path in zip(paths, resolved_paths, strict=True):
        if resolved_paths.count(resolved_path) > 1:
            raise UsageError(f"{path} is named twice", hint="name each file once")


# --- progress of long work, on one line of the terminal --------------------------------------------

# The arguments are the name of the current stage and the completed fraction of it, from 0 to 1.
Progress: TypeAlias = Callable[[str, float], None]


@contextmanager
def progress_line(*, quiet: bool = False) -> Iterator[Progress]:
    """Yield a Progress that writes to stderr if it is a terminal; clear the line at the end."""
    if quiet or not is_capable_terminal(sys.stderr):
        yield _ignore_progress
        return
    line = _Line(sys.stderr)
    try:
        yield line.show
    finally:
        line.replace("")


class _Line:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text = ""

    def show(self, stage: str, fraction: float) -> None:
        text = f"{printable(stage)} {fraction:4.0%}"
        self.replace(text[: terminal_width(self._stream) - 1])

    def replace(self, text: str) -> None:
        # Write only changes: progress is reported often, and the terminal may be remote.
        if text != self._text:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
            self._text = text


def _ignore_progress(stage: str, fraction: float) -> None:
    pass
