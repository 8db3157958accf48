"""``cudakit run``: run a program, and find its races, profile it or record its GPU memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from cudakit.cli.failure import errors_before_start
from cudakit.cli.options import (
    FILE,
    Command,
    Seconds,
    byte_size,
    option,
    option_group,
    output_options,
    with_options,
)
from cudakit.cli.output import OutputOptions, suffixes
from cudakit.cli.profile import ACTIVITY_FORMATS
from cudakit.cli.sanitize import (
    BASELINE_OPTION,
    FORMATS,
    HOST_THREADS_OPTION,
    INTERNAL_OPTION,
    SHOW_OPTION,
    SUPPRESS_OPTION,
    WRITE_BASELINE_OPTION,
)

MAX_SECONDS = 1e9  # about 30 years


class Launcher(Command):
    """A command whose usage errors give exit code 125, because other exit codes are those of the program."""

    def make_context(
        self, info_name: str | None, args: list[str], *remaining_arguments: Any, **kwargs: Any
    ) -> click.Context:
        """Parse the command line."""
        as_json = self._wants_json(info_name, args)
        with errors_before_start(as_json=as_json):
            return super().make_context(info_name, args, *remaining_arguments, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A usage error precedes the start of the program, also if it is found here."""
        try:
            return super().invoke(ctx)
        except click.UsageError:
            with errors_before_start(as_json=ctx.params["json"]):
                raise

    def _wants_json(self, info_name: str | None, args: list[str]) -> bool:
        """Return whether ``--json`` precedes the program, also if the command line has an error."""
        if "--json" not in args:
            return False
        context = super().make_context(info_name, [*args], resilient_parsing=True)
        return bool(context.params.get("json"))


_RECORD_OPTIONS = option_group(
    "What to record",
    option("--sanitize", is_flag=True, help="Find races between CUDA streams."),
    option("--profile", is_flag=True, help="Find where the time of the GPU goes."),
    option(
        "--log",
        type=FILE,
        metavar="FILE",
        help="With --sanitize or --profile: write the log of the run to FILE, for cudakit sanitize or "
        "cudakit profile.",
    ),
    option(
        "--memory",
        is_flag=True,
        help="Record the GPU memory of PyTorch, CuPy, Numba, RMM, JAX and the driver for cudakit memviz.",
    ),
    option(
        "--snapshot",
        type=FILE,
        metavar="FILE",
        help="With --memory: the snapshot file to write.  [default: cudakit-memory.pickle]",
    ),
    option(
        "--no-driver",
        is_flag=True,
        help="With --memory: record allocations of libraries only, not those of the driver. Then other "
        "profilers can be used in the program.",
    ),
    option(
        "--limit",
        type=byte_size,
        metavar="SIZE",
        help="With --memory: report where a process first reserved more than SIZE of a device. "
        "Example: 20GiB.",
    ),
    option(
        "--fail-on",
        type=click.Choice(["limit"]),
        metavar="limit",
        help="Exit with 1 if a process reserved more memory than --limit.",
    ),
)
_PROFILE_TIME_OPTIONS = option_group(
    "Times to profile",
    option(
        "--delay",
        type=Seconds(min=0, max=MAX_SECONDS),
        metavar="SECONDS",
        help="Begin the profile SECONDS after the first use of CUDA.",
    ),
    option(
        "--duration",
        type=Seconds(min=0, min_open=True, max=MAX_SECONDS),
        metavar="SECONDS",
        help="End the profile SECONDS after it began.  [default: at the end of the program]",
    ),
    option(
        "--range",
        "range_name",
        metavar="NAME",
        help="Profile only while an NVTX range NAME is open.",
    ),
    option(
        "--paused",
        is_flag=True,
        help="Begin the profile when the program calls cudakit.profiler.start() or cudaProfilerStart.",
    ),
)
_PROGRAM_OPTIONS = option_group(
    "Program",
    option("-m", "module", is_flag=True, help="Run a module, as python -m does."),
    option("-c", "code", is_flag=True, help="Run code, as python -c does."),
    option(
        "--python",
        type=FILE,
        metavar="PYTHON",
        help="Python interpreter to use.  [default: the one beside cudakit if cudakit was started by its "
        "path; else that of VIRTUAL_ENV, else python3 in PATH]",
    ),
    option(
        "--no-follow",
        is_flag=True,
        help="Do not instrument processes that an instrumented process starts.",
    ),
    option(
        "--on-missing",
        type=click.Choice(["refuse", "run"]),
        default="refuse",
        show_default=True,
        help="If there is a GPU and CUDA calls cannot be recorded: refuse to start the program, or run it "
        "unchecked and report that. Without a GPU, the program always runs.",
    ),
    option(
        "--require-gpu",
        is_flag=True,
        help="With --sanitize or --profile: exit with 1 if no work of a real GPU was recorded, for example "
        "on a machine without one.",
    ),
)
_RACE_OPTIONS = option_group(
    "Races",
    SHOW_OPTION,
    SUPPRESS_OPTION,
    BASELINE_OPTION,
    WRITE_BASELINE_OPTION,
    INTERNAL_OPTION,
    option(
        "--accesses",
        type=click.Choice(["auto", "exact", "arguments"]),
        help="Accesses of kernels: auto (recorded, reused if launches repeat), exact (recorded in each "
        "launch) or arguments (assumed from their pointer arguments).  [default: auto if the GPU supports "
        "it, else arguments]",
    ),
    option("--stop-on-first", is_flag=True, help="Stop the program at its first race."),
    HOST_THREADS_OPTION,
)


@click.command(cls=Launcher, context_settings={"allow_interspersed_args": False})
@partial(
    with_options, (*_RECORD_OPTIONS, *_PROFILE_TIME_OPTIONS, *_PROGRAM_OPTIONS, *_RACE_OPTIONS)
)
@output_options(
    (*FORMATS, *ACTIVITY_FORMATS),
    format_limits=f"With --sanitize: {suffixes(FORMATS)}. With --profile: all but .sarif.",
    report_stream="standard error",
)
@click.argument(
    "command_words",
    metavar="SCRIPT|-m MODULE|-c CODE|COMMAND [ARG]...",
    nargs=-1,
    required=True,
    type=click.Path(readable=False),
)
def run(
    *,
    module: bool,
    code: bool,
    command_words: tuple[str, ...],
    output: OutputOptions,
    **options: Any,
) -> int:
    """Run a program and find its races between CUDA streams, profile it, or record its GPU memory.

    The program is a Python script, -m MODULE, -c CODE or any other command. All later arguments are those of
    the program. Standard input and output belong to the program; the report goes to standard error.

    The exit code is that of the program. If that is 0, the exit code is 1 if there are races of the program,
    pairs of operations that could not be checked or collectives that ranks call differently, if the recording
    is incomplete, with --require-gpu if no work of a real GPU was recorded, and with --fail-on limit if a
    process reserved more memory than --limit. The exit code is 125 if cudakit fails before the
    program starts, 126 if the program cannot be executed, 127 if it is not found.

    \b
    cudakit run --sanitize train.py --epochs 1
    cudakit run --sanitize -o races.json -o races.html -m package.train
    cudakit run --sanitize --suppress 'kernel:nccl*' --stop-on-first train.py
    cudakit run --sanitize --log races.log train.py; cudakit sanitize races.log
    cudakit run --profile train.py
    cudakit run --profile --delay 30 --duration 10 -o profile.html train.py
    cudakit run --memory train.py; cudakit memviz cudakit-memory.pickle
    cudakit run --memory --limit 20GiB --fail-on limit train.py
    """
    from cudakit.cli.run.session import RunSpec, run_program

    with errors_before_start(as_json=output.json):
        if module and code:
            raise click.UsageError("-m and -c exclude each other")
        prefix = ("-m",) if module else ("-c",) if code else ()
        spec = RunSpec(command_words=(*prefix, *command_words), output=output, **options)
    return run_program(spec)
