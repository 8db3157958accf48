"""``cudakit bench alloc``: how long does it take to get memory and to give it back?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.measure import measuring
from cudakit.cli.bench.options import Effort, given, names, sizes_option

if TYPE_CHECKING:
    from cudakit.core.bench.spec import Allocator, Spec
    from cudakit.gpu.api import Gpu


@click.command(short_help="Allocations by the driver, from its pool, pinned and mapped.")
@click.option(
    "--allocators",
    type=names,
    metavar="NAME,...",
    help="Some of driver, stream-ordered, pinned, virtual and caching; all if not given.",
)
@sizes_option("Bytes of each allocation")
@measuring
def alloc(*, effort: Effort, **asked: Any) -> Spec:
    """Measure how long it takes to allocate memory and to free it again.

    driver is cuMemAlloc, stream-ordered cuMemAllocAsync, pinned is memory of the host, and virtual is
    memory created and mapped with the driver's virtual memory management. caching is cudakit's own
    allocator, which keeps what is freed: its allocations seldom ask the driver.

    \b
    cudakit bench alloc
    cudakit bench alloc --allocators driver,stream-ordered --sizes 4KiB..1GiB
    """
    from cudakit.core.bench.spec import AllocSpec

    return AllocSpec(others={"caching": _caching}, **given(**asked), **effort)


def _caching(gpu: Gpu) -> Allocator:
    from cudakit.core.allocator.allocator import CachingAllocator
    from cudakit.core.allocator.upstream import GpuUpstream

    return CachingAllocator(GpuUpstream(gpu))
