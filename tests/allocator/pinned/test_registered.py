"""Pinned memory that the host allocated and the driver registered."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from allocator.device import MIB

from cudakit.allocator.pinned import CachingHostAllocator
from cudakit.allocator.upstream import GpuHostUpstream
from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, Gpu, Ptr
from cudakit.gpu.open import open_gpu
from cudakit.gpu.sim import Sim
from cudakit.torch_rules.settings import Settings

REGISTERED = Settings(pinned_use_cuda_host_register=True, pinned_num_register_threads=4)


class HostGpu(Sim):
    """A simulated GPU that counts calls for host memory. Tests determine which call fails."""

    def __init__(self) -> None:
        super().__init__(capacity_bytes=MIB)
        self.calls: list[str] = []
        self.fail_at = 0
        self.code = 999
        self.held: dict[int, bool] = {}  # Whether each allocation is registered, by address.
        self.threads: set[int] = set()

    def host_malloc(self, size_bytes: int, *, pinned: bool = True) -> Ptr:
        self._count("host_malloc")
        ptr = super().host_malloc(size_bytes, pinned=pinned)
        self.held[ptr] = False
        return ptr

    def host_free(self, ptr: Ptr) -> None:
        self._count("host_free")
        super().host_free(ptr)
        del self.held[ptr]

    def host_register(self, ptr: Ptr, *, thread_count: int = 1) -> None:
        self._count("host_register")
        super().host_register(ptr, thread_count=thread_count)
        self.held[ptr] = True
        self.threads.add(thread_count)

    def host_unregister(self, ptr: Ptr) -> None:
        self._count("host_unregister")
        super().host_unregister(ptr)
        self.held[ptr] = False

    def _count(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) == self.fail_at:
            raise CudaError(self.code, "CUDA_ERROR", "requested by the test")


def test_registration_uses_the_configured_number_of_threads() -> None:
    gpu = HostGpu()
    pool = CachingHostAllocator(GpuHostUpstream(gpu), REGISTERED)
    ptr = pool.alloc(3 * MIB)
    assert gpu.held == {ptr: True}
    assert gpu.threads == {4}
    pool.free(ptr)
    assert pool.alloc(3 * MIB) == ptr, "what is cached stays registered"
    pool.free(ptr)
    pool.empty_cache()

    assert gpu.held == {}
    assert gpu.calls == ["host_malloc", "host_register", "host_unregister", "host_free"]
    assert pool.statistics()["num_host_free"] == 1


def test_memory_is_freed_the_way_it_was_allocated_after_a_change_of_settings() -> None:
    gpu = HostGpu()
    pool = CachingHostAllocator(GpuHostUpstream(gpu), REGISTERED)
    registered = pool.alloc(MIB)
    pool.configure(replace(REGISTERED, pinned_use_cuda_host_register=False))
    allocated_block = pool.alloc(MIB)
    assert gpu.held == {registered: True, allocated_block: False}
    pool.configure(REGISTERED)
    for ptr in (registered, allocated_block):
        pool.free(ptr)
    pool.empty_cache()

    assert gpu.held == {}
    assert gpu.calls.count("host_unregister") == 1


def test_reserve_is_registered() -> None:
    gpu = HostGpu()
    settings = replace(REGISTERED, pinned_reserve_segment_size_bytes=4 * MIB)
    pool = CachingHostAllocator(GpuHostUpstream(gpu), settings)
    pool.free(pool.alloc(MIB))
    assert list(gpu.held.values()) == [True]
    pool.close()
    assert gpu.held == {}


@pytest.mark.parametrize("code", [2, 999])
def test_failed_registration_leaves_nothing_pinned(code: int) -> None:
    def program(gpu: HostGpu) -> CachingHostAllocator:
        pool = CachingHostAllocator(GpuHostUpstream(gpu), REGISTERED)
        live = []
        for size in (MIB, 3 * MIB, 5 * MIB):
            with suppress(CudaError):
                live.append(pool.alloc(size))
        assert len(gpu.held) == len(live)
        for ptr in live:
            pool.free(ptr)
        with suppress(CudaError):
            pool.empty_cache()
        assert len(gpu.held) == pool.statistics()["allocations.current"]
        pool.empty_cache()
        return pool

    without_failures = HostGpu()
    program(without_failures)
    assert len(without_failures.calls) == 12
    for fail_at in range(1, 13):
        gpu = HostGpu()
        gpu.fail_at, gpu.code = fail_at, code
        pool = program(gpu)
        assert gpu.held == {}
        assert pool.statistics()["allocated_bytes.current"] == 0


def copied_through(gpu: Gpu) -> None:
    pool = CachingHostAllocator(GpuHostUpstream(gpu), REGISTERED)
    host, device = pool.alloc(3 * MIB), gpu.malloc(3 * MIB)
    gpu.fill(device, 7, 3 * MIB, LEGACY)
    gpu.copy(host, device, 3 * MIB, LEGACY)
    gpu.sync()
    assert bytes(gpu.host_view(host, 3 * MIB)) == b"\7" * (3 * MIB)
    pool.free(host)
    pool.close()
    gpu.free(device)


def test_registered_memory_copies_to_and_from_a_simulated_device() -> None:
    copied_through(open_gpu("sim"))


@pytest.mark.gpu
def test_registered_memory_copies_to_and_from_a_real_device() -> None:
    copied_through(open_gpu("cuda"))
