"""Tests the plug for CuPy on a real device."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays.plugs.viewers import opened_by_all

import cudakit

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


def test_cupy_on_several_streams_computes_correctly_and_is_counted(
    cupy: Any, tmp_path: Path
) -> None:
    allocator = cudakit.CachingAllocator(0)
    allocator.record_history()
    host = np.random.default_rng(0).random((4, 256, 256), dtype="f8")
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in host]
    sums = []

    with cupy.cuda.using_allocator(cudakit.cupy_allocator(allocator)):
        for _ in range(20):
            for matrix, stream in zip(host, streams, strict=True):
                with stream:
                    on_device = cupy.asarray(matrix)
                    sums.append((on_device @ on_device + 1).sum())
        for stream in streams:
            stream.synchronize()

    expected = np.tile((host @ host + 1).sum(axis=(1, 2)), 20)
    assert np.allclose([float(value) for value in sums], expected)
    statistics = allocator.statistics()
    assert statistics["allocation.all.allocated"] >= 4 * len(sums)
    assert statistics["allocation.all.freed"] >= 3 * len(sums)
    assert statistics["num_device_alloc"] < 100
    snapshot = allocator.snapshot()
    segment_streams = {segment["stream"] for segment in snapshot["segments"]}
    assert {stream.ptr for stream in streams} <= segment_streams
    opened = opened_by_all(snapshot, tmp_path)
    assert any("test_real_cupy" in frame.filename for row in opened.holders for frame in row.stack)


def test_graph_computes_in_private_memory(cupy: Any) -> None:
    allocator = cudakit.CachingAllocator(0, settings="graph_capture_record_stream_reuse:True")
    stream = cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.using_allocator(cudakit.cupy_allocator(allocator)), stream:
        numbers = cupy.arange(MIB)
        numbers * 2 + 1  # compiles the kernel before the capture
        with allocator.capture(stream=stream.ptr) as memory:
            stream.begin_capture()
            result = numbers * 2 + 1
            graph = stream.end_capture()
        address = result.data.ptr
        numbers += 5
        graph.launch(stream)
        arrays = [cupy.zeros(MIB) for _ in range(8)]
        stream.synchronize()

        assert int(result[3]) == (3 + 5) * 2 + 1
        assert address not in {array.data.ptr for array in arrays}
        (usage,) = allocator.private_pools()
        assert (usage.id, usage.uses) == (memory.id, 1)
        del graph, result
        memory.close()
        allocator.empty_cache()
        assert allocator.private_pools() == ()


def test_deleted_array_memory_is_reused(cupy: Any) -> None:
    allocator = cudakit.CachingAllocator(0)
    with cupy.cuda.using_allocator(cudakit.cupy_allocator(allocator)):
        first = cupy.empty(3 * MIB, dtype="u1")
        address = first.data.ptr
        del first
        gc.collect()

        assert cupy.empty(3 * MIB, dtype="u1").data.ptr == address
        assert cupy.empty(0).size == 0
    assert allocator.statistics()["active.all.current"] == 0


def test_out_of_memory_shows_the_device_memory(cupy: Any) -> None:
    allocator = cudakit.CachingAllocator(0, settings="per_process_memory_fraction:0.01")
    with (
        cupy.cuda.using_allocator(cudakit.cupy_allocator(allocator)),
        pytest.raises(cudakit.CudaError, match="Tried to allocate"),
    ):
        cupy.empty(allocator.memory_info().total_bytes // 50, dtype="u1")


def test_each_device_uses_its_allocator(cupy: Any) -> None:
    if cudakit.device_count() < 2:
        pytest.skip("needs two devices")
    first, second = cudakit.CachingAllocator(0), cudakit.CachingAllocator(1)
    malloc = cudakit.cupy_allocator(first, second)
    with cupy.cuda.using_allocator(malloc), cupy.cuda.Device(1):
        array = cupy.arange(1000)
        assert int(array.sum()) == 499500
        assert second.statistics()["allocation.all.allocated"] > 0
        assert first.statistics()["allocation.all.allocated"] == 0
        del array
