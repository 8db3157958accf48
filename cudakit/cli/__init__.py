"""The command line: the table of commands, and the entry point.

The module of a command is imported only if the command is used, so that ``cudakit --help`` is fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, cast

import click

from cudakit.cli.failure import ExitCode, report_error
from cudakit.cli.output import standard_output

# For each command, which is ``cudakit.cli.NAME.NAME``, its line in ``cudakit --help``.
COMMANDS: Mapping[str, str] = {
    "bench": "How fast is this GPU, and did that change?",
    "cache": "Show, clear or fill the cache of compiled kernels.",
    "completion": "Print or install shell completion for bash, zsh or fish.",
    "devices": "Which GPUs are there, and what is their state?",
    "doctor": "Why does CUDA fail here, or run slowly?",
    "explain": "What does an error code, Xid, check or variable mean?",
    "memviz": "Where did the GPU memory go, and why did it run out?",
    "profile": "Where did the GPU time of a program go, and what became slower?",
    "run": "Does a program race, and where do its GPU time and memory go?",
    "sanitize": "Which races does the log of an earlier run show?",
}

ENVIRONMENT_VARIABLES = (
    ("NO_COLOR=1", "never use colors"),
    ("FORCE_COLOR=1", "use colors in pipes too"),
    ("COLUMNS=N", "width of reports (default: terminal, or 100)"),
    ("LC_ALL=C", "draw with ASCII characters"),
    (
        "CUDAKIT_ALLOC_CONF",
        "settings of cudakit's allocator, in the form of PYTORCH_CUDA_ALLOC_CONF",
    ),
    ("CUDAKIT_PTXAS", "path of the ptxas that run --sanitize uses"),
    ("CUDAKIT_SANITIZER_LIBRARY", "path of libsanitizer-public.so, for run --sanitize"),
    ("CUDAKIT_NCCL_LIBRARY", "path of libnccl.so.2, for bench nccl"),
    ("CUDAKIT_CUPTI_LIBRARY", "path of libcupti.so, for run --profile"),
    ("CUDAKIT_CACHE_DIR", "directory for compiled kernels (default: ~/.cache/cudakit)"),
    ("CUDAKIT_DEBUG=1", "print the traceback of an error"),
)


def load_command(name: str) -> click.Command:
    """Import the module of a command."""
    return cast(click.Command, getattr(import_module(f"cudakit.cli.{name}"), name))


class LazyGroup(click.Group):
    """A click group that imports a command only to run it or to complete its options."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Import the command that a stub stands for, and return it."""
        name, stub, remaining_args = super().resolve_command(ctx, args)
        return name, load_command(name) if name and stub else stub, remaining_args

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of environment variables below the commands."""
        with formatter.section("Environment variables"):
            formatter.write_dl(ENVIRONMENT_VARIABLES)


@click.group(
    cls=LazyGroup,
    commands={name: click.Command(name, short_help=line) for name, line in COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="cudakit", prog_name="cudakit", message="%(prog)s %(version)s")
def program() -> None:
    """Inspect GPUs, and the memory, races and speed of Python programs that use CUDA."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of the process, and return its ExitCode.

    Raises only SystemExit.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        exit_code = _run_command(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 every failure is reported
        return report_error(
            error, open_json_output=standard_output if _wants_json(arguments) else None
        )
    return exit_code


def _run_command(arguments: list[str]) -> int:
    if completion_instruction := os.environ.get("_CUDAKIT_COMPLETE"):
        from cudakit.cli.completion import complete

        return complete(program, completion_instruction)
    if not arguments:
        # make_context adds -h, which a bare Context lacks.
        context = program.make_context("cudakit", [], resilient_parsing=True)
        click.echo(program.get_help(context), err=True)
        return ExitCode.USAGE
    try:
        # Commands that record the command line in their result read it from ``obj`` of the click context.
        with program.make_context("cudakit", [*arguments], obj=tuple(arguments)) as context:
            command_result: Any = program.invoke(context)
    except click.exceptions.Exit as click_exit:
        return click_exit.exit_code
    return int(command_result or 0)


def _wants_json(arguments: list[str]) -> bool:
    # Arguments after "--" belong to another program. ``run`` prints its own JSON.
    arguments_before_dashes = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in arguments_before_dashes and arguments_before_dashes[0] != "run"
