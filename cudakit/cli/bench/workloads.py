"""The commands ``cudakit bench memory``, ``copy``, ``launch``, ``alloc`` and ``graph``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.measure import measuring
from cudakit.cli.bench.options import (
    HELP_BY_TITLE,
    Effort,
    cache_option,
    mode_option,
    name_list,
    parse_counts,
    passed_options,
    sizes_option,
)
from cudakit.cli.options import Command, Value, option

if TYPE_CHECKING:
    from cudakit.bench.spec import Allocator, Spec
    from cudakit.gpu.api import Gpu


def _benchmark(summary: str) -> Callable[[Callable[..., Any]], click.Command]:
    return click.command(cls=Command, help_by_title=HELP_BY_TITLE, short_help=summary)


@_benchmark("Bandwidth of device memory and L2 cache.")
@option(
    "--operations",
    type=name_list("cudakit.bench.spec:OPERATIONS"),
    metavar="NAME,...",
    help="Kernels: read, write, copy, scale, triad.  [default: all]",
)
@sizes_option("Bytes of each buffer")
@mode_option("batch")
@cache_option("hot")
@measuring
def memory(*, effort: Effort, **options: Any) -> Spec:
    """Measure the bandwidth of kernels that read and write device memory.

    The rate counts all bytes read and written. The default sizes range from 1/16 of the L2 cache to 1 GiB,
    and with --gpu sim from 16 KiB to 1 MiB. With a hot L2 cache (the default), the rate drops where the
    buffers exceed the cache. With --cache rotate, buffers of all but the smallest sizes leave the cache
    before they are used again; a warning is printed if some do not.

    \b
    cudakit bench memory
    cudakit bench memory --operations copy,triad --sizes 1MiB..1GiB -o memory.html
    """
    from cudakit.bench.spec import MemorySpec

    return MemorySpec(**passed_options(**options), **effort.arguments(MemorySpec))


@_benchmark("Bandwidth of copies between host and device, and between GPUs.")
@option(
    "--directions",
    type=name_list("cudakit.bench.spec:DIRECTIONS"),
    metavar="NAME,...",
    help="Directions: h2d and d2h (pinned host memory), both (h2d and d2h at the same time), pageable-h2d, "
    "pageable-d2h, d2d (within the device), peer (from the measured GPU to each other GPU), peer-both.  "
    "[default: all available]",
)
@sizes_option("Bytes of each copy")
@mode_option("host for pageable memory, else isolated")
@cache_option("rotate for d2d of sizes that can overwrite the L2, else hot")
@option(
    "--overlap",
    type=click.Choice(["gemm"]),
    metavar="gemm",
    help="Measure how copies overlap with GEMMs on another stream, and how much each slows the other down.",
)
@measuring
def copy(*, overlap: str | None, effort: Effort, **options: Any) -> Spec:
    """Measure the rate of the driver's copies: between host and device, within the device, and between GPUs.

    The theoretical peak is that of PCIe, NVLink or device memory. For --directions both and peer-both, the
    rate is the sum of the two directions; for d2d, it counts the bytes read and the bytes written. Copies
    between GPUs without peer access go through host memory; the column "access" shows this. The default sizes
    are 4 KiB to 1 GiB, and with --gpu sim 4 KiB to 1 MiB.

    With --overlap gemm, the directions are h2d, d2h, pageable-h2d, pageable-d2h and d2d, and the default size
    is 64 MiB (with --gpu sim 256 KiB). The GEMM has bf16 matrices of 4096 x 4096 (with --gpu sim 64 x 64).

    \b
    cudakit bench copy
    cudakit bench copy --directions h2d,d2h --sizes 4KiB..256MiB
    cudakit bench copy --directions peer,peer-both --sizes 1GiB
    cudakit bench copy --overlap gemm
    """
    from cudakit.bench.spec import CopySpec, OverlapSpec
    from cudakit.errors import UsageError

    if overlap:
        for name in ("mode", "cache"):
            if options.pop(name):
                raise UsageError(f"--{name} cannot be used with --overlap", hint=f"remove --{name}")
        return OverlapSpec(
            work=overlap, **passed_options(**options), **effort.arguments(OverlapSpec)
        )
    return CopySpec(**passed_options(**options), **effort.arguments(CopySpec))


@_benchmark("Latency of memory allocation and free.")
@option(
    "--allocators",
    type=name_list(("driver", "stream-ordered", "pinned", "virtual", "caching")),
    metavar="NAME,...",
    help="Allocators: driver, stream-ordered, pinned, virtual, caching.  [default: all]",
)
@sizes_option("Bytes of each allocation")
@measuring
def alloc(*, effort: Effort, **options: Any) -> Spec:
    """Measure the time to allocate and free memory.

    The time of a case is that of one allocation and its free. The default sizes are 512 B to 1 GiB, and with
    --gpu sim 512 B to 1 MiB. The allocators:

    \b
    driver          cuMemAlloc
    stream-ordered  cuMemAllocAsync
    pinned          cuMemHostAlloc
    virtual         cuMemCreate and cuMemMap
    caching         the allocator of cudakit, which reuses freed blocks

    \b
    cudakit bench alloc
    cudakit bench alloc --allocators driver,stream-ordered --sizes 4KiB..1GiB
    """
    from cudakit.bench.spec import AllocSpec

    return AllocSpec(
        other_allocators={"caching": _caching_allocator},
        **passed_options(**options),
        **effort.arguments(AllocSpec),
    )


def _caching_allocator(gpu: Gpu) -> Allocator:
    from cudakit.allocator.allocator import DeviceCachingAllocator
    from cudakit.allocator.upstream import GpuUpstream

    return DeviceCachingAllocator(GpuUpstream(gpu))


@_benchmark("Cost of CUDA graphs, and the time they save.")
@option(
    "--topologies",
    type=name_list("cudakit.bench.spec:TOPOLOGIES"),
    metavar="NAME,...",
    help="Graph topologies: chain, fork-join.  [default: both]",
)
@option(
    "--nodes",
    type=Value((), parse_counts),
    metavar="N,...",
    help="Number of nodes per graph, for example 1,10,100.  [default: 1,8,64,512,4096; with --gpu sim "
    "1,8,64]",
)
@option(
    "--nodes-of",
    "kinds",
    type=name_list("cudakit.bench.spec:NODE_KINDS"),
    metavar="NAME,...",
    help="Node types: kernel, fill (memset), copy; each node writes 16 bytes.  [default: kernel]",
)
@option(
    "--steps",
    type=name_list("cudakit.bench.spec:STEPS"),
    metavar="NAME,...",
    help="Steps: capture, instantiate, update, upload, first-launch, launch, run, replay, eager.  "
    "[default: all]",
)
@measuring
def graph(*, effort: Effort, **options: Any) -> Spec:
    """Measure the time to create and launch CUDA graphs, and the time that they save.

    The steps:

    \b
    capture       the host time to capture the graph
    instantiate   the host time to instantiate the captured graph
    upload        the host time to upload the instantiated graph
    update        the host time to change the parameters of all nodes
    first-launch  the host time to launch a graph that was not uploaded
    launch        the host time to launch an uploaded graph
    run           the device time of one execution of the graph
    replay        the host time until the device has executed the graph
    eager         the host time until the device has executed the same nodes
                  without a graph (samples are interleaved with those of replay)

    \b
    cudakit bench graph
    cudakit bench graph --topologies chain --nodes 1,10,100,1000
    cudakit bench graph --nodes-of kernel,fill,copy --steps launch,run
    """
    from cudakit.bench.spec import GraphSpec

    return GraphSpec(**passed_options(**options), **effort.arguments(GraphSpec))
