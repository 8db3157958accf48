"""The options of ``cudakit bench gemm`` for shapes, data types, layouts and epilogues."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from cudakit.cli.bench.options import name_list, passed_options
from cudakit.cli.options import FILE, Decorator, Value, option, option_group
from cudakit.errors import UsageError

if TYPE_CHECKING:
    from cudakit.bench.workloads.gemm_shapes import Shape
    from cudakit.gpu.api.gemm import Gemm

_MAX_GEMMS = 10_000  # more GEMMs would take a day


def _data_types() -> list[str]:
    from cudakit.gpu.api.gemm import DATA_TYPES

    return [*DATA_TYPES, "all"]


# The parsed GEMMs, and a dict with the name of each GEMM that has a named shape.
NamedGemms: TypeAlias = "tuple[tuple[Gemm, ...], dict[Gemm, str]]"

GEMM_OPTIONS: tuple[Decorator, ...] = (
    click.argument("sides", nargs=-1, metavar="[SHAPE]..."),
    *option_group(
        "GEMM",
        option(
            "--shapes",
            "files",
            multiple=True,
            type=FILE,
            metavar="FILE",
            help="Read shapes from FILE, one per line: m n k, and optionally a batch count; or CSV with a "
            "header. Repeatable.",
        ),
        option(
            "--preset",
            "presets",
            type=Value("cudakit.bench.workloads.gemm_shapes:PRESETS"),
            multiple=True,
            metavar="NAME",
            help="Shapes: cubes (M = N = K, 512 to 16384); the layers of llama3-8b, llama3-70b, llama3-405b "
            "or gpt3-175b for 16 and 4096 tokens; llm (both llama3-8b and llama3-70b). Repeatable.",
        ),
        option(
            "--dtype",
            "dtypes",
            type=name_list(_data_types),
            metavar="NAME,...",
            help="Data types: fp64, fp32, tf32, fp16, bf16, fp8_e4m3, fp8_e5m2, int8 or all.  "
            "[default: bf16]",
        ),
        option(
            "--layout",
            "layouts",
            type=name_list("cudakit.gpu.api.gemm:LAYOUTS"),
            metavar="NAME,...",
            help="Whether A and B are transposed in memory: nn, nt, tn or tt (n: no, t: transposed).  "
            "[default: tn]",
        ),
        option(
            "--epilogue",
            "epilogues",
            type=name_list("cudakit.gpu.api.gemm:EPILOGUES"),
            metavar="NAME,...",
            help="Fused epilogue: none, bias, relu, gelu, relu-bias or gelu-bias.  [default: none]",
        ),
        option(
            "--output-type",
            "output_type",
            type=Value(_data_types),
            metavar="NAME",
            help="Data type of the output matrix.  [default: depends on --dtype]",
        ),
        option(
            "--accumulate",
            type=Value(_data_types),
            metavar="NAME",
            help="Data type of the accumulator.  [default: depends on --dtype]",
        ),
        option(
            "--batch",
            type=int,
            metavar="N",
            help="Batch count of a strided-batched GEMM.  [default: 1]",
        ),
        option(
            "--padding",
            type=int,
            metavar="N",
            help="Padding elements between the columns of every matrix.  [default: 0]",
        ),
    ),
)


def parse_gemms(options: dict[str, Any], *, simulated: bool) -> NamedGemms:
    """Remove the options of GEMM_OPTIONS from ``options``; return a GEMM per combination of their values."""
    shapes = _shapes(options, simulated=simulated)
    type_combinations = tuple(
        product(
            _dtypes(options.pop("dtypes")),
            options.pop("layouts") or (None,),
            options.pop("epilogues") or (None,),
        )
    )
    type_options = passed_options(
        padding=options.pop("padding"),
        output=options.pop("output_type"),
        accumulate=options.pop("accumulate"),
    )
    batch = options.pop("batch")
    _check_gemm_count(len(shapes) * len(type_combinations))
    name_by_gemm: dict[Gemm, str] = {}
    for dtype, layout, epilogue in type_combinations:
        for shape in shapes:
            gemm = _gemm(
                shape,
                batch,
                passed_options(layout=layout, epilogue=epilogue, **type_options),
                dtype,
            )
            name_by_gemm.setdefault(gemm, shape.name)
    return tuple(name_by_gemm), {gemm: name for gemm, name in name_by_gemm.items() if name}


def _check_gemm_count(gemm_count: int) -> None:
    if gemm_count > _MAX_GEMMS:
        raise UsageError(
            f"{gemm_count:,} cases are too many: at most {_MAX_GEMMS:,} can be measured in one run",
            hint="use fewer shapes, data types, layouts or epilogues",
        )


def _shapes(options: dict[str, Any], *, simulated: bool) -> tuple[Shape, ...]:
    from cudakit.bench.workloads.gemm_shapes import (
        default_shapes,
        parse_shape,
        preset,
        read_shapes,
    )

    shapes = (
        *map(parse_shape, options.pop("sides")),
        *(shape for path in options.pop("files") for shape in read_shapes(Path(path))),
        *(shape for name in options.pop("presets") for shape in preset(name)),
    )
    return shapes or default_shapes(simulated=simulated)


def _dtypes(names: tuple[str, ...] | None) -> tuple[str, ...]:
    from cudakit.gpu.api.gemm import DATA_TYPES

    return tuple(DATA_TYPES) if names == ("all",) else names or ("bf16",)


def _gemm(shape: Shape, batch: int | None, type_options: dict[str, Any], dtype: str) -> Gemm:
    from cudakit.gpu.api.gemm import Gemm

    batch_count = shape.batch if shape.batch is not None else 1 if batch is None else batch
    return Gemm(dtype=dtype, m=shape.m, n=shape.n, k=shape.k, batch=batch_count, **type_options)
