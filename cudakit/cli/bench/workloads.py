"""The commands ``cudakit bench memory``, ``copy``, ``launch``, ``alloc``, ``graph`` and ``suite``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.measure import FORMATS, exit_code, measure_and_report, measuring
from cudakit.cli.bench.options import (
    DESCRIBED_IN,
    Effort,
    cache_option,
    counts,
    given,
    mode_option,
    name_list,
    sizes_option,
)
from cudakit.cli.failure import ExitCode
from cudakit.cli.options import Command, OutputOptions, Value, gpu_option, option, output_options

if TYPE_CHECKING:
    from cudakit.core.bench.spec import Allocator, Spec
    from cudakit.gpu.api import Gpu


def _benchmark(summary: str) -> Callable[[Callable[..., Any]], click.Command]:
    return click.command(cls=Command, described_in=DESCRIBED_IN, short_help=summary)


@_benchmark("Bandwidth of device memory and L2 cache.")
@option(
    "--operations",
    type=name_list("cudakit.core.bench.spec:OPERATIONS"),
    metavar="NAME,...",
    help="Kernels: read, write, copy, scale, triad.  [default: all]",
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


@_benchmark("Bandwidth of copies between host and device, and between GPUs.")
@option(
    "--directions",
    type=name_list("cudakit.core.bench.spec:DIRECTIONS"),
    metavar="NAME,...",
    help="Directions: h2d and d2h (pinned host memory), both (h2d and d2h at the same time), pageable-h2d, "
    "pageable-d2h, d2d (within the device), peer (to each other GPU), peer-both.  [default: all available]",
)
@sizes_option("Bytes of each copy")
@mode_option("host for pageable memory and else isolated")
@cache_option("rotate within the device and else hot")
@measuring
def copy(*, effort: Effort, **asked: Any) -> Spec:
    """Measure how fast the driver copies: between host and device, within the device, and to others.

    The limit is the link between host and device, that to other devices, or the memory of the device. Of
    copies both ways at the same time, the bytes of both count. Where two devices cannot reach each other,
    copies are staged by way of the host, and the column access says so.

    \b
    cudakit bench copy
    cudakit bench copy --directions h2d,d2h --sizes 4KiB..256MiB
    cudakit bench copy --directions peer,peer-both --sizes 1GiB
    """
    from cudakit.core.bench.spec import CopySpec

    return CopySpec(**given(**asked), **effort)


@_benchmark("Latency of launches, events, waits and streams.")
@option(
    "--calls",
    type=name_list("cudakit.core.bench.spec:CALLS"),
    metavar="NAME,...",
    help="Calls: launch, launch-to-start, launch-to-finish, launch-back-to-back, event-record, "
    "stream-synchronize, event-create-destroy, stream-create-destroy.  [default: all]",
)
@measuring
def launch(*, effort: Effort, **asked: Any) -> Spec:
    """Measure how long calls take that launch kernels, wait for them, and make what that needs.

    \b
    cudakit bench launch
    cudakit bench launch --calls launch,launch-to-finish
    """
    from cudakit.core.bench.spec import LaunchSpec

    return LaunchSpec(**given(**asked), **effort)


@_benchmark("Latency of memory allocation and free.")
@option(
    "--allocators",
    type=name_list(("driver", "stream-ordered", "pinned", "virtual", "caching")),
    metavar="NAME,...",
    help="Allocators: driver, stream-ordered, pinned, virtual, caching.  [default: all]",
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


@_benchmark("Cost of CUDA graphs, and the time they save.")
@option(
    "--topologies",
    type=name_list("cudakit.core.bench.spec:TOPOLOGIES"),
    metavar="NAME,...",
    help="Graph topologies: chain, fork-join.  [default: both]",
)
@option(
    "--nodes",
    type=Value((), counts),
    metavar="N,...",
    help="Nodes per graph, for example 1,10,100.",
)
@option(
    "--nodes-of",
    "kinds",
    type=name_list("cudakit.core.bench.spec:NODE_KINDS"),
    metavar="NAME,...",
    help="Node types: kernel, fill, copy, of 16 bytes each.  [default: kernel]",
)
@option(
    "--steps",
    type=name_list("cudakit.core.bench.spec:STEPS"),
    metavar="NAME,...",
    help="Steps: capture, instantiate, update, upload, first-launch, launch, run, replay, eager.  "
    "[default: all]",
)
@measuring
def graph(*, effort: Effort, **asked: Any) -> Spec:
    """Measure what graphs cost to make and to launch, and what they save.

    update gives a graph other parameters (the whole of it), first-launch is the launch of one that was
    not uploaded, launch the call once it was. run is the time of the device; replay and eager are what
    the host waits for, with a graph and without one, and take turns.

    \b
    cudakit bench graph
    cudakit bench graph --topologies chain --nodes 1,10,100,1000
    cudakit bench graph --nodes-of kernel,fill,copy --steps launch,run
    """
    from cudakit.core.bench.spec import GraphSpec

    return GraphSpec(**given(**asked), **effort)


@_benchmark("Health check: does this GPU perform as its model should?")
@option("--quick", is_flag=True, help="Run a subset that takes about a minute.")
@gpu_option
@output_options(FORMATS)
def suite(*, quick: bool, gpu: str, output: OutputOptions) -> int:
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

    result = measure_and_report(partial(check_health, SuiteSpec(quick=quick)), gpu, output)
    return ExitCode.FINDINGS if result.health == "fail" else exit_code(result.bench)
