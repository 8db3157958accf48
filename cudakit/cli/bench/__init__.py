"""``cudakit bench``: benchmark a GPU."""

from __future__ import annotations

import click

from cudakit.cli.bench.compare import compare
from cudakit.cli.bench.gds import gds
from cudakit.cli.bench.gemm import gemm
from cudakit.cli.bench.nccl import nccl
from cudakit.cli.bench.ops import ops
from cudakit.cli.bench.options import EFFORT_OPTIONS, MEASUREMENT
from cudakit.cli.bench.suite import suite
from cudakit.cli.bench.workloads import alloc, copy, graph, launch, memory
from cudakit.cli.failure import ExitCode
from cudakit.cli.options import help_records, with_options

SHARED_TITLE = f"{MEASUREMENT} options of every benchmark except suite"


class BenchGroup(click.Group):
    """A group whose help describes the options that its commands share."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands first, then the shared options."""
        super().format_options(ctx, formatter)
        with formatter.section(SHARED_TITLE):
            formatter.write_dl(self.shared_records(ctx))

    def shared_records(self, ctx: click.Context) -> list[tuple[str, str]]:
        """Return the names and the description of each shared option."""
        options_holder = with_options(EFFORT_OPTIONS, lambda: None)
        return help_records(reversed(vars(options_holder)["__click_params__"]), ctx)


@click.group(cls=BenchGroup, invoke_without_command=True, no_args_is_help=False)
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


for _command in (gemm, memory, copy, launch, alloc, graph, ops, nccl, gds, suite, compare):
    bench.add_command(_command)
