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
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO, TypeAlias

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
    """Open a text file for writing, with the rules of ``open_new_file``."""
    with open_new_file(path, force=force, is_text=True) as stream:
        yield Output(stream, path, terminal_width(stream), is_capable_terminal(stream))


@contextmanager
def open_new_file(path: str, *, force: bool = False, is_text: bool = False) -> Iterator[Any]:
    """Open a binary file, or one in UTF-8, for writing.

    The bytes go to a temporary file, which replaces the target if the block succeeds and is deleted if it
    fails. A device or a pipe is written directly. Raises UsageError, before the block runs, if the file
    exists without ``force``, is a directory or cannot be written.
    """
    target = Path(os.path.realpath(path))
    mode = _usable_target_mode(target, name=path, force=force)
    temporary: Path | None = None
    if mode is None or stat.S_ISREG(mode):
        # The rename is atomic because both names are in one directory. The temporary name does not contain
        # the target's name, which may already have the maximum length.
        temporary = target.with_name(f".cudakit-{os.getpid()}-{os.urandom(4).hex()}.partial")
    # A temporary file must not exist yet; a device or a named pipe exists.
    open_mode = f"{'x' if temporary else 'w'}{'t' if is_text else 'b'}"
    text_options: dict[str, str] = (
        {"encoding": "utf-8", "errors": "backslashreplace", "newline": "\n"} if is_text else {}
    )
    try:
        stream: IO[Any] = (temporary or target).open(open_mode, **text_options)  # type: ignore[call-overload]
    except OSError as error:
        raise _unwritable_error(path, error) from error
    try:
        yield stream
        with _os_errors_reported(path):
            stream.close()
            if temporary:
                temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            stream.close()
        if temporary:
            temporary.unlink(missing_ok=True)
        raise


def refuse_unwritable(path: str, *, force: bool = False) -> None:
    """Raise UsageError for a file that another process is to write later, as ``open_new_file`` does."""
    target = Path(os.path.realpath(path))
    _usable_target_mode(target, name=path, force=force)
    if not target.parent.is_dir():
        raise _unwritable_error(path, FileNotFoundError())
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise _unwritable_error(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def terminal_width(stream: TextIO) -> int:
    """Return the number of columns: ``COLUMNS``, or that of the terminal, or 100; at least 40."""
    return max(_terminal_size(stream, "columns") or DEFAULT_WIDTH, MINIMUM_WIDTH)


def _terminal_size(stream: TextIO, name: Literal["columns", "lines"]) -> int:
    """Return ``COLUMNS`` or ``LINES``, or the size of the terminal; 0 if the stream is no terminal."""
    variable = os.environ.get(name.upper(), "")
    size = int(variable) if variable.isdecimal() else 0
    if not size and stream.isatty():
        size = int(getattr(os.get_terminal_size(stream.fileno()), name))
    return size


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
        _terminal_size(stream, "lines") or DEFAULT_HEIGHT,
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


def _usable_target_mode(target: Path, *, name: str, force: bool) -> int | None:
    """Return the mode of an existing file. Raises UsageError for a directory, and without ``force``."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise _unwritable_error(name, error) from error
    if name.endswith(os.sep) or (mode is not None and stat.S_ISDIR(mode)):
        raise UsageError(f"{name} is a directory", hint="name a file in it")
    if mode is not None and stat.S_ISREG(mode) and not force:
        raise UsageError(f"{name} exists", hint="-f replaces it")
    return mode


def _unwritable_error(name: str, error: OSError) -> UsageError:
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

    def brief_text(self, target: Output, *, with_rows: bool) -> str:
        """Return the verdict and the findings, one line each; ``with_rows`` adds the main table."""
        from cudakit.report.document import Table

        if self.brief_sentences:
            return _as_lines(self.brief_sentences(), target)
        document = self.document()
        rows: Iterable[str] = ()
        if with_rows:
            top_level = (node for node in document.nodes if isinstance(node, Table))
            table = self.brief_table() if self.brief_table else next(top_level, None)
            rows = table_rows(table) if table else ()
        return _as_lines((*brief_sentences(document), *rows), target)

    def summary_text(self, target: Output, formats: Sequence[str]) -> str:
        """Return the first sentence and the most severe ones, and the number of omitted ones.

        ``formats`` are the formats of the written files.
        """
        sentences = (self.brief_sentences or (lambda: brief_sentences(self.document())))()
        first, others = sentences[:1], sentences[1:]

        def severity(index: int) -> int:
            level = getattr(others[index], "level", "info")  # a sentence without a level is a str
            return {"error": 0, "warn": 1}.get(level, 2)

        # The sort is stable: sentences of equal severity stay in the order of the report.
        by_severity = sorted(range(len(others)), key=severity)
        shown = sorted(by_severity[: _MAX_SUMMARY_LINES - len(first)])
        lines = [*first, *(others[i] for i in shown)]
        if omitted := len(sentences) - len(lines):
            messages = f"{omitted:,} more message{'s are' if omitted > 1 else ' is'} in"
            has_report = not set(COMMON_FORMATS).isdisjoint(formats)
            lines.append(
                f"{messages} the report"
                if has_report
                else f"{messages} no file: add -o - to print the report"
            )
        return _as_lines(lines, target)


def _as_lines(sentences: Iterable[str | Note], target: Output) -> str:
    """Return sentences with the characters that the target can show; a Note begins with its symbol."""
    from cudakit.report.document import SYMBOLS

    text = "".join(
        f"{printable(sentence)}\n"
        if isinstance(sentence, str)
        else f"{SYMBOLS[sentence.level]} {printable(sentence.text)}\n"
        for sentence in sentences
    )
    if target.ascii_only:
        from cudakit.report.console.table import ascii_drawing, ascii_symbols

        text = ascii_drawing(ascii_symbols(text))
    return text


def _page_footer() -> str:
    """Return the versions, the date and the command line, for the footer of an HTML page."""
    from datetime import UTC, datetime
    from importlib.metadata import version
    from platform import python_version

    versions = f"cudakit {version('cudakit')}, Python {python_version()}"
    command_line = shlex.join(["cudakit", *sys.argv[1:]])
    return f"{versions}, written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {command_line}"


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


@dataclass(frozen=True, slots=True)
class Outputs:
    """The open files of ``-o``, and the terminal."""

    options: OutputOptions
    files: Sequence[tuple[str, Output]]
    open_files: ExitStack
    open_terminal: Callable[[], Output]

    @property
    def terminal_formats(self) -> list[str]:
        """The formats of the report on the terminal; empty if the terminal gets only a summary.

        This is so with ``--quiet`` or ``-o FILE``, unless ``-o -`` or ``--json`` asks for a report.
        """
        if self.options.json:
            return ["json"]
        formats = [target.suffix or "txt" for target in self.options.targets if target.path == "-"]
        return formats or ([] if self.files or self.options.quiet else ["txt"])

    def write(self, report: Report) -> None:
        """Write the report to every file and to the terminal.

        Files are complete before anything is printed, because the reader of the terminal may close the pipe.
        Raises EnvironmentUnusable if a disk is full.
        """
        for suffix, file in self.files:
            file.write(report.content(suffix, file))
        self.open_files.close()
        for suffix in self.terminal_formats:
            terminal = self.open_terminal()
            terminal.write(report.text(suffix, terminal))
        if not self.terminal_formats:
            target = standard_error() if self.files else self.open_terminal()
            if self.files and not self.options.quiet:
                target.write(report.summary_text(target, [suffix for suffix, _ in self.files]))
            else:
                target.write(report.brief_text(target, with_rows=self.options.quiet))
        self.close()

    def streams(self) -> list[tuple[str, Output]]:
        """Return every open output with its format. A command that writes repeatedly calls ``close`` last."""
        formats = self.terminal_formats or ([] if self.files else ["txt"])
        return [*self.files, *((suffix, self.open_terminal()) for suffix in formats)]

    def close(self) -> None:
        """Complete the files, and name them on standard error."""
        self.open_files.close()
        # Standard error must contain nothing else if the JSON document is written to it.
        is_json_on_stderr = self.options.json and self.open_terminal is standard_error
        if not (self.options.quiet or is_json_on_stderr):
            for _, file in self.files:
                click.echo(f"Wrote {printable(file.name)}", err=True)


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
    refuse_duplicates(options.paths)
    files = [
        (_target_format(target, formats, options.formats), target.path)
        for target in options.targets
        if target.path != "-"
    ]
    if options.json or len(files) < len(options.targets) or not files:
        open_terminal()  # raises UsageError if standard output is closed
    with ExitStack() as open_files:
        outputs = [
            (suffix, open_files.enter_context(open_file(path, force=options.force)))
            for suffix, path in files
        ]
        yield Outputs(options, outputs, open_files, open_terminal)


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
    stream = sys.stderr
    if quiet or not is_capable_terminal(stream):
        yield lambda _stage, _fraction: None
        return
    line = ""

    def replace(text: str) -> None:
        # Write only changes: progress is reported often, and the terminal may be remote.
        nonlocal line
        if text != line:
            stream.write(f"\r\x1b[K{text}")
            stream.flush()
            line = text

    def show(stage: str, fraction: float) -> None:
        replace(f"{printable(stage)} {fraction:4.0%}"[: terminal_width(stream) - 1])

    try:
        yield show
    finally:
        replace("")
