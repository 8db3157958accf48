"""Options that commands share, and the parsers of values with units."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import click

from cudakit.units import parse_bytes, parse_ratio

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


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
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Show no progress.")


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--json -o -f -q``; they arrive as the keyword ``output: OutputOptions``."""
    return grouped("output", OutputOptions, _OUTPUT, command)


_OUTPUT = (
    json_option,
    click.option(
        "-o",
        "--output",
        "path",
        metavar="FILE",
        help="Write to FILE instead of standard output; it appears complete or not at all.",
    ),
    click.option("-f", "--force", is_flag=True, help="Replace a file that exists."),
    quiet_option,
)


def with_options(options: Sequence[Decorator], command: Callable[..., Any]) -> Callable[..., Any]:
    """Apply options so that the help lists them in order."""
    for option in reversed(options):
        command = option(command)
    return command


def grouped(
    name: str, kind: type, options: Sequence[Decorator], command: Callable[..., Any]
) -> Callable[..., Any]:
    """Add options to a command, which receives them as the keyword ``name``: a dataclass of them."""

    @functools.wraps(command)
    def collecting(**given: Any) -> Any:
        parts = {field.name: given.pop(field.name) for field in fields(kind)}
        return command(**{name: kind(**parts)}, **given)

    return with_options(options, collecting)


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
