"""Tests peer memory on a simulated machine with two devices, and on the real machine if it has two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from contract.workbench import refused

from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, Gpu, Ptr
from cudakit.gpu.driver_errors import Status
from cudakit.gpu.open import open_gpu

MIB = 1 << 20
PEER = 1


@pytest.fixture(params=["sim:h200x2", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    with closing(open_gpu(request.param)) as gpu:
        try:
            gpu.can_access_peer(PEER)
        except CudaError:
            pytest.skip("there is one GPU")
        yield gpu


def test_data_copied_to_peer_and_back_is_unchanged(gpu: Gpu) -> None:
    size, stream = 3 * MIB + 5, gpu.stream()
    values = np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8).tobytes()
    peer_memory, peer_memory_2 = (gpu.peer_malloc(PEER, size) for _ in range(2))
    device_memory, host = gpu.malloc(size), gpu.host_malloc(size)
    gpu.host_view(host, size)[:] = values

    gpu.copy(device_memory, host, size, stream)
    gpu.copy(peer_memory, device_memory, size, stream)
    gpu.fill(device_memory, 0, size, stream)
    gpu.copy(peer_memory_2, peer_memory, size, stream)
    gpu.copy(device_memory, peer_memory_2, size, stream)
    gpu.sync_stream(stream)
    gpu.host_view(host, size)[:] = bytes(size)
    gpu.copy(host, device_memory, size, stream)
    gpu.sync_stream(stream)

    assert bytes(gpu.host_view(host, size)) == values
    gpu.peer_free(PEER, peer_memory)


def test_peer_allocation_uses_memory_of_peer(gpu: Gpu) -> None:
    gpu.peer_free(PEER, gpu.peer_malloc(PEER, 4))  # lets the driver make its one-time allocations
    own_free_bytes = gpu.memory_info().free_bytes
    with closing(open_gpu("cuda" if not gpu.simulated else "sim:h200x2", PEER)) as peer_gpu:
        peer_free_bytes = peer_gpu.memory_info().free_bytes
        ptr = gpu.peer_malloc(PEER, 256 * MIB)
        free_bytes_while_allocated = peer_gpu.memory_info().free_bytes
        gpu.peer_free(PEER, ptr)

        # Simulated devices do not share state.
        assert gpu.simulated or peer_free_bytes - free_bytes_while_allocated >= 256 * MIB
        assert peer_gpu.memory_info().free_bytes == peer_free_bytes
    assert gpu.memory_info().free_bytes == own_free_bytes


def test_peer_out_of_memory_reports_sizes(gpu: Gpu) -> None:
    with refused(Status.OUT_OF_MEMORY) as caught:
        gpu.peer_malloc(PEER, 1 << 50)

    assert "1.00 PiB requested" in caught.value.message
    gpu.peer_free(PEER, gpu.peer_malloc(PEER, 4))


def test_invalid_peer_free_is_rejected(gpu: Gpu) -> None:
    ptr, own_ptr = gpu.peer_malloc(PEER, 512), gpu.malloc(512)

    with refused(Status.INVALID_VALUE):
        gpu.peer_free(PEER, own_ptr)
    with refused(Status.INVALID_VALUE):
        gpu.free(ptr)
    with refused(Status.INVALID_VALUE):
        gpu.peer_free(0, ptr)
    gpu.peer_free(PEER, ptr)
    with refused(Status.INVALID_VALUE):
        gpu.peer_free(PEER, ptr)


def test_device_is_no_peer_of_itself_and_missing_peer_has_no_memory(gpu: Gpu) -> None:
    for ordinal in (0, 1000):
        with refused(Status.INVALID_DEVICE):
            gpu.peer_malloc(ordinal, 4)
    for size in (0, -1):
        with refused(Status.INVALID_VALUE):
            gpu.peer_malloc(PEER, size)


def test_peer_memory_leaves_default_stream_usable(gpu: Gpu) -> None:
    peer_memory, device_memory = gpu.peer_malloc(PEER, 64), gpu.malloc(64)
    gpu.fill(device_memory, 7, 64, LEGACY)
    gpu.copy(peer_memory, device_memory, 64, LEGACY)
    gpu.fill(device_memory, 0, 64, LEGACY)
    gpu.copy(device_memory, peer_memory, 64, LEGACY)
    host = gpu.host_malloc(64)
    gpu.copy(host, device_memory, 64, LEGACY)
    gpu.sync()

    assert bytes(gpu.host_view(host, 64)) == b"\7" * 64


def test_kernels_of_enabled_peer_use_memory_of_this_device(gpu: Gpu) -> None:
    gpu.enable_peer(PEER)
    gpu.enable_peer(PEER)

    with refused(Status.INVALID_DEVICE):
        gpu.enable_peer(0)
    with refused(Status.INVALID_DEVICE):
        gpu.enable_peer(1000)


def test_peer_access_is_set_per_mapping(gpu: Gpu) -> None:
    page = gpu.granularity()
    ptr = gpu.reserve(3 * page)
    for number in range(3):
        gpu.map(Ptr(ptr + number * page), gpu.create(page), page)
    gpu.enable_peer(PEER)
    pages = [Ptr(ptr + number * page) for number in range(3)]
    assert [gpu.has_access(page, PEER) for page in pages] == [False, False, False]

    gpu.set_access(ptr, 2 * page, PEER)
    assert [gpu.has_access(page, PEER) for page in pages] == [True, True, False]
    assert all(gpu.has_access(page, 0) for page in pages)
    gpu.set_access(ptr, page, PEER, allowed=False)
    assert [gpu.has_access(page, PEER) for page in pages] == [False, True, False]
    gpu.unmap(ptr, 3 * page)
    gpu.map(pages[1], gpu.create(page), page)
    assert not gpu.has_access(pages[1], PEER)


def test_unmapped_address_has_no_access(gpu: Gpu) -> None:
    page = gpu.granularity()
    ptr = gpu.reserve(page)

    with refused(Status.INVALID_VALUE):
        gpu.set_access(ptr, page, PEER)
    with refused(Status.INVALID_VALUE):
        gpu.has_access(ptr, PEER)
