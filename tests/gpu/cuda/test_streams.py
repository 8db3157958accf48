"""Tests a real device whose stream ids are driver handles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from cuda.bindings import driver as cu

import cudakit
from cudakit.gpu.api import LEGACY, Stream
from cudakit.gpu.cuda.device import Cuda
from cudakit.gpu.cuda.driver import check
from cudakit.units import Unavailable

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def gpu() -> Iterator[Cuda]:
    gpu = Cuda(0, foreign_streams=True)
    yield gpu
    gpu.close()


@pytest.fixture
def handle() -> Iterator[int]:
    with cudakit.device(0):
        stream = check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
        yield int(stream)
        check(cu.cuStreamDestroy(stream))


def test_foreign_stream_is_used_by_handle(gpu: Cuda, handle: int) -> None:
    stream, event = Stream(handle), gpu.event()
    ptr = gpu.malloc(MIB)

    gpu.fill(ptr, 1, MIB, stream)
    gpu.record(event, stream)
    gpu.sync_event(event)

    assert gpu.query_stream(stream)
    assert gpu.streams.external_stream(handle) == gpu.stream_address(stream) == handle
    assert gpu.streams.external_stream(0) == LEGACY


def test_stream_ids_are_handles_and_foreign_streams_are_not_destroyed(
    gpu: Cuda, handle: int
) -> None:
    stream = gpu.stream()
    gpu.sync_stream(stream)
    assert stream > 2
    gpu.destroy_stream(stream)

    for stream_form in (stream, Stream(handle)):
        with pytest.raises(cudakit.CudaError, match="belongs to another library, or was destroyed"):
            gpu.destroy_stream(stream_form)


def test_processes_are_listed_or_unavailable(gpu: Cuda) -> None:
    processes = gpu.processes()

    assert processes or isinstance(processes, Unavailable)


MODES = [
    cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,
    cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_allocation_works_during_foreign_capture(handle: int, mode: object, settings: str) -> None:
    gc.collect()  # a garbage-collected allocator would synchronize the context and invalidate the capture
    allocator, size = cudakit.CachingAllocator(0, settings=settings), 30 * MIB
    with cudakit.device(0), allocator.capture(stream=handle) as memory:
        check(cu.cuStreamBeginCapture(handle, mode))
        ptr = allocator.alloc(size, handle)
        check(cu.cuMemsetD8Async(ptr, 1, size, handle))
        allocator.pinned.alloc(MIB)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(allocator.alloc, 2 * size).result()
        graph = check(cu.cuStreamEndCapture(handle))
    executable = check(cu.cuGraphInstantiate(graph, 0))
    check(cu.cuGraphLaunch(executable, handle))
    check(cu.cuStreamSynchronize(handle))

    (usage,) = allocator.private_pools()
    assert (usage.id, usage.allocated_bytes) == (memory.id, size)
    check(cu.cuGraphExecDestroy(executable))
    check(cu.cuGraphDestroy(graph))


def test_memory_is_reused_after_stream_use(handle: int) -> None:
    allocator = cudakit.CachingAllocator(0)
    ptr = allocator.alloc(256 * MIB)
    with cudakit.device(0):
        for value in range(100):
            check(cu.cuMemsetD8Async(ptr, value, 256 * MIB, handle))
        allocator.record_use(ptr, handle)
        allocator.free(ptr)

        assert allocator.statistics()["active.all.current"] == 1
        check(cu.cuStreamSynchronize(handle))
    assert allocator.alloc(256 * MIB) == ptr


def test_garbage_collected_allocator_frees_all_memory() -> None:
    free_bytes_before = cudakit.mem_get_info(0).free_bytes
    allocator = cudakit.CachingAllocator(0)
    allocator.alloc(512 * MIB)
    assert cudakit.mem_get_info(0).free_bytes <= free_bytes_before - 512 * MIB

    del allocator
    gc.collect()

    assert cudakit.mem_get_info(0).free_bytes > free_bytes_before - 64 * MIB
