"""``cudakit bench suite``: check the health of a GPU, or of all GPUs of a Ray cluster."""

from __future__ import annotations

from functools import partial

import click
from click.core import ParameterSource

from cudakit.cli.bench.fleet import FleetRequest, measure_and_report
from cudakit.cli.bench.measure import FORMATS, exit_code, measure
from cudakit.cli.failure import ExitCode
from cudakit.cli.options import (
    FILE,
    Command,
    Seconds,
    Value,
    gpu_option,
    option,
    option_group,
    output_options,
    with_options,
)
from cudakit.cli.output import OutputOptions
from cudakit.errors import UsageError

_RAY_TIMEOUT_S = 60.0

_FLEET = option_group(
    "Fleet",
    option(
        "--ray",
        type=Value(("auto", "local")),
        metavar="ADDRESS|auto|local",
        default="",
        help="Measure every GPU of a Ray cluster: at HOST:PORT, the one that runs on this machine (auto), or "
        "a new one of this machine alone (local). Needs cudakit[fleet].",
    ),
    option(
        "--results",
        type=FILE,
        metavar="DIR",
        default="",
        help="Directory of the results, with a file per GPU: HOST/gpuN.json. With --ray, GPUs with a "
        "complete result of the same suite (quick or full, simulated or not) are not measured again, and "
        "other results are replaced; without, the report is made of the files.  "
        "[default: a new directory fleet-DATE-TIME]",
    ),
    option(
        "--ray-timeout",
        type=Seconds(min=0, min_open=True),
        metavar="SEC",
        help="Report a host as failed if it does not answer, or if other work uses its GPUs, for SEC seconds."
        "  [default: 60]",
    ),
)


@click.command(
    cls=Command, short_help="Health check: does this GPU perform as expected of its model?"
)
@option("--quick", is_flag=True, help="Run a subset that takes about a minute.")
@gpu_option
@partial(with_options, _FLEET)
@output_options(FORMATS, format_limits="With --ray or --results, there is no .nvbench.json.")
def suite(
    *,
    quick: bool,
    gpu: str,
    ray: str,
    results: str,
    ray_timeout: float | None,
    output: OutputOptions,
) -> int:
    """Measure the main figures of a GPU, and compare each with an expected value: pass, warn or fail.

    The expected rate was measured on a healthy GPU of the same model; for a model that was never measured, it
    is a fraction of the theoretical peak. The expected latency is an upper bound for healthy machines. If a
    figure fails, the exit code is 1. GEMMs need cuBLAS and nvmath-python; without these they are skipped.
    With --gpu sim, figures are not assessed.

    With --ray, every GPU of a cluster is measured, and each figure is also compared with the same figure of
    GPUs of the same model. The report names GPUs, links and hosts that are slower than their peers, and hosts
    that failed; if there are any, the exit code is 1.

    \b
    cudakit bench suite --quick
    cudakit bench suite -o health.html -o health.json
    cudakit bench suite --ray auto --results nightly -o fleet.html
    cudakit bench suite --results nightly
    """
    if ray_timeout is not None and not ray:
        raise UsageError("--ray-timeout needs --ray", hint="add --ray, or remove --ray-timeout")
    if quick and results and not ray:
        raise UsageError(
            "--results without --ray measures nothing, so --quick has no effect",
            hint="remove --quick",
        )
    is_gpu_given = (
        click.get_current_context().get_parameter_source("gpu") is ParameterSource.COMMANDLINE
    )
    if is_gpu_given and results and not ray:
        raise UsageError(
            "--results without --ray measures nothing, so --gpu has no effect",
            hint="remove --gpu",
        )
    if ray or results:
        fleet = FleetRequest(
            ray=ray,
            directory=results,
            timeout_s=ray_timeout or _RAY_TIMEOUT_S,
            quick=quick,
            gpu=gpu,
        )
        return measure_and_report(fleet, output)

    from cudakit.bench.suite import SuiteSpec, check_health

    result = measure(partial(check_health, SuiteSpec(quick=quick)), gpu, output)
    return ExitCode.FINDINGS if result.health == "fail" else exit_code(result.bench)
