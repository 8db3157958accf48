"""``cudakit bench gemm``: benchmark the GEMMs of libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.gemm_options import GEMM_OPTIONS, parse_gemms
from cudakit.cli.bench.measure import FORMATS, measure_spec
from cudakit.cli.bench.options import (
    HELP_BY_TITLE,
    Effort,
    cache_option,
    effort_options,
    mode_option,
    name_list,
    passed_options,
)
from cudakit.cli.bench.tune import TuneOptions, tune, tune_options, use_tuned
from cudakit.cli.options import (
    Command,
    byte_size,
    gpu_option,
    option,
    option_group,
    output_options,
    with_options,
)
from cudakit.cli.output import COMMON_FORMATS, OutputOptions, suffixes

if TYPE_CHECKING:
    from cudakit.bench.spec import GemmSpec
    from cudakit.gpu.api.gemm import GemmSettings

_SETTING_OPTIONS = option_group(
    "Library",
    option(
        "--library",
        type=click.Choice(["cublaslt", "cublas"]),
        metavar="NAME",
        help="Library to measure: cublaslt or cublas.  [default: cublaslt]",
    ),
    option(
        "--vs",
        "baselines",
        type=name_list("cudakit.gpu.api.gemm:LIBRARIES"),
        multiple=True,
        metavar="NAME,...",
        help="Baselines: torch, cupy, cublas or cublaslt. Samples of all libraries are interleaved. "
        "Repeatable.",
    ),
    option(
        "--workspace",
        "workspace_bytes",
        type=byte_size,
        metavar="SIZE",
        help="Maximum workspace of an algorithm.  [default: 32MiB]",
    ),
    option(
        "--deterministic",
        is_flag=True,
        help="Use only algorithms with bitwise reproducible results.",
    ),
    option(
        "--no-reduced-precision",
        is_flag=True,
        help="Forbid split-k reductions in fp16 or bf16.",
    ),
    option("--fast-accumulate", is_flag=True, help="Use fp8 fast accumulation."),
)

_METHOD_OPTIONS = option_group(
    "Method",
    option(
        "--fill",
        type=click.Choice(["uniform", "normal", "int", "zeros", "ones"]),
        metavar="DATA",
        help="Values of the operands: uniform in (-1, 1), normal, int (small integers), zeros or ones. "
        "Zeros and ones draw less power than real data and run faster.  [default: uniform]",
    ),
    mode_option("batch"),
    cache_option("rotate; with --gpu sim hot"),
    gpu_option,
)


def gemm_options(command: Any) -> Any:
    """Add the options for shapes, libraries and measurement method to a command."""
    return with_options((*GEMM_OPTIONS, *_SETTING_OPTIONS, *_METHOD_OPTIONS), command)


@click.command(
    cls=Command,
    help_by_title=HELP_BY_TITLE,
    short_help="GEMMs of cuBLAS and other libraries against the theoretical peak.",
)
@gemm_options
@tune_options
@effort_options
@output_options(FORMATS, format_limits=f"With --tune: {suffixes(COMMON_FORMATS)}.")
def gemm(*, gpu: str, output: OutputOptions, tuning: TuneOptions, **options: Any) -> int:
    """Measure GEMMs of a library against the theoretical peak of the GPU.

    A SHAPE is MxNxK, such as 4096x1024x8192, or one number for M = N = K. The default is 1024, 4096 and 8192.
    With --gpu sim, the default is 256, 384 and 512, and the largest shape about 2048. Matrices are
    column-major, as in BLAS. Results are verified in float64; no time is reported for wrong results and
    unsupported cases.

    \b
    cudakit bench gemm
    cudakit bench gemm 8192 --dtype bf16,fp8_e4m3 --vs torch -o gemm.html
    cudakit bench gemm --preset llama3-70b --epilogue bias
    cudakit bench gemm --shapes shapes.csv --layout tn,nn --json
    cudakit bench gemm --preset llama3-8b --tune -o tuned.json
    """
    spec = gemm_spec(**options)
    if tuning.search:
        return tune(spec, gpu, output, tuning)
    if tuning.tuned_path:
        spec = use_tuned(spec, tuning.tuned_path, gpu)
    return measure_spec(spec, gpu, output)


def gemm_spec(*, effort: Effort, **options: Any) -> GemmSpec:
    """Return the Spec for the options of the command line. Raises InputError for invalid options."""
    from cudakit.bench.spec import GemmSpec

    is_simulated = _is_simulated()
    gemms, name_by_gemm = parse_gemms(options, simulated=is_simulated)
    baselines = tuple(dict.fromkeys(name for part in options.pop("baselines") for name in part))
    settings = _settings(options)
    method_options = passed_options(baselines=baselines, **options)
    if is_simulated:
        # Simulated memory has no cache, and filling many buffer sets on the CPU would be slow.
        method_options = {"cache": "hot", **method_options}
    if settings.fast_accumulate and not any(gemm.dtype.startswith("fp8") for gemm in gemms):
        raise click.UsageError("--fast-accumulate needs a data type of fp8")
    return GemmSpec(
        gemms=gemms,
        shapes=name_by_gemm,
        settings=settings,
        **method_options,
        **effort.arguments(GemmSpec),
    )


def _settings(options: dict[str, Any]) -> GemmSettings:
    from cudakit.gpu.api.gemm import GemmSettings

    return GemmSettings(
        deterministic=options.pop("deterministic"),
        reduced_precision=not options.pop("no_reduced_precision"),
        fast_accumulate=options.pop("fast_accumulate"),
        **passed_options(workspace_bytes=options.pop("workspace_bytes")),
    )


def _is_simulated() -> bool:
    return str(click.get_current_context().params["gpu"]).startswith("sim")
