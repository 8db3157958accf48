"""``cudakit bench memory``: how fast do kernels move the memory of the device?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.measure import measuring
from cudakit.cli.bench.options import Effort, cache_option, given, mode_option, names, sizes_option

if TYPE_CHECKING:
    from cudakit.core.bench.spec import Spec


@click.command(short_help="Read, write, copy and triad of device memory; the L2 knee.")
@click.option(
    "--operations",
    type=names,
    metavar="NAME,...",
    help="Some of read, write, copy, scale and triad; all if not given.",
)
@sizes_option("Bytes of each buffer")
@mode_option("batch")
@cache_option("hot")
@measuring
def memory(*, effort: Effort, **asked: Any) -> Spec:
    """Measure how fast kernels read and write the memory of the device.

    Without --sizes they go from well inside the L2 cache to far beyond it. With the cache hot, which is
    the default, the knee between shows what it holds; --cache rotate makes every size cold.

    \b
    cudakit bench memory
    cudakit bench memory --operations copy,triad --sizes 1MiB..1GiB -o memory.html
    """
    from cudakit.core.bench.spec import MemorySpec

    return MemorySpec(**given(**asked), **effort)
