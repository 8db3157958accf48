"""Virtual memory of a Gpu: every call can fail, and nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
from allocator import invariants
from allocator.device import MIB
from allocator.failing_gpu import FailingGpu

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.upstream import GpuPages, GpuUpstream
from cudakit.errors import CudaError
from cudakit.torch_rules.settings import Settings

PAGE = 2 * MIB


@pytest.fixture
def gpu() -> Iterator[FailingGpu]:
    failing_gpu = FailingGpu(64 * MIB)
    yield failing_gpu
    failing_gpu.close()


def test_pages_are_mapped_contiguously_and_unmapped(gpu: FailingGpu) -> None:
    pages = GpuPages(gpu)
    ptr = pages.reserve(8 * PAGE)
    pages.map(ptr, PAGE, 3)
    gpu.fill(ptr, 1, 3 * PAGE, gpu.stream())
    gpu.sync()
    assert gpu.used == 3 * PAGE
    pages.unmap(ptr + PAGE, PAGE)
    assert gpu.used == 2 * PAGE
    pages.map(ptr + PAGE, PAGE, 1)
    pages.unmap(ptr, 3 * PAGE)
    pages.unreserve(ptr, 8 * PAGE)

    assert gpu.used == 0
    assert gpu.reserved == set()


def test_map_beyond_the_device_memory_maps_nothing(gpu: FailingGpu) -> None:
    pages = GpuPages(gpu)
    ptr = pages.reserve(128 * MIB)
    with pytest.raises(CudaError) as caught:
        pages.map(ptr, PAGE, 33)

    assert caught.value.code == 2
    assert gpu.used == 0
    assert "map" not in gpu.calls


@pytest.mark.parametrize("name", ["create", "map", "release"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_failed_map_leaves_nothing_mapped(gpu: FailingGpu, name: str, nth: int) -> None:
    pages = GpuPages(gpu)
    ptr = pages.reserve(8 * PAGE)
    gpu.fail(name, nth)
    with suppress(CudaError):
        pages.map(ptr, PAGE, 3)
    assert gpu.failed
    if name == "release":  # the release is repeated later, and the pages are usable until then
        pages.unmap(ptr, 3 * PAGE)

    assert gpu.used == 0
    pages.map(ptr, PAGE, 3)
    pages.unmap(ptr, 3 * PAGE)
    pages.unreserve(ptr, 8 * PAGE)
    assert gpu.used == 0


def test_sync_of_a_destroyed_stream_synchronizes_the_device(gpu: FailingGpu) -> None:
    pages, stream = GpuPages(gpu), gpu.stream()
    pages.sync_stream(stream)
    gpu.destroy_stream(stream)
    pages.sync_stream(stream)

    assert gpu.calls[-1] == "sync"


def test_other_sync_errors_are_raised(gpu: FailingGpu) -> None:
    gpu.fail("sync_stream", 1)
    with pytest.raises(CudaError, match="requested by the test"):
        GpuPages(gpu).sync_stream(0)


def program(allocator: DeviceCachingAllocator, streams: list[int]) -> None:
    """Map, unmap and remap pages, run out of memory, and continue after failures."""
    live: dict[str, int] = {}

    def do(name: str, size: int = 0, stream: int = 0) -> None:
        with suppress(CudaError):
            if size:
                live[name] = allocator.alloc(size, streams[stream])
            elif name in live:
                allocator.free(live.pop(name))
            else:
                allocator.empty_cache()
        invariants.check(allocator)

    do("a", 700)
    do("b", 20 * MIB)
    do("c", 15 * MIB)
    do("b")
    do("empty")
    do("d", 9 * MIB, 1)
    do("c")
    do("e", 24 * MIB)
    do("f", 30 * MIB, 1)
    do("d")
    do("e")
    do("g", 90 * MIB)
    for name in "abcdefg":
        do(name)


EXPANDING = Settings(expandable_segments=True)


def test_failed_page_calls_leak_nothing() -> None:
    counted = FailingGpu(64 * MIB)
    program(DeviceCachingAllocator(GpuUpstream(counted), EXPANDING), [0, counted.stream()])
    counted.close()
    failed_calls: set[str] = set()
    for fail_at in range(1, len(counted.calls) + 1):
        gpu = FailingGpu(64 * MIB)
        allocator = DeviceCachingAllocator(GpuUpstream(gpu), EXPANDING)
        gpu.fail_at = fail_at
        program(allocator, [0, gpu.stream()])
        allocator.close()
        invariants.check(allocator)

        assert gpu.used == 0, counted.calls[fail_at - 1]
        assert gpu.reserved == set()
        assert allocator.statistics()["reserved_bytes.all.current"] == 0
        failed_calls |= {gpu.calls[fail_at - 1]} if gpu.failed else set()
        gpu.close()
    assert failed_calls >= {
        "reserve",
        "create",
        "map",
        "release",
        "sync_stream",
        "unmap",
        "unreserve",
    }
