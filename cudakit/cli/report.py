"""Write the report of a result to the terminal, as JSON, and to files in the format of their suffix."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

import click

from cudakit.cli.options import OutputOptions, Target, suffixes
from cudakit.cli.output import Output, open_file, printable, standard_error, standard_output
from cudakit.errors import UsageError

if TYPE_CHECKING:
    from cudakit.report.document import Document, Note, Table

# Suffix of a format of benchmarks only. Other reports do not write JSON to such a file.
_NVBENCH = "nvbench.json"
# Formats that every report can be written in.
COMMON_FORMATS = ("json", "html", "md", "txt")
# Maximum number of lines of the report that standard error gets if the report is written to a file.
_MAX_SUMMARY_LINES = 3

Text: TypeAlias = str | Iterable[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A result and its renderings.

    ``exports`` renders formats other than the common ones; ``writers`` write the formats that are not text.
    """

    result: object
    document: Callable[[], Document]
    exports: Mapping[str, Callable[[], Text]] = field(default_factory=dict)
    writers: Mapping[str, Callable[[BinaryIO], None]] = field(default_factory=dict)
    # A function that returns the verdict and the findings as sentences, or as Notes, which have a symbol. The
    # default is ``brief_sentences(document)``.
    brief_sentences: Callable[[], Sequence[str | Note]] | None = None
    # A function that returns the table whose rows ``--quiet`` prints. The default is the first table of the
    # document; a report with its own sentences has none.
    brief_table: Callable[[], Table] | None = None

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
        from cudakit.report import markdown

        return markdown.render(self.document())

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
    from cudakit.report.values import SYMBOLS

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
    from cudakit.report.values import format_value
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
            if suffix in report.writers:
                file.write_bytes(report.writers[suffix])
            else:
                file.write(report.text(suffix, file))
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


def refuse_duplicates(paths: Sequence[str]) -> None:
    """Raise UsageError if two paths are the same file."""
    resolved_paths = [os.path.realpath(path) for path in paths]
    for path, resolved_path in zip(paths, resolved_paths, strict=True):
        if resolved_paths.count(resolved_path) > 1:
            raise UsageError(f"{path} is named twice", hint="name each file once")
