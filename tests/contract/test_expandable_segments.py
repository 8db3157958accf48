"""Tests expandable segments on every device: growth, content and release of memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract.workbench import Workbench

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory
from cudakit.allocator.upstream import GpuUpstream
from cudakit.gpu.api import LEGACY, Gpu, Ptr
from cudakit.torch_rules.settings import Settings

MIB = 1 << 20
PAGE = 20 * MIB


@pytest.fixture
def allocator(gpu: Gpu) -> Iterator[DeviceCachingAllocator]:
    allocator = DeviceCachingAllocator(GpuUpstream(gpu), Settings(expandable_segments=True))
    yield allocator
    allocator.close()


def reserved(allocator: DeviceCachingAllocator) -> int:
    return allocator.statistics()["reserved_bytes.all.current"]


def test_growing_segment_keeps_content(bench: Workbench, allocator: DeviceCachingAllocator) -> None:
    low = allocator.alloc(15 * MIB)
    bench.gpu.fill(low, 1, 15 * MIB, LEGACY)
    high = allocator.alloc(30 * MIB)
    bench.gpu.fill(high, 2, 30 * MIB, LEGACY)

    assert high == low + 15 * MIB
    assert bench.read_bytes(Ptr(high - 2), 4) == b"\1\1\2\2"
    assert bench.read_bytes(Ptr(low + 3 * PAGE - 15 * MIB - 2), 2) == b"\2\2"
    assert reserved(allocator) == 3 * PAGE


def test_released_pages_leave_gap_that_is_mapped_again(
    bench: Workbench, allocator: DeviceCachingAllocator
) -> None:
    gpu = bench.gpu
    ptrs = [allocator.alloc(PAGE) for _ in range(3)]
    gpu.fill(ptrs[0], 1, PAGE, LEGACY)
    gpu.fill(ptrs[2], 3, PAGE, LEGACY)
    gpu.sync()
    free_bytes_before = gpu.memory_info().free_bytes
    allocator.free(ptrs[1])
    allocator.empty_cache()
    assert gpu.memory_info().free_bytes >= free_bytes_before + PAGE
    assert allocator.alloc(PAGE) == ptrs[1]
    gpu.fill(ptrs[1], 2, PAGE, LEGACY)

    assert bench.read_bytes(Ptr(ptrs[1] - 1), 2) == b"\1\2"
    assert bench.read_bytes(Ptr(ptrs[2] - 1), 2) == b"\2\3"


def test_memory_in_use_is_not_released_before_stream_completes(
    bench: Workbench, allocator: DeviceCachingAllocator
) -> None:
    stream = bench.gpu.stream(blocking=False)
    ptr = allocator.alloc(PAGE, stream)
    bench.spin(stream)
    bench.gpu.fill(ptr, 1, PAGE, stream)
    allocator.free(ptr)
    allocator.empty_cache()

    assert bench.gpu.query_stream(stream)
    assert reserved(allocator) == 0
    bench.gpu.sync()


def test_failed_oversized_allocation_leaks_nothing(
    gpu: Gpu, allocator: DeviceCachingAllocator
) -> None:
    memory_before = gpu.memory_info()
    with pytest.raises(OutOfMemory):
        allocator.alloc(memory_before.total_bytes + memory_before.total_bytes // 16)

    assert reserved(allocator) == 0
    assert gpu.memory_info().free_bytes >= memory_before.free_bytes - PAGE
    assert allocator.alloc(700)
