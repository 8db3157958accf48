""""""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from gpu.kernels import SimBench
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, Backing, Ptr, Stream
from cudakit.gpu.sim import Sim
from cudakit.gpu.sim.memory import round_up
from cudakit.trace.events import Alloc, Copy, Event, Free
from cudakit.trace.kinds import Direction, HostMemory

KIB, MIB = 1 << 10, 1 << 20
CAPACITY = 16 * MIB
PAGE = 2 * MIB
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


class MemoryModel(RuleBasedStateMachine):
    """Compares the free memory of a device with a simple model after each operation."""

    pointers: Bundle[Ptr] = Bundle("pointers")
    backings: Bundle[Backing] = Bundle("backings")

    def __init__(self) -> None:
        super().__init__()
        self.gpu = Sim(capacity_bytes=CAPACITY, seed=3)
        self.stream = self.gpu.stream()
        self.live: dict[Ptr, int] = {}
        self.created: dict[Backing, int] = {}

    @property
    def used_bytes(self) -> int:
        return sum(round_up(size, 512) for size in self.live.values()) + sum(self.created.values())

    @rule(target=pointers, size=st.integers(1, 5 * MIB), ordered=st.booleans())
    def malloc(self, size: int, *, ordered: bool) -> Ptr:
        if self.used_bytes + round_up(size, 512) > CAPACITY:
            with pytest.raises(CudaError, match=OUT_OF_MEMORY):
                self.gpu.malloc(size, self.stream if ordered else None)
            return Ptr(0)
        ptr = self.gpu.malloc(size, self.stream if ordered else None)
        self.live[ptr] = size
        return ptr

    @rule(ptr=consumes(pointers), ordered=st.booleans())
    def free(self, ptr: Ptr, *, ordered: bool) -> None:
        stream = self.stream if ordered else None
        if self.live.pop(ptr, None):
            self.gpu.free(ptr, stream)
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            self.gpu.free(ptr, stream)

    @rule(target=backings, pages=st.integers(1, 3))
    def create(self, pages: int) -> Backing:
        if self.used_bytes + pages * PAGE > CAPACITY:
            with pytest.raises(CudaError, match=OUT_OF_MEMORY):
                self.gpu.create(pages * PAGE)
            return Backing(0)
        backing = self.gpu.create(pages * PAGE)
        self.created[backing] = pages * PAGE
        return backing

    @rule(backing=backings, times=st.integers(1, 2))
    def map_and_unmap(self, backing: Backing, times: int) -> None:
        size = self.created.get(backing)
        if size is None:
            return
        base = self.gpu.reserve(times * size)
        for index in range(times):
            self.gpu.map(Ptr(base + index * size), backing, size)
        self.gpu.unmap(base, times * size)
        self.gpu.unreserve(base, times * size)

    @rule(backing=consumes(backings))
    def release(self, backing: Backing) -> None:
        if self.created.pop(backing, None):
            self.gpu.release(backing)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.gpu.sync()
        info = self.gpu.memory_info()
        assert info.total_bytes == CAPACITY
        assert info.free_bytes == CAPACITY - self.used_bytes

    @invariant()
    def nothing_overlaps(self) -> None:
        live_ranges = sorted(self.live.items())
        assert all(ptr + size <= next_ptr for (ptr, size), (next_ptr, _) in pairwise(live_ranges))

    def teardown(self) -> None:
        self.gpu.close()


TestMemoryModel = MemoryModel.TestCase
TestMemoryModel.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_stream_ordered_free_is_awaited_before_out_of_memory() -> None:
    gpu = Sim(capacity_bytes=MIB)
    stream = gpu.stream()
    for _ in range(20):
        gpu.free(gpu.malloc(MIB, stream), stream)


def test_device_may_have_more_memory_than_host() -> None:
    gpu = Sim("h200")
    ptr = gpu.malloc(100 << 30)
    last_page = Ptr(ptr + (100 << 30) - 4096)
    gpu.fill(last_page, 0x5A, 4096, LEGACY)
    pinned = gpu.host_malloc(1)
    gpu.copy(pinned, Ptr(last_page + 4095), 1, LEGACY)
    gpu.sync()

    assert gpu.host_view(pinned, 1)[0] == 0x5A


def test_new_memory_is_not_zero() -> None:
    bench = SimBench()

    assert bench.read(bench.gpu.malloc(4)) != [0]


@given(offset=st.integers(0, 40), rows=st.integers(1, 12), columns=st.integers(1, 7))
@settings(max_examples=30, deadline=None)
def test_kernel_accesses_range_of_several_mappings(offset: int, rows: int, columns: int) -> None:
    bench = SimBench(capacity_bytes=CAPACITY)
    base = bench.gpu.reserve(2 * PAGE)
    for page in (base, Ptr(base + PAGE)):
        bench.gpu.map(page, bench.gpu.create(PAGE), PAGE)
    bench.gpu.fill(base, 0, 2 * PAGE, LEGACY)
    table = Ptr(base + PAGE - 4 * offset)

    for value in (5, 6):
        bench.launch("column", table, np.int32(rows), np.int32(columns), np.int32(value))

    row = [6, *[0] * (columns - 1)]
    assert bench.read(table, rows * columns) == row * rows


def test_released_memory_lives_while_mapped() -> None:
    bench = SimBench()
    backing, base = bench.gpu.create(PAGE), bench.gpu.reserve(PAGE)
    bench.gpu.map(base, backing, PAGE)
    bench.gpu.release(backing)
    bench.store(base, 5)

    assert bench.read(base) == [5]


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 2 * PAGE), (4096, PAGE), (2 * PAGE, PAGE), (0, PAGE + 1), (-PAGE, PAGE)],
    ids=["more than there is", "not aligned", "not reserved", "no multiple", "before"],
)
def test_invalid_mappings_are_refused(offset: int, size: int) -> None:
    gpu = Sim()
    base = gpu.reserve(2 * PAGE)

    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        gpu.map(Ptr(base + offset), gpu.create(PAGE), size)


def test_part_of_mapping_cannot_be_unmapped() -> None:
    gpu = Sim()
    base = gpu.reserve(2 * PAGE)
    gpu.map(base, gpu.create(2 * PAGE), 2 * PAGE)

    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        gpu.unmap(base, PAGE)
    gpu.unmap(base, 2 * PAGE)


def test_only_complete_and_unmapped_reservation_is_freed() -> None:
    gpu = Sim()
    base = gpu.reserve(2 * PAGE)
    gpu.map(base, gpu.create(PAGE), PAGE)

    for size in (PAGE, 2 * PAGE):
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
            gpu.unreserve(base, size)
    gpu.unmap(base, PAGE)
    gpu.unreserve(base, 2 * PAGE)


def test_captured_allocation_is_not_supported() -> None:
    gpu = Sim()
    stream = gpu.stream()
    gpu.capture_begin(stream)

    with pytest.raises(CudaError, match=r"CUDA_ERROR_NOT_SUPPORTED: .*simulated graph"):
        gpu.malloc(4, stream)


# --- Tests copies of pageable host memory on the simulated device ----------------------------------

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


# --- Tests peer memory on a simulated machine ------------------------------------------------------

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
