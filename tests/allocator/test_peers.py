"""Peer access of other devices to an allocator's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from allocator import invariants
from allocator.device import MIB
from allocator.failing_gpu import FailingGpu

from cudakit.api.allocator import CachingAllocator
from cudakit.errors import CudaError
from cudakit.gpu.api import Ptr
from cudakit.gpu.sim import Sim
from cudakit.torch_rules.settings import Settings

CAPACITY = 256 * MIB
PAGE = 20 * MIB
EXPANDING = Settings(expandable_segments=True)


def gpu_and_allocator(settings: Settings = EXPANDING) -> tuple[FailingGpu, CachingAllocator]:
    gpu = FailingGpu(CAPACITY, "h200x2")
    return gpu, CachingAllocator(gpu, settings=settings.as_text())


def accessible_mappings(gpu: Sim) -> set[int]:
    """Return the mappings to which the other device has access."""
    return {page for page, devices in gpu.virtual.peer_access.items() if 1 in devices}


def test_peer_accesses_plain_segments() -> None:
    gpu, allocator = gpu_and_allocator(Settings())
    allocator.alloc(MIB)

    assert allocator.peer_accessible_by == ()
    allocator.enable_peer_access(1)
    assert gpu.peers.enabled_peers == {1}
    assert allocator.peer_accessible_by == (1,)


def test_peer_accesses_current_and_later_pages() -> None:
    gpu, allocator = gpu_and_allocator()
    first, other = allocator.alloc(30 * MIB), allocator.alloc(PAGE, gpu.stream())
    assert accessible_mappings(gpu) == set()

    allocator.enable_peer_access(1)
    assert accessible_mappings(gpu) == {first, first + PAGE, other}
    later_block = allocator.alloc(40 * MIB)
    assert accessible_mappings(gpu) == set(gpu.virtual.mapped_memory)
    assert gpu.has_access(Ptr(later_block + 39 * MIB), 1)


def test_peer_accesses_remapped_pages() -> None:
    gpu, allocator = gpu_and_allocator()
    allocator.enable_peer_access(1)
    block = allocator.alloc(PAGE)
    allocator.free(block)
    allocator.empty_cache()
    assert accessible_mappings(gpu) == set()

    assert allocator.alloc(PAGE) in accessible_mappings(gpu)
    invariants.check(allocator)


def test_peer_accesses_segments_that_become_expandable_later() -> None:
    gpu, allocator = gpu_and_allocator(Settings())
    allocator.enable_peer_access(1)
    allocator.configure(EXPANDING)

    allocator.alloc(PAGE)
    assert accessible_mappings(gpu) == set(gpu.virtual.mapped_memory) != set()


def test_repeated_enable_peer_access_calls_no_driver() -> None:
    gpu, allocator = gpu_and_allocator()
    allocator.alloc(PAGE)
    allocator.enable_peer_access(1)
    begin = len(gpu.calls)

    allocator.enable_peer_access(1)
    assert gpu.calls[begin:] == []
    assert allocator.peer_accessible_by == (1,)


@pytest.mark.parametrize("device", [0, 7])
def test_enable_peer_access_refuses_the_own_and_missing_devices(device: int) -> None:
    _, allocator = gpu_and_allocator()

    with pytest.raises(CudaError, match="INVALID_DEVICE"):
        allocator.enable_peer_access(device)
    assert allocator.peer_accessible_by == ()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_failed_enable_peer_access_revokes_granted_access(nth: int) -> None:
    gpu, allocator = gpu_and_allocator()
    for _ in range(3):
        allocator.alloc(PAGE, gpu.stream())
    gpu.fail("set_access", nth)

    with pytest.raises(CudaError, match="requested by the test"):
        allocator.enable_peer_access(1)
    assert accessible_mappings(gpu) == set()
    assert allocator.peer_accessible_by == ()
    allocator.alloc(PAGE)
    assert accessible_mappings(gpu) == set()
    allocator.enable_peer_access(1)
    assert accessible_mappings(gpu) == set(gpu.virtual.mapped_memory)


def test_refused_peer_accesses_no_page() -> None:
    gpu, allocator = gpu_and_allocator()
    allocator.alloc(PAGE)
    gpu.fail("enable_peer", 1)

    with pytest.raises(CudaError, match="requested by the test"):
        allocator.enable_peer_access(1)
    assert accessible_mappings(gpu) == set()


def test_pages_are_not_mapped_if_peer_access_fails() -> None:
    gpu, allocator = gpu_and_allocator()
    allocator.enable_peer_access(1)
    gpu.fail("set_access", 1)

    with pytest.raises(CudaError, match="requested by the test"):
        allocator.alloc(PAGE)
    assert (gpu.used, gpu.virtual.mapped_memory) == (0, {})
    invariants.check(allocator)
    block = allocator.alloc(PAGE)
    assert gpu.has_access(Ptr(block), 1)


def test_unlinked_devices_raise_a_clear_error() -> None:
    gpu = Sim("h200x2")
    gpu.context.cuda_view = replace(gpu.context.cuda_view, peer_access=())

    with pytest.raises(CudaError, match=r"PEER_ACCESS_UNSUPPORTED.*from device 1") as caught:
        CachingAllocator(gpu, settings="").enable_peer_access(1)
    assert "copy between the devices" in caught.value.hint
