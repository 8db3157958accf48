"""Benchmark an allocation and its free in cudakit, PyTorch, CuPy and CUDA, in one run.

    python scripts/bench_allocator.py [-o FILE.json] [--rounds N]

A figure is the median of all rounds, in nanoseconds per pair of an allocation and its free. In each round
every benchmark runs once, so that other load of the machine affects all alike. Missing libraries are named
and skipped. Without a GPU only cudakit runs, on a simulated device. Exits with 1 if a ratio exceeds its
limit.
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
PAIRS = 2000
LIVE = 512
FEW, MANY = 100, 100_000
MOST_TRACE_ENTRIES = 100_000

# Runs a number of pairs of an allocation and its free.
Loop = Callable[[int], None]


class Limit(NamedTuple):
    """The maximum ratio of one figure to another."""

    figure: str
    of: str
    most: float


OWN = "cudakit"
TRACE = "cudakit, trace"
STACKS = "cudakit, trace and stacks"
OWN_CORE = "cudakit in cuda.core"
CHURN = f"cudakit, {LIVE} live"
AMONG_FEW = f"cudakit, {FEW} free blocks"
AMONG_MANY = f"cudakit, {MANY} free blocks"
LIMITS = (
    Limit(OWN, "torch.empty", 1),
    Limit(OWN, "CuPy MemoryPool", 1),
    Limit(TRACE, OWN, 2),
    Limit(OWN_CORE, "cuda.core DeviceMemoryResource", 1),
    Limit(CHURN, OWN, 3),
    Limit(AMONG_MANY, AMONG_FEW, 5),
)


def pairs_of(alloc: Callable[[int], Any], free: Callable[[Any], object], size: int = MIB) -> Loop:
    def loop(count: int) -> None:
        for _ in range(count):
            free(alloc(size))

    loop(1)
    return loop


def drops_of(make: Callable[[int], object]) -> Loop:
    """Return a loop for libraries that free memory when its object is deleted."""

    def loop(count: int) -> None:
        for _ in range(count):
            make(MIB)

    loop(1)
    return loop


def own(device: int | str) -> Iterator[tuple[str, Loop]]:
    def made() -> Any:
        return cudakit.CachingAllocator(device)

    plain = made()
    yield OWN, pairs_of(plain.alloc, plain.free)
    for name, context in ((TRACE, None), (STACKS, "all")):
        traced = made()
        traced.record_history(context=context, max_entries=MOST_TRACE_ENTRIES)
        yield name, pairs_of(traced.alloc, traced.free)
    yield CHURN, churn(made())
    for name, count in ((AMONG_FEW, FEW), (AMONG_MANY, MANY)):
        among = made()
        scatter(among, count)
        yield name, pairs_of(among.alloc, among.free, 700)


def churn(allocator: Any) -> Loop:
    """Return a loop that replaces one of many live blocks each time, with 512 bytes to 16 MiB."""
    rng = random.Random(1)
    alloc, free = allocator.alloc, allocator.free
    sizes = [int(512 * 2 ** rng.uniform(0, 15)) for _ in range(PAIRS)]
    victims = [rng.randrange(LIVE) for _ in range(PAIRS)]
    live = [alloc(rng.choice(sizes)) for _ in range(LIVE)]

    def loop(count: int) -> None:
        for victim, size in zip(victims[:count], sizes, strict=False):
            free(live[victim])
            live[victim] = alloc(size)

    loop(PAIRS)
    return loop


def scatter(allocator: Any, count: int) -> None:
    """Create ``count`` free blocks of several sizes between live ones."""
    held = [allocator.alloc(512 * (1 + number % 4)) for number in range(2 * count)]
    for ptr in held[::2]:
        allocator.free(ptr)


def with_torch() -> Iterator[tuple[str, Loop]]:
    import torch

    yield (
        "torch.empty",
        drops_of(lambda size: torch.empty(size, dtype=torch.uint8, device="cuda")),
    )
    own_alloc, own_delete = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
    yield "torch caching_allocator_alloc", pairs_of(own_alloc, own_delete)


def with_cupy() -> Iterator[tuple[str, Loop]]:
    import cupy

    yield "CuPy MemoryPool", drops_of(cupy.cuda.MemoryPool().malloc)


def with_bindings() -> Iterator[tuple[str, Loop]]:
    from cuda.bindings import driver

    def alloc(size: int) -> Any:
        return driver.cuMemAllocAsync(size, 0)[1]

    def free(ptr: Any) -> None:
        driver.cuMemFreeAsync(ptr, 0)

    keep_memory(driver)
    yield "cuMemAllocAsync + cuMemFreeAsync", pairs_of(alloc, free)


def keep_memory(driver: Any) -> None:
    """Make the device's pool keep its memory at a synchronization, as the other allocators do."""
    _, device = driver.cuCtxGetDevice()
    _, pool = driver.cuDeviceGetDefaultMemPool(device)
    threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    driver.cuMemPoolSetAttribute(pool, threshold, driver.cuuint64_t((1 << 64) - 1))


def with_cuda_core() -> Iterator[tuple[str, Loop]]:
    from cuda.core import Device, DeviceMemoryResource

    device = Device()
    device.set_current()
    stream = device.create_stream()
    for name, resource in (
        ("cuda.core DeviceMemoryResource", DeviceMemoryResource(device)),
        (OWN_CORE, cudakit.CachingMemoryResource(0)),
    ):
        yield name, buffers_of(resource, stream)


def buffers_of(resource: Any, stream: Any) -> Loop:
    allocate = resource.allocate

    def loop(count: int) -> None:
        for _ in range(count):
            allocate(MIB, stream=stream).close()

    loop(1)
    return loop


def benchmarks(device: int | str) -> Iterator[tuple[str, Loop]]:
    """Yield the benchmarks; missing libraries are named on stderr."""
    yield from own(device)
    if isinstance(device, str):
        return
    for peer in (with_torch, with_cupy, with_bindings, with_cuda_core):
        try:
            yield from peer()
        except (ImportError, cudakit.MissingDependency) as error:
            print(f"skipped, {peer.__name__.replace('_', ' ')}: {error}", file=sys.stderr)


def measure(loops: dict[str, Loop], rounds: int) -> dict[str, list[float]]:
    """Return nanoseconds per pair, round by round."""
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
    """Return the device ordinal, or the name of a simulated device."""
    try:
        cudakit.CachingAllocator(0).close()
    except cudakit.CudakitError as error:
        print(f"no GPU: using a simulated device ({error})", file=sys.stderr)
        return "sim:h200"
    return 0


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    by_name = {"python": platform.python_version()}
    for name in ("cudakit", "torch", "cupy-cuda12x", "cupy-cuda13x", "cuda-core", "cuda-bindings"):
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            continue
    return by_name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    device = find_device()
    rounds = measure(dict(benchmarks(device)), options.rounds)
    medians = {name: statistics.median(times) for name, times in rounds.items()}
    known = [limit for limit in LIMITS if limit.figure in medians and limit.of in medians]
    ratios = {limit: medians[limit.figure] / medians[limit.of] for limit in known}
    if options.output:
        result = {
            "device": device,
            "versions": versions(),
            "pair_ns": medians,
            "rounds_ns": rounds,
            "ratios": [{**limit._asdict(), "ratio": ratio} for limit, ratio in ratios.items()],
        }
        options.output.write_text(json.dumps(result) + "\n")
    for name, median in medians.items():
        print(f"{name:36} {median:8.0f} ns  {median / medians[OWN]:6.2f} of {OWN}")
    for limit, ratio in ratios.items():
        verdict = "ok" if ratio <= limit.most else "EXCEEDED"
        print(f"{limit.figure} / {limit.of}: {ratio:.2f}, limit {limit.most:g}: {verdict}")
    return int(any(ratio > limit.most for limit, ratio in ratios.items()))


if __name__ == "__main__":
    sys.exit(main())
