from __future__ import annotations

import pytest
from allocator.device import MIB

from cudakit.allocator.pinned import CachingHostAllocator
from cudakit.allocator.upstream import GpuHostUpstream
from cudakit.gpu.api import Gpu
from cudakit.gpu.open import open_gpu


def use_it(gpu: Gpu) -> None:
    pool = CachingHostAllocator(GpuHostUpstream(gpu))
    stream, device = gpu.stream(), gpu.malloc(MIB)
    first = pool.alloc(MIB)
    gpu.host_view(first, MIB)[:4] = b"abcd"
    gpu.copy(device, first, MIB, stream)
    pool.record_use(first, stream)
    pool.free(first)
    gpu.sync_stream(stream)
    second_block = pool.alloc(MIB)
    assert second_block == first
    gpu.host_view(second_block, MIB)[:4] = b"...."
    gpu.copy(second_block, device, MIB, stream)
    gpu.sync_stream(stream)
    assert bytes(gpu.host_view(second_block, MIB)[:4]) == b"abcd"
    pool.free(second_block)
    pool.close()
    assert pool.statistics()["num_host_free"] == 1


def test_pinned_memory_copies_to_and_from_a_simulated_device() -> None:
    gpu = open_gpu("sim")
    use_it(gpu)
    gpu.close()


@pytest.mark.gpu
def test_pinned_memory_copies_to_and_from_a_real_device() -> None:
    gpu = open_gpu("cuda")
    use_it(gpu)
    gpu.close()
