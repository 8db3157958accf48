"""Options that commands share, and the parsers of values with units."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from cudakit.units import parse_bytes, parse_ratio


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The output of a command: file, format, verbosity."""

    json: bool  # the result as one JSON document instead of a report
    path: str | None  # a file; None and "-" are standard output
    force: bool  # replace a file that exists
    quiet: bool  # show no progress


json_option = click.option(
    "--json", "json", is_flag=True, help="Print the result as one JSON document; errors too."
)
output_option = click.option(
    "-o",
    "--output",
    "path",
    metavar="FILE",
    help="Write to FILE instead of standard output; it appears complete or not at all.",
)
force_option = click.option("-f", "--force", is_flag=True, help="Replace a file that exists.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Show no progress.")


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--json -o -f -q``; they arrive as the keyword ``output: OutputOptions``."""

    @functools.wraps(command)
    def collecting(*, json: bool, path: str | None, force: bool, quiet: bool, **rest: Any) -> Any:
        return command(output=OutputOptions(json, path, force, quiet), **rest)

    decorated: Callable[..., Any] = collecting
    for option in (quiet_option, force_option, output_option, json_option):
        decorated = option(decorated)
    return decorated


gpu_option = click.option(
    "--gpu",
    metavar="WHICH",
    default="auto",
    show_default=True,
    help="auto or cuda: the real ones; sim or sim:MODEL: simulated ones, and every result says so.",
)


def byte_size(text: str) -> int:
    """Read the value of an option such as ``--limit 10GiB`` as bytes: ``type=byte_size``."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def percent(text: str) -> float:
    """Read the value of an option such as ``--fail-on-growth 5%`` as 0.05: ``type=percent``.

    A plain 5 could mean 5% as well as 500%, and is refused.
    """
    try:
        ratio = parse_ratio(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if ratio > 1 and not text.strip().endswith("%"):
        raise click.BadParameter(f"{text!r} is ambiguous; write {text.strip()}% for a percentage")
    return ratio
