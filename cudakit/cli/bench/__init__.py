"""``cudakit bench``: benchmark a GPU. The command of a benchmark is built when it is used."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import click

from cudakit.bench.benchmarks import BENCHMARKS, spec_class
from cudakit.cli.bench.measure import FORMATS, measure_spec
from cudakit.cli.bench.ops import ops_libraries
from cudakit.cli.bench.options import (
    EFFORT_OPTIONS,
    HELP_BY_TITLE,
    MEASUREMENT,
    make_spec,
    spec_options,
)
from cudakit.cli.failure import ExitCode
from cudakit.cli.options import (
    Command,
    gpu_option,
    help_records,
    output_options,
    with_options,
)
from cudakit.cli.output import OutputOptions

if TYPE_CHECKING:
    from cudakit.bench.alloc import Allocator
    from cudakit.gpu.api import Gpu

SHARED_TITLE = f"{MEASUREMENT} options of every benchmark except suite"

# Commands with more than a Spec, by name: where the command is.
_COMMANDS = {
    "compare": "cudakit.cli.bench.compare:compare",
    "gds": "cudakit.cli.bench.gds:gds",
    "gemm": "cudakit.cli.bench.gemm:gemm",
    "nccl": "cudakit.cli.bench.nccl:nccl",
    "suite": "cudakit.cli.bench.suite:suite",
}
_SUMMARIES = {
    "compare": "Compare two results: faster, slower or the same?",
    "suite": "Health check: does this GPU perform as expected of its model?",
    **{name: summary for name, (_, summary) in BENCHMARKS.items() if summary},
}


def load_command(name: str) -> click.Command:
    """Return a command: one with a module of its own, or that of a Spec."""
    if name in _COMMANDS:
        module, _, attribute = _COMMANDS[name].partition(":")
        return cast(click.Command, getattr(import_module(module), attribute))
    measured = spec_class(name)

    @click.command(
        name,
        cls=Command,
        help=measured.__doc__,
        help_by_title=HELP_BY_TITLE,
        short_help=_SUMMARIES[name],
    )
    @partial(with_options, (*spec_options(measured), gpu_option, *EFFORT_OPTIONS))
    @output_options(FORMATS)
    def command(*, gpu: str, output: OutputOptions, **options: Any) -> int:
        return measure_spec(make_spec(measured, gpu, options, **_given(name)), gpu, output)

    return command


def _given(name: str) -> dict[str, Any]:
    """Return what the Spec of a benchmark needs from other packages."""
    match name:
        case "alloc":
            return {"other_allocators": {"caching": _caching_allocator}}
        case "ops":
            return ops_libraries()
    return {}


def _caching_allocator(gpu: Gpu) -> Allocator:
    from cudakit.allocator.allocator import DeviceCachingAllocator
    from cudakit.allocator.upstream import GpuUpstream

    return DeviceCachingAllocator(GpuUpstream(gpu))


class BenchGroup(click.Group):
    """A group that imports a command when it is used, and whose help describes the shared options."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Load the command that a stub stands for, and return it."""
        name, stub, remaining_args = super().resolve_command(ctx, args)
        return name, load_command(name) if name and stub else stub, remaining_args

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands first, then the shared options."""
        super().format_options(ctx, formatter)
        with formatter.section(SHARED_TITLE):
            formatter.write_dl(self.shared_records(ctx))

    def shared_records(self, ctx: click.Context) -> list[tuple[str, str]]:
        """Return the names and the description of each shared option."""
        options_holder = with_options(EFFORT_OPTIONS, lambda: None)
        return help_records(reversed(vars(options_holder)["__click_params__"]), ctx)


@click.group(
    cls=BenchGroup,
    commands={
        name: click.Command(name, short_help=summary) for name, summary in _SUMMARIES.items()
    },
    invoke_without_command=True,
    no_args_is_help=False,
)
@click.pass_context
def bench(context: click.Context) -> None:
    """Benchmark this GPU against its theoretical peak.

    Each benchmark warms up until clocks are stable, uses random data, controls the L2 state and verifies the
    computed values. If values are wrong, no time is reported and the exit code is 1. Results contain all
    samples and the method. --gpu sim needs no GPU: its results are simulated and use smaller default sizes.

    \b
    cudakit bench gemm 8192 --dtype bf16,fp8_e4m3 --vs torch
    cudakit bench memory -o before.json
    cudakit bench copy --directions h2d,d2h -o copy.html
    cudakit bench compare before.json after.json --fail-on slower:5%
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(ExitCode.USAGE)
