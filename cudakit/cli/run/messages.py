"""The messages of ``cudakit run``, on standard error: standard output belongs to the program."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cudakit.cli.output import Output, printable, terminal_width, wants_color

if TYPE_CHECKING:
    from cudakit.core.sanitize.result import SanitizeResult


def warn(line: str) -> None:
    """Print one line at once."""
    click.echo(f"cudakit: {printable(line)}", err=True)


def races(result: SanitizeResult, *, quiet: bool) -> None:
    """Write the report; with ``quiet`` one line if there are races."""
    from cudakit.core.sanitize.present import report, title
    from cudakit.render import console

    if quiet:
        if result.races:
            warn(title(result))
    elif _is_empty(result):
        warn("nothing was enqueued on a GPU: there was nothing to look at")
    else:
        width, color = terminal_width(sys.stderr), wants_color(sys.stderr)
        text = console.render(report(result), width=width, color=color)
        Output(sys.stderr, "standard error", width, color).write(text)


def snapshots(paths: Sequence[str]) -> None:
    """Print the paths of memory snapshots, and the command that reads them."""
    for path in paths:
        warn(f"memory recorded; look at it with: cudakit memviz {path}")
    if not paths:
        warn("no memory was recorded: torch did not use CUDA in this program")


def _is_empty(result: SanitizeResult) -> bool:
    seen = result.coverage
    enqueued = seen.launches or seen.copies or seen.fills or seen.graph_launches
    return not (enqueued or result.races or result.gaps)
