"""``cudakit bench suite``: a health check by benchmarks."""

from __future__ import annotations

import click

from cudakit.cli.bench.measure import document, exit_code, open_files, opened_gpu, write_files
from cudakit.cli.bench.options import Outputs, outputs_options
from cudakit.cli.failure import ExitCode
from cudakit.cli.options import gpu_option
from cudakit.cli.output import open_output


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
    from cudakit.core.bench.suite import SuiteSpec, check_health

    with open_output(None) as target:
        with open_files(outputs.paths, force=outputs.force) as files:
            with opened_gpu(gpu, quiet=outputs.quiet) as (device, progress, run_context):
                spec = SuiteSpec(quick=quick)
                result = check_health(spec, device, progress, run_context=run_context)
            write_files(files, result)
        target.answer(result, lambda: document(result), as_json=outputs.json)
    return ExitCode.FINDINGS if result.health == "fail" else exit_code(result.bench)
