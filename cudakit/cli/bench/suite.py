"""``cudakit bench suite``: is this GPU as fast as its kind?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cudakit.cli.bench.measure import exit_code, opened_gpu
from cudakit.cli.bench.options import Outputs, outputs_options
from cudakit.cli.failure import ExitCode
from cudakit.cli.options import gpu_option
from cudakit.cli.output import open_output

if TYPE_CHECKING:
    from cudakit.core.bench.health import SuiteResult


@click.command(short_help="A health check: is this GPU as fast as its kind?")
@click.option("--quick", is_flag=True, help="Take about a minute, and what says most.")
@gpu_option
@outputs_options
def suite(*, quick: bool, gpu: str, outputs: Outputs) -> int:
    """Measure what says most of a GPU, and judge each figure by what is expected: pass, warn or fail.

    Rates are compared with what was measured on another GPU of the model, or else with a share of what
    the datasheet allows; latencies with a bound that only a machine with something wrong exceeds. A figure
    that fails gives exit code 1. Products of matrices need cuBLAS and its bindings, and are left out
    where those are missing.

    \b
    cudakit bench suite --quick
    cudakit bench suite -o health.html -o health.json
    """
    from cudakit.cli.bench import files

    with open_output(None) as target:
        with files.opened(outputs.paths, force=outputs.force) as opened:
            result = _check(gpu, quick=quick, quiet=outputs.quiet)
            files.write(opened, result)
        target.answer(result, lambda: files.document(result), as_json=outputs.json)
    return ExitCode.FINDINGS if result.health == "fail" else exit_code(result.bench)


def _check(gpu: str, *, quick: bool, quiet: bool) -> SuiteResult:
    from cudakit.core.bench.suite import SuiteSpec, check_health

    with opened_gpu(gpu, quiet=quiet) as (device, progress, run_context):
        return check_health(SuiteSpec(quick=quick), device, progress, run_context=run_context)
