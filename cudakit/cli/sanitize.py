"""``cudakit sanitize``: find the races in a log of ``cudakit run --sanitize``; the report of both."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from cudakit.cli.failure import ExitCode
from cudakit.cli.options import (
    FILE,
    Command,
    Value,
    option,
    option_group,
    output_options,
    with_options,
)
from cudakit.cli.output import (
    OutputOptions,
    Report,
    Text,
    open_new_file,
    open_outputs,
    printable,
    progress_line,
)

if TYPE_CHECKING:
    from cudakit.sanitize.baseline import BaselineMatcher
    from cudakit.sanitize.races import SanitizeResult

# Formats of the report on races.
FORMATS = ("json", "html", "sarif", "md", "txt")

SHOW_OPTION = option(
    "--show",
    type=click.Choice(["likely", "possible"]),
    default="likely",
    show_default=True,
    help="Races to show: likely (races that are certain or likely) or possible (all).",
)
SUPPRESS_OPTION = option(
    "--suppress",
    type=Value(("kernel:", "site:", "@")),
    metavar="PATTERN|@FILE",
    multiple=True,
    help="Leave out races that match kernel:GLOB or site:FILE[:FUNCTION]; @FILE lists patterns. "
    "Repeatable.",
)
BASELINE_OPTION = option(
    "--baseline",
    type=FILE,
    metavar="FILE",
    help="Report new races only: leave out the races in FILE, which --write-baseline wrote.",
)
WRITE_BASELINE_OPTION = option(
    "--write-baseline",
    type=FILE,
    metavar="FILE",
    help="Write the races to FILE, for --baseline. These races do not make the exit code 1.",
)
INTERNAL_OPTION = option(
    "--internal",
    "counts_library_races",
    is_flag=True,
    help="Count races inside libraries, too: they make the exit code 1.",
)
HOST_THREADS_OPTION = option(
    "--host-threads",
    type=click.Choice(["joined", "strict"]),
    default="joined",
    show_default=True,
    help="Host threads: joined (all threads count as one, in the order of their calls) or strict (a wait in "
    "one thread does not order the work of the others).",
)
_RACE_OPTIONS = option_group(
    "Races",
    SHOW_OPTION,
    SUPPRESS_OPTION,
    BASELINE_OPTION,
    WRITE_BASELINE_OPTION,
    INTERNAL_OPTION,
    HOST_THREADS_OPTION,
)


@click.command(cls=Command)
@partial(with_options, _RACE_OPTIONS)
@output_options(FORMATS)
@click.argument("file", metavar="FILE", type=FILE)
def sanitize(
    *,
    file: str,
    show: Literal["likely", "possible"],
    suppress: tuple[str, ...],
    baseline: str | None,
    write_baseline: str | None,
    counts_library_races: bool,
    host_threads: Literal["joined", "strict"],
    output: OutputOptions,
) -> int:
    """Find the races in the log of a run, without running the program again.

    FILE is a log that cudakit run --sanitize --log FILE wrote. The same options give
    the same report as the run. The exit code is 1 for races of the program, pairs of
    operations that could not be checked, collectives that ranks call differently, or
    an incomplete recording, such as a truncated log. A log that is truncated before
    its first CUDA calls cannot be analyzed: the exit code is 2.

    \b
    cudakit run --sanitize --log races.log train.py
    cudakit sanitize races.log --show possible
    cudakit sanitize races.log --suppress 'kernel:nccl*' -o races.html
    """
    from cudakit.gpu.compile import demangle
    from cudakit.sanitize.baseline import suppressions
    from cudakit.sanitize.detector import analyze_log
    from cudakit.sanitize.findings import RaceCollector
    from cudakit.sanitize.races import Confidence
    from cudakit.trace.run_log import LogReader

    with (
        open_outputs(output) as outputs,
        open_baseline(write_baseline, output) as write_findings,
    ):
        collector = RaceCollector(
            min_confidence=Confidence(show),
            suppressions=suppressions(suppress),
            baseline=match_baseline(baseline),
            counts_library_races=counts_library_races,
            demangle=demangle,
        )
        with progress_line(quiet=output.quiet) as progress, LogReader(Path(file)) as log:
            result = analyze_log(
                log,
                collector,
                min_confidence=Confidence(show),
                strict_threads=host_threads == "strict",
                progress=progress,
            )
        outputs.write(race_report(result))
        write_findings(result)
    return exit_code(result, races_are_accepted=write_baseline is not None)


# --- the findings: exit code, baseline and report --------------------------------------------------


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
def open_baseline(
    path: str | None, output: OutputOptions
) -> Iterator[Callable[[SanitizeResult], None]]:
    """Open the file of ``--write-baseline``, and yield the function that writes the findings of a run to it.

    Without the option, the function does nothing. Raises UsageError if the file exists.
    """
    if path is None:
        yield lambda _: None
        return
    with open_new_file(path, force=output.force) as file:

        def write(result: SanitizeResult) -> None:
            from cudakit.sanitize.baseline import format_baseline
            from cudakit.sanitize.findings import findings

            text = format_baseline(findings(result), result.baseline, root=Path.cwd())
            file.write(text.encode("utf-8", "backslashreplace"))

        yield write
    if not (output.quiet or output.json):
        click.echo(f"Wrote {printable(path)}", err=True)


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
