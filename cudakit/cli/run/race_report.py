"""The report of ``run --sanitize`` and ``sanitize``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from cudakit.cli.failure import ExitCode
from cudakit.cli.output import OutputOptions, Report, Text, open_binary_file, printable

if TYPE_CHECKING:
    from cudakit.sanitize.baseline import BaselineMatcher
    from cudakit.sanitize.races import SanitizeResult

# Formats of the report on races.
FORMATS = ("json", "html", "sarif", "md", "txt")


def exit_code(result: SanitizeResult, *, races_are_accepted: bool = False) -> ExitCode:
    """Return 1 for races that are not accepted, collectives that differ between ranks, or a lost event."""
    from cudakit.sanitize.findings import findings

    has_races = not races_are_accepted and bool(findings(result))
    has_findings = has_races or bool(result.different_calls) or bool(result.unverified)
    return ExitCode.FINDINGS if has_findings or result.incomplete else ExitCode.OK


def match_baseline(path: str | None) -> BaselineMatcher | None:
    """Read the file of ``--baseline``. Raises InputError if it is missing, damaged or of another version."""
    from cudakit.sanitize.baseline import BaselineMatcher, load_baseline

    return BaselineMatcher(path, load_baseline(path), root=Path.cwd()) if path else None


@contextmanager
def open_baseline(path: str | None, output: OutputOptions) -> Iterator[BaselineFile]:
    """Open the file of ``--write-baseline``, before the program runs. Raises UsageError if it exists."""
    if path is None:
        yield BaselineFile(None)
        return
    with open_binary_file(path, force=output.force) as file:
        yield BaselineFile(file)
    if not (output.quiet or output.json):
        click.echo(f"Wrote {printable(path)}", err=True)


@dataclass(frozen=True, slots=True)
class BaselineFile:
    """The file of ``--write-baseline``; ``file`` is None without the option."""

    file: BinaryIO | None

    def write(self, result: SanitizeResult) -> None:
        """Write the findings of a run to the baseline file."""
        from cudakit.sanitize.baseline import format_baseline
        from cudakit.sanitize.findings import findings

        if self.file:
            text = format_baseline(findings(result), result.baseline, root=Path.cwd())
            self.file.write(text.encode("utf-8", "backslashreplace"))


def race_report(result: SanitizeResult) -> Report:
    """Return the report of races in every format; without GPU work the text is a line per reason."""
    from cudakit.report import html, sarif
    from cudakit.sanitize.report import brief_sentences, is_empty, nothing_recorded, report

    def page() -> Text:
        return html.render(report(result, top=0))

    def sarif_log() -> Text:
        return sarif.render(report(result, top=0), root=os.getcwd())

    def reasons() -> Text:
        sentences = (nothing_recorded(result), *result.incomplete, *result.notes)
        return "".join(f"cudakit: {printable(sentence)}\n" for sentence in sentences)

    is_unchecked = is_empty(result) and not result.races
    exports = {"html": page, "sarif": sarif_log} | ({"txt": reasons} if is_unchecked else {})
    return Report(
        result=result,
        document=lambda: report(result),
        exports=exports,
        brief_sentences=lambda: brief_sentences(result),
    )
