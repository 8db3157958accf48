"""``cudakit bench gemm``: benchmark matrix products of libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.measure import measure
from cudakit.cli.bench.options import (
    Effort,
    Outputs,
    cache_option,
    effort_options,
    given,
    mode_option,
    names,
    outputs_options,
)
from cudakit.cli.bench.products import PRODUCT_OPTIONS, products
from cudakit.cli.bench.tune import TuneOptions, tune, tune_options, use_tuned
from cudakit.cli.options import byte_size, gpu_option, with_options

if TYPE_CHECKING:
    from cudakit.core.bench.spec import GemmSpec
    from cudakit.gpu.api.gemm import GemmSettings

_SETTINGS = (
    click.option(
        "--workspace",
        "workspace_bytes",
        type=byte_size,
        metavar="SIZE",
        help="Memory that an algorithm may use; 32MiB if not given.",
    ),
    click.option(
        "--deterministic", is_flag=True, help="Only what gives the same bits in every run."
    ),
    click.option(
        "--no-reduced-precision",
        is_flag=True,
        help="Do not let parts of a sum be added in fp16 or bf16.",
    ),
    click.option("--fast-accumulate", is_flag=True, help="Keep sums of fp8 in fewer bits."),
)

_HOW = (
    click.option(
        "--library",
        type=click.Choice(["cublaslt", "cublas"]),
        metavar="NAME",
        help="cublaslt or cublas; cublaslt if not given.",
    ),
    click.option(
        "--vs",
        "baselines",
        type=names,
        multiple=True,
        metavar="NAME,...",
        help="Compare with torch, cupy, cublas or cublaslt, sample by sample in turn. Repeatable.",
    ),
    click.option(
        "--fill",
        type=click.Choice(["uniform", "normal", "int", "zeros", "ones"]),
        metavar="DATA",
        help="uniform in (-1, 1), normal, int (small whole numbers), zeros or ones, both of which draw "
        "less power than data does and look too fast; uniform if not given.",
    ),
    mode_option("batch"),
    cache_option("rotate"),
)


def gemm_options(command: Any) -> Any:
    """Add the options for shapes, libraries and method to a command."""
    return with_options((*PRODUCT_OPTIONS, *_SETTINGS, *_HOW), command)


@click.command(short_help="Products of matrices: cuBLAS, its limit, and other libraries.")
@gemm_options
@tune_options
@effort_options
@gpu_option
@outputs_options
def gemm(*, gpu: str, outputs: Outputs, tuning: TuneOptions, **asked: Any) -> int:
    """Measure how fast a library multiplies matrices, beside what the arithmetic allows.

    A SHAPE is 4096, a cube, or 4096x1024x8192: D is m by n, and sums go over k. Matrices are column-major,
    as in BLAS. Sums are checked against float64; what is wrong, or not supported here, has no figure.

    \b
    cudakit bench gemm
    cudakit bench gemm 8192 --dtype bf16,fp8_e4m3 --vs torch -o gemm.html
    cudakit bench gemm --preset llama3-70b --epilogue bias
    cudakit bench gemm --shapes shapes.csv --layout tn,nn --json
    cudakit bench gemm --preset llama3-8b --tune -o tuned.json
    """
    spec = gemm_spec(**asked)
    if tuning.wanted:
        return tune(spec, gpu, outputs, tuning)
    if tuning.known:
        spec = use_tuned(spec, tuning.known, gpu)
    return measure(spec, gpu, outputs)


def gemm_spec(*, effort: Effort, **asked: Any) -> GemmSpec:
    """Return the Spec of the options. Raises InputError for invalid ones."""
    from cudakit.core.bench.spec import GemmSpec

    simulated = _is_simulated()
    gemms, shapes = products(asked, simulated=simulated)
    baselines = tuple(dict.fromkeys(name for some in asked.pop("baselines") for name in some))
    settings = _settings(asked)
    how = given(baselines=baselines, **asked)
    if simulated:
        # A simulated device computes on the host: one execution at a time, on one buffer set.
        how = {"mode": "isolated", "cache": "hot", **how}
    return GemmSpec(gemms=gemms, shapes=shapes, settings=settings, **how, **effort)


def _settings(asked: dict[str, Any]) -> GemmSettings:
    from cudakit.gpu.api.gemm import GemmSettings

    return GemmSettings(
        deterministic=asked.pop("deterministic"),
        reduced_precision=not asked.pop("no_reduced_precision"),
        fast_accumulate=asked.pop("fast_accumulate"),
        **given(workspace_bytes=asked.pop("workspace_bytes")),
    )


def _is_simulated() -> bool:
    return str(click.get_current_context().params["gpu"]).startswith("sim")
