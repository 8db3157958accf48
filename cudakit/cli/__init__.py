"""The command line: the table of commands, and the entry point.

The module of a command is imported when the command is chosen: ``cudakit --help`` is fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, cast

import click

from cudakit.cli.failure import report_error

# Name: the place of the click command, and its line in ``cudakit --help``.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "bench": (
        "cudakit.cli.bench:bench",
        "Measure how fast this GPU goes, and whether that changed.",
    ),
    "devices": (
        "cudakit.cli.devices:devices",
        "Show which GPU is which, and how each one fares.",
    ),
    "doctor": (
        "cudakit.cli.doctor:doctor",
        "Say why CUDA does not work here, or not well.",
    ),
    "memviz": (
        "cudakit.cli.memviz:memviz",
        "Show who holds GPU memory, and why it ran out.",
    ),
    "run": (
        "cudakit.cli.run:run",
        "Run a program and find the races between its streams.",
    ),
}

_EPILOG = """\b
Environment:
  NO_COLOR=1       never write colours; FORCE_COLOR=1 writes them to a pipe too
  COLUMNS=N        width of a report (a terminal's own, or 100 elsewhere)
  CUDAKIT_DEBUG=1  print the traceback of an error

\b
Completion, for bash (zsh and fish likewise):
  eval "$(_CUDAKIT_COMPLETE=bash_source cudakit)"
"""


def load_command(name: str) -> click.Command:
    """Import the module of a command."""
    module, attribute = COMMANDS[name][0].split(":")
    return cast(click.Command, getattr(import_module(module), attribute))


class LazyGroup(click.Group):
    """A group that lists stubs, and imports a command to run it or to complete its options."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Replace the stub by the command."""
        name, stub, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name and stub else stub, rest


def _stubs() -> dict[str, click.Command]:
    return {name: click.Command(name, short_help=line) for name, (_, line) in COMMANDS.items()}


@click.group(
    cls=LazyGroup,
    commands=_stubs(),
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="cudakit", prog_name="cudakit", message="%(prog)s %(version)s")
def program() -> None:
    """Answer questions about a GPU and the Python programs on it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (by default that of the process) and return its exit code.

    The codes are those of cudakit.cli.failure.ExitCode. Nothing but SystemExit is raised.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 every failure is reported
        return report_error(error, as_json=_wants_json(arguments))
    return code


def _run(arguments: list[str]) -> int:
    if "_CUDAKIT_COMPLETE" in os.environ:
        program.main(prog_name="cudakit")
    if not arguments:
        return _show_help()
    try:
        # Commands that record their command line find it in ``obj``.
        with program.make_context("cudakit", [*arguments], obj=tuple(arguments)) as context:
            findings: Any = program.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    return int(findings or 0)


def _show_help() -> int:
    # Not a bare Context, which would lack -h.
    context = program.make_context("cudakit", [], resilient_parsing=True)
    click.echo(program.get_help(context), err=True)
    return 2


def _wants_json(arguments: list[str]) -> bool:
    # What follows "--" belongs to another program, as does the standard output of ``run``.
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in own and own[0] != "run"
