"""Tests peer memory on a simulated machine."""

from __future__ import annotations

import pytest
from gpu.kernels import SimBench

from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, Ptr, Stream
from cudakit.gpu.sim import Sim
from cudakit.trace.events import Alloc, Copy, Event, Free
from cudakit.trace.kinds import Direction, HostMemory

SIZE = 1 << 20


def copies_ns(gpu: Sim, *copies: tuple[Ptr, Ptr, Stream]) -> int:
    """Return the duration of concurrently enqueued copies in nanoseconds."""
    gpu.sync()
    begin_ns = gpu.clock.now_ns
    for destination, source, stream in copies:
        gpu.copy(destination, source, SIZE, stream)
    gpu.sync()
    return gpu.clock.now_ns - begin_ns


def test_peer_copy_duration_follows_nvlinks() -> None:
    gpu = Sim("h200x2")
    device_memory, peer_memory, stream = gpu.malloc(SIZE), gpu.peer_malloc(1, SIZE), gpu.stream()
    dispatch_ns = gpu.costs.dispatch_ns + 2 * gpu.costs.call_ns

    assert gpu.peers.nvlinks(1) == 18
    duration_ns = copies_ns(gpu, (peer_memory, device_memory, stream))
    assert duration_ns == pytest.approx(
        SIZE / 18 / 20e9 * 1e9 + gpu.costs.minimum_ns, abs=2 * dispatch_ns
    )


def test_peer_copies_of_two_directions_overlap() -> None:
    gpu = Sim("h200x2")
    device_memory, second_memory = gpu.malloc(SIZE), gpu.malloc(SIZE)
    peer_memory, peer_memory_2 = gpu.peer_malloc(1, SIZE), gpu.peer_malloc(1, SIZE)
    first, second = gpu.stream(blocking=False), gpu.stream(blocking=False)
    single_copy_ns = copies_ns(gpu, (peer_memory, device_memory, first))
    concurrent_ns = copies_ns(
        gpu, (peer_memory, device_memory, first), (second_memory, peer_memory_2, second)
    )
    same_direction_ns = copies_ns(
        gpu, (peer_memory, device_memory, first), (peer_memory_2, second_memory, second)
    )

    assert concurrent_ns - single_copy_ns <= gpu.costs.call_ns
    assert same_direction_ns - single_copy_ns > SIZE / 18 / 20


def test_peer_allocation_is_traced_on_peer() -> None:
    trace: list[Event] = []
    gpu = Sim("h200x2", sink=trace.append)
    device_memory = gpu.malloc(SIZE)
    gpu.sync()
    begin = len(trace)
    peer_memory = gpu.peer_malloc(1, SIZE)
    gpu.copy(peer_memory, device_memory, SIZE, LEGACY)
    gpu.peer_free(1, peer_memory)

    alloc, copy, free = trace[begin:]
    assert (alloc.body, alloc.device, alloc.context) == (Alloc(peer_memory, SIZE), 1, 2)
    assert (free.body, free.device) == (Free(peer_memory, SIZE), 1)
    assert copy.device == 0
    assert isinstance(copy.body, Copy)
    assert (copy.body.direction, copy.body.host) == (
        Direction.DEVICE_TO_DEVICE,
        HostMemory.NONE,
    )


def test_kernels_access_peer_memory_if_machine_allows() -> None:
    bench = SimBench(model="h200x2")
    peer_memory, device_memory = bench.gpu.peer_malloc(1, 4), bench.ints()
    bench.store(peer_memory, 5)
    bench.gpu.copy(device_memory, peer_memory, 4, LEGACY)

    assert bench.read(device_memory) == [5]


def test_peer_memory_size_is_from_facts() -> None:
    gpu = Sim("h200x2")
    half = 80 << 30
    ptr = gpu.peer_malloc(1, half)
    with pytest.raises(
        CudaError, match=r"OUT_OF_MEMORY: .*80.0 GiB requested, .* free on device 1"
    ):
        gpu.peer_malloc(1, half)
    gpu.peer_free(1, ptr)

    gpu.peer_free(1, gpu.peer_malloc(1, half))
