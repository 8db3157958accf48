"""The GEMMs of ``cudakit bench gemm``: shapes, data types, layouts and epilogues."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from cudakit.cli.bench.options import given, names
from cudakit.errors import UsageError

if TYPE_CHECKING:
    from cudakit.core.bench.workloads.gemm_shapes import Shape
    from cudakit.gpu.api.gemm import Gemm

# More would take a day.
_MOST_PRODUCTS = 10_000

# The GEMMs, and the names of those that have one.
Products: TypeAlias = "tuple[tuple[Gemm, ...], dict[Gemm, str]]"

PRODUCT_OPTIONS = (
    click.argument("sides", nargs=-1, metavar="[SHAPE]..."),
    click.option(
        "--shapes",
        "files",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Read shapes, one a line: m n k or m,n,k, then a batch if any; or CSV with names of columns. "
        "Repeatable.",
    ),
    click.option(
        "--preset",
        "presets",
        multiple=True,
        metavar="NAME",
        help="cubes (512 to 16384), the layers of llama3-8b, llama3-70b, llama3-405b or gpt3-175b for "
        "16 and 4096 tokens, or llm, which is the first two of them. Repeatable.",
    ),
    click.option(
        "--dtype",
        "dtypes",
        type=names,
        metavar="NAME,...",
        help="Some of fp64, fp32, tf32, fp16, bf16, fp8_e4m3, fp8_e5m2 and int8, or all; bf16 if not given.",
    ),
    click.option(
        "--layout",
        "layouts",
        type=names,
        metavar="NAME,...",
        help="nn, nt, tn or tt: whether A and B are stored as they are used or transposed; tn if not given.",
    ),
    click.option(
        "--epilogue",
        "epilogues",
        type=names,
        metavar="NAME,...",
        help="What follows the sums: none, bias, relu, gelu, relu-bias or gelu-bias; none if not given.",
    ),
    click.option("--output-type", "output_type", metavar="NAME", help="The type of D."),
    click.option("--accumulate", metavar="NAME", help="The type of sums."),
    click.option(
        "--batch", type=int, metavar="N", help="So many products at once, strided; 1 if not given."
    ),
    click.option(
        "--padding",
        type=int,
        metavar="N",
        help="Elements between the columns of every matrix; 0 if not given.",
    ),
)


def products(asked: dict[str, Any], *, simulated: bool) -> Products:
    """Remove the options above from ``asked``, and return every combination of them."""
    shapes = _shapes(asked, simulated=simulated)
    kinds = tuple(
        product(
            _dtypes(asked.pop("dtypes")),
            asked.pop("layouts") or (None,),
            asked.pop("epilogues") or (None,),
        )
    )
    ways = given(
        padding=asked.pop("padding"),
        output=asked.pop("output_type"),
        accumulate=asked.pop("accumulate"),
    )
    batch = asked.pop("batch")
    _check_count(len(shapes) * len(kinds))
    found: dict[Gemm, str] = {}
    for dtype, layout, epilogue in kinds:
        for shape in shapes:
            gemm = _gemm(shape, batch, given(layout=layout, epilogue=epilogue, **ways), dtype)
            found.setdefault(gemm, shape.name)
    return tuple(found), {gemm: name for gemm, name in found.items() if name}


def _check_count(count: int) -> None:
    if count > _MOST_PRODUCTS:
        raise UsageError(
            f"{count:,} products were asked, and at most {_MOST_PRODUCTS:,} can be measured in one run",
            hint="give fewer shapes, types, layouts or epilogues",
        )


def _shapes(asked: dict[str, Any], *, simulated: bool) -> tuple[Shape, ...]:
    from cudakit.core.bench.workloads.gemm_shapes import (
        parse_shape,
        preset,
        read_shapes,
        usual_shapes,
    )

    shapes = (
        *map(parse_shape, asked.pop("sides")),
        *(shape for path in asked.pop("files") for shape in read_shapes(path)),
        *(shape for name in asked.pop("presets") for shape in preset(name)),
    )
    return shapes or usual_shapes(simulated=simulated)


def _dtypes(asked: tuple[str, ...] | None) -> tuple[str, ...]:
    from cudakit.gpu.api.gemm import DATA_TYPES

    return tuple(DATA_TYPES) if asked == ("all",) else asked or ("bf16",)


def _gemm(shape: Shape, batch: int | None, ways: dict[str, Any], dtype: str) -> Gemm:
    from cudakit.gpu.api.gemm import Gemm

    times = shape.batch if shape.batch is not None else 1 if batch is None else batch
    return Gemm(dtype=dtype, m=shape.m, n=shape.n, k=shape.k, batch=times, **ways)
