"""Benchmark an allocation and its free in cudakit, PyTorch, CuPy and CUDA, in one run.

    python scripts/bench_allocator.py [-o FILE.json] [--rounds N]

Each figure is the median of all rounds, in nanoseconds per pair of an allocation and its free. Every
benchmark runs once in each round, so that other load of the machine affects all benchmarks equally. Missing
libraries are skipped and reported. Without a GPU only cudakit runs, on a simulated device. Exits with 1 if a
ratio exceeds its limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cudakit

MIB = 1 << 20
PAIRS = 2000  # Allocations, each with its free, in one round.
LIVE_BLOCKS = 512
FEW_FREE_BLOCKS, MANY_FREE_BLOCKS = 100, 100_000
MAX_TRACE_ENTRIES = 100_000

# A function that runs the given number of pairs of an allocation and its free.
Loop = Callable[[int], None]


class Limit(NamedTuple):
    """The maximum of the ratio of two figures."""

    figure: str  # The name of the numerator.
    baseline: str  # The name of the denominator.
    maximum: float


CUDAKIT = "cudakit"
TRACE = "cudakit, trace"
STACKS = "cudakit, trace and stacks"
CUDAKIT_IN_CUDA_CORE = "cudakit in cuda.core"
REPLACED_BLOCKS = f"cudakit, {LIVE_BLOCKS} live"
WITH_FEW_FREE_BLOCKS = f"cudakit, {FEW_FREE_BLOCKS} free blocks"
WITH_MANY_FREE_BLOCKS = f"cudakit, {MANY_FREE_BLOCKS} free blocks"
LIMITS = (
    Limit(CUDAKIT, "torch.empty", 1),
    Limit(CUDAKIT, "CuPy MemoryPool", 1),
    Limit(TRACE, CUDAKIT, 2),
    Limit(CUDAKIT_IN_CUDA_CORE, "cuda.core DeviceMemoryResource", 1),
    Limit(REPLACED_BLOCKS, CUDAKIT, 3),
    Limit(WITH_MANY_FREE_BLOCKS, WITH_FEW_FREE_BLOCKS, 5),
)


def pair_loop(alloc: Callable[[int], Any], free: Callable[[Any], object], size: int = MIB) -> Loop:
    def loop(count: int) -> None:
        for _ in range(count):
            free(alloc(size))

    loop(1)
    return loop


def delete_loop(allocate: Callable[[int], object]) -> Loop:
    """Return a loop for a library that frees memory when the object of the allocation is deleted."""

    def loop(count: int) -> None:
        for _ in range(count):
            allocate(MIB)

    loop(1)
    return loop


def cudakit_benchmarks(device: int | str) -> Iterator[tuple[str, Loop]]:
    def new_allocator() -> Any:
        return cudakit.CachingAllocator(device)

    allocator = new_allocator()
    yield CUDAKIT, pair_loop(allocator.alloc, allocator.free)
    for name, context in ((TRACE, None), (STACKS, "all")):
        traced = new_allocator()
        traced.record_history(context=context, max_entries=MAX_TRACE_ENTRIES)
        yield name, pair_loop(traced.alloc, traced.free)
    yield REPLACED_BLOCKS, replacement_loop(new_allocator())
    for name, count in (
        (WITH_FEW_FREE_BLOCKS, FEW_FREE_BLOCKS),
        (WITH_MANY_FREE_BLOCKS, MANY_FREE_BLOCKS),
    ):
        allocator = new_allocator()
        create_free_blocks(allocator, count)
        yield name, pair_loop(allocator.alloc, allocator.free, 700)


def replacement_loop(allocator: Any) -> Loop:
    """Return a loop in which each pair replaces one of many live blocks by one of 512 bytes to 16 MiB."""
    rng = random.Random(1)
    alloc, free = allocator.alloc, allocator.free
    sizes = [int(512 * 2 ** rng.uniform(0, 15)) for _ in range(PAIRS)]
    positions = [rng.randrange(LIVE_BLOCKS) for _ in range(PAIRS)]
    live = [alloc(rng.choice(sizes)) for _ in range(LIVE_BLOCKS)]

    def loop(count: int) -> None:
        for position, size in zip(positions[:count], sizes, strict=False):
            free(live[position])
            live[position] = alloc(size)

    loop(PAIRS)
    return loop


def create_free_blocks(allocator: Any, count: int) -> None:
    """Create ``count`` free blocks of several sizes between live blocks."""
    addresses = [allocator.alloc(512 * (1 + number % 4)) for number in range(2 * count)]
    for address in addresses[::2]:
        allocator.free(address)


def torch_benchmarks() -> Iterator[tuple[str, Loop]]:
    import torch

    yield (
        "torch.empty",
        delete_loop(lambda size: torch.empty(size, dtype=torch.uint8, device="cuda")),
    )
    alloc, delete = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
    yield "torch caching_allocator_alloc", pair_loop(alloc, delete)


def cupy_benchmarks() -> Iterator[tuple[str, Loop]]:
    import cupy

    yield "CuPy MemoryPool", delete_loop(cupy.cuda.MemoryPool().malloc)


def cuda_bindings_benchmarks() -> Iterator[tuple[str, Loop]]:
    from cuda.bindings import driver

    def alloc(size: int) -> Any:
        return driver.cuMemAllocAsync(size, 0)[1]

    def free(ptr: Any) -> None:
        driver.cuMemFreeAsync(ptr, 0)

    retain_free_memory(driver)
    yield "cuMemAllocAsync + cuMemFreeAsync", pair_loop(alloc, free)


def retain_free_memory(driver: Any) -> None:
    """Make the device's pool retain free memory at a synchronization, as the other allocators do."""
    _, device = driver.cuCtxGetDevice()
    _, pool = driver.cuDeviceGetDefaultMemPool(device)
    threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    driver.cuMemPoolSetAttribute(pool, threshold, driver.cuuint64_t((1 << 64) - 1))


def cuda_core_benchmarks() -> Iterator[tuple[str, Loop]]:
    from cuda.core import Device, DeviceMemoryResource

    device = Device()
    device.set_current()
    stream = device.create_stream()
    for name, resource in (
        ("cuda.core DeviceMemoryResource", DeviceMemoryResource(device)),
        (CUDAKIT_IN_CUDA_CORE, cudakit.CachingMemoryResource(0)),
    ):
        yield name, buffer_loop(resource, stream)


def buffer_loop(resource: Any, stream: Any) -> Loop:
    allocate = resource.allocate

    def loop(count: int) -> None:
        for _ in range(count):
            allocate(MIB, stream=stream).close()

    loop(1)
    return loop


def benchmarks(device: int | str) -> Iterator[tuple[str, Loop]]:
    """Yield the name and the loop of each benchmark; report missing libraries on stderr."""
    yield from cudakit_benchmarks(device)
    if isinstance(device, str):
        return
    for library_benchmarks in (
        torch_benchmarks,
        cupy_benchmarks,
        cuda_bindings_benchmarks,
        cuda_core_benchmarks,
    ):
        try:
            yield from library_benchmarks()
        except (ImportError, cudakit.MissingDependency) as error:
            print(
                f"skipped, {library_benchmarks.__name__.replace('_', ' ')}: {error}",
                file=sys.stderr,
            )


def measure(loops: dict[str, Loop], rounds: int) -> dict[str, list[float]]:
    """Return the nanoseconds per pair in each round, by benchmark."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    gc.disable()
    for _ in range(rounds):
        for name, loop in loops.items():
            start = time.perf_counter_ns()
            loop(PAIRS)
            times[name].append((time.perf_counter_ns() - start) / PAIRS)
    gc.enable()
    return times


def find_device() -> int | str:
    """Return the index of the GPU, or the name of a simulated device if there is none."""
    try:
        cudakit.CachingAllocator(0).close()
    except cudakit.CudakitError as error:
        print(f"no GPU: using a simulated device ({error})", file=sys.stderr)
        return "sim:h200"
    return 0


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions_by_name = {"python": platform.python_version()}
    for name in ("cudakit", "torch", "cupy-cuda12x", "cupy-cuda13x", "cuda-core", "cuda-bindings"):
        try:
            versions_by_name[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions_by_name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    device = find_device()
    times = measure(dict(benchmarks(device)), options.rounds)
    medians = {name: statistics.median(rounds) for name, rounds in times.items()}
    measured_limits = [
        limit for limit in LIMITS if limit.figure in medians and limit.baseline in medians
    ]
    ratios = {limit: medians[limit.figure] / medians[limit.baseline] for limit in measured_limits}
    if options.output:
        result = {
            "device": device,
            "versions": versions(),
            "pair_ns": medians,
            "rounds_ns": times,
            "ratios": [{**limit._asdict(), "ratio": ratio} for limit, ratio in ratios.items()],
        }
        options.output.write_text(json.dumps(result) + "\n")
    for name, median in medians.items():
        print(f"{name:36} {median:8.0f} ns  {median / medians[CUDAKIT]:6.2f} of {CUDAKIT}")
    for limit, ratio in ratios.items():
        verdict = "ok" if ratio <= limit.maximum else "EXCEEDED"
        print(f"{limit.figure} / {limit.baseline}: {ratio:.2f}, limit {limit.maximum:g}: {verdict}")
    return int(any(ratio > limit.maximum for limit, ratio in ratios.items()))


if __name__ == "__main__":
    sys.exit(main())
