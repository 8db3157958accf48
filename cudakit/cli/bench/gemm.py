"""``cudakit bench gemm``: benchmark the GEMMs of libraries, or tune them."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from cudakit.bench.benchmarks import BENCHMARKS
from cudakit.bench.gemm import GemmSpec
from cudakit.cli.bench.measure import FORMATS, measure_spec
from cudakit.cli.bench.options import EFFORT_OPTIONS, HELP_BY_TITLE, make_spec, spec_options
from cudakit.cli.bench.tune import TuneOptions, tune, tune_options, use_tuned
from cudakit.cli.options import (
    Command,
    gpu_option,
    option_group,
    output_options,
    with_options,
)
from cudakit.cli.output import COMMON_FORMATS, OutputOptions, suffixes


@click.command(
    cls=Command,
    help=GemmSpec.__doc__,
    help_by_title=HELP_BY_TITLE,
    short_help=BENCHMARKS["gemm"][1],
)
@click.argument("sides", nargs=-1, metavar="[SHAPE]...")
@partial(with_options, (*spec_options(GemmSpec), *option_group("Method", gpu_option)))
@tune_options
@partial(with_options, EFFORT_OPTIONS)
@output_options(FORMATS, format_limits=f"With --tune: {suffixes(COMMON_FORMATS)}.")
def gemm(*, gpu: str, output: OutputOptions, tuning: TuneOptions, **options: Any) -> int:
    """Measure or tune the GEMMs of the command line; the help is that of GemmSpec."""
    spec = make_spec(GemmSpec, gpu, options)
    if tuning.search:
        return tune(spec, gpu, output, tuning)
    if tuning.tuned_path:
        spec = use_tuned(spec, tuning.tuned_path, gpu)
    return measure_spec(spec, gpu, output)
