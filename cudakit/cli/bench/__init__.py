"""``cudakit bench``: benchmark this GPU."""

from __future__ import annotations

import click

from cudakit.cli.bench.compare import compare
from cudakit.cli.bench.gemm import gemm
from cudakit.cli.bench.workloads import alloc, copy, graph, launch, memory, suite
from cudakit.cli.failure import ExitCode


@click.group(invoke_without_command=True, no_args_is_help=False)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure how fast this GPU goes, beside the limit of its arithmetic and wires.

    Warm-up lasts until clocks settle, data is random, what the L2 cache holds is known, every sample is
    kept, and computed values are checked: what is wrong has no figure, and exit code 1. The method stands
    with the result. With --gpu sim everything runs on a simulated GPU, and every result says so.

    \b
    cudakit bench gemm 8192 --dtype bf16,fp8_e4m3 --vs torch
    cudakit bench memory -o before.json
    cudakit bench copy --directions h2d,d2h -o copy.html
    cudakit bench compare before.json after.json --fail-on slower:5%
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(ExitCode.USAGE)


for _command in (gemm, memory, copy, launch, alloc, graph, suite, compare):
    bench.add_command(_command)
