"""Tests MemPools of PyTorch on a real device, with segments that cudakit's C functions allocate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from arrays.plugs.viewers import opened_by_all

import cudakit
from cudakit.arrays.plugs.libraries import UPSTREAMS

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def segments_of(torch: Any, pool: Any) -> list[dict[str, Any]]:
    segments = torch.cuda.memory._snapshot()["segments"]
    return [segment for segment in segments if tuple(segment["segment_pool_id"]) == pool.id]


@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_tensors_of_a_pool_compute_correctly_and_are_in_torchs_snapshot(
    torch: Any, upstream: str, tmp_path: Path
) -> None:
    torch.cuda.memory._record_memory_history()
    pool = cudakit.torch_pool(upstream)

    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.full((MIB,), i, dtype=torch.float32, device="cuda") for i in range(8)]
    outside_tensor = torch.ones(MIB, device="cuda")

    assert [float((tensor + outside_tensor).mean()) for tensor in tensors] == list(range(1, 9))
    segments = segments_of(torch, pool)
    assert sum(segment["allocated_size"] for segment in segments) == 32 * MIB
    opened = opened_by_all(torch.cuda.memory._snapshot(), tmp_path)
    assert any("test_real_torch" in frame.filename for row in opened.holders for frame in row.stack)
    torch.cuda.memory._record_memory_history(enabled=None)

    addresses = [segment["address"] for segment in segments]
    del tensors
    del pool
    torch.cuda.empty_cache()
    remaining_addresses = {
        segment["address"] for segment in torch.cuda.memory._snapshot()["segments"]
    }
    assert remaining_addresses.isdisjoint(addresses)


def test_managed_memory_is_readable_by_the_host(torch: Any) -> None:
    import ctypes

    pool = cudakit.torch_pool("managed")
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.full((1000,), 7, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()

    assert list((ctypes.c_int32 * 1000).from_address(tensor.data_ptr())) == [7] * 1000
    del tensor


def test_pool_beyond_the_device_memory_raises_out_of_memory(torch: Any) -> None:
    pool = cudakit.torch_pool("driver")

    with torch.cuda.use_mem_pool(pool), pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 45, dtype=torch.int8, device="cuda")


def test_no_split_pool_returns_undivided_segments(torch: Any) -> None:
    try:
        pool = cudakit.torch_pool("driver", no_split=True)
    except cudakit.UsageError as refused:
        pytest.skip(str(refused))
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.empty(4 * MIB, dtype=torch.int8, device="cuda") for _ in range(2)]

    assert len(segments_of(torch, pool)) == len(tensors)
