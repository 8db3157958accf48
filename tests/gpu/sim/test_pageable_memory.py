"""Tests copies of pageable host memory on the simulated device."""

from __future__ import annotations

import pytest
from gpu.kernels import SimBench

from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, Ptr
from cudakit.trace.events import Copy, Event
from cudakit.trace.kinds import Direction, HostMemory

LARGE, SMALL = 1 << 20, 4096
LONG_NS = 1_000_000_000


@pytest.mark.parametrize("seed", range(5))
def test_pageable_copy_returns_when_done_or_staged(seed: int) -> None:
    bench = SimBench(seed=seed)
    gpu, stream = bench.gpu, bench.gpu.stream()
    ptr, host = gpu.malloc(LARGE), gpu.host_malloc(LARGE, pinned=False)
    gpu.host_view(host, LARGE)[:] = b"\1" * LARGE
    for size in (SMALL, LARGE):
        gpu.copy(ptr, host, size, stream)
        gpu.host_view(host, size)[:] = b"\2" * size
        gpu.copy(host, ptr, size, stream)

        assert bytes(gpu.host_view(host, size)) == b"\1" * size


def test_pageable_copy_waits_for_stream_unless_staged() -> None:
    bench = SimBench()
    gpu, stream = bench.gpu, bench.gpu.stream()
    ptr, host = gpu.malloc(LARGE), gpu.host_malloc(LARGE, pinned=False)
    waited = []
    for destination, source, size in ((ptr, host, SMALL), (ptr, host, LARGE), (host, ptr, SMALL)):
        gpu.sync()
        bench.spin(LONG_NS, stream)
        begin_ns = gpu.clock.now_ns
        gpu.copy(destination, source, size, stream)
        waited.append(gpu.clock.now_ns - begin_ns >= LONG_NS)

    assert waited == [False, True, True]


def test_pageable_copy_is_traced_and_pageable_allocation_is_not() -> None:
    trace: list[Event] = []
    bench = SimBench(sink=trace.append)
    gpu = bench.gpu
    ptr = gpu.malloc(SMALL)
    gpu.sync()
    begin = len(trace)
    host, other_host = (gpu.host_malloc(SMALL, pinned=False) for _ in range(2))
    gpu.copy(ptr, host, SMALL, LEGACY)
    gpu.copy(host, ptr, SMALL, LEGACY)
    gpu.copy(other_host, host, SMALL, LEGACY)
    gpu.host_free(host)

    facts = [event.body for event in trace[begin:]]
    assert [(fact.direction, fact.host) for fact in facts if isinstance(fact, Copy)] == [
        (Direction.HOST_TO_DEVICE, HostMemory.PAGEABLE),
        (Direction.DEVICE_TO_HOST, HostMemory.PAGEABLE),
        (Direction.HOST_TO_HOST, HostMemory.PAGEABLE),
    ]
    assert len(facts) == 3


def test_kernels_and_fills_cannot_access_pageable_memory() -> None:
    bench = SimBench()
    host = bench.gpu.host_malloc(SMALL, pinned=False)
    with pytest.raises(CudaError, match=r"INVALID_VALUE: .*pageable"):
        bench.gpu.fill(host, 0, SMALL, LEGACY)
    bench.store(host, 1)

    with pytest.raises(CudaError, match=r"ILLEGAL_ADDRESS: .*pageable"):
        bench.gpu.sync()


def test_pageable_copy_invalidates_capture() -> None:
    gpu = SimBench().gpu
    ptr, host = gpu.malloc(SMALL), gpu.host_malloc(SMALL, pinned=False)
    stream = gpu.stream()
    gpu.capture_begin(stream)

    with pytest.raises(CudaError, match="STREAM_CAPTURE_UNSUPPORTED"):
        gpu.copy(ptr, host, SMALL, stream)
    with pytest.raises(CudaError, match="STREAM_CAPTURE_INVALIDATED"):
        gpu.capture_end(stream)


def test_pageable_copy_beyond_end_is_refused() -> None:
    gpu = SimBench().gpu
    ptr, host = gpu.malloc(2 * SMALL), gpu.host_malloc(SMALL, pinned=False)

    with pytest.raises(CudaError, match="INVALID_VALUE"):
        gpu.copy(ptr, host, SMALL + 1, LEGACY)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        gpu.copy(Ptr(host + 1), ptr, SMALL, LEGACY)
