from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from gpu.kernels import SimBench
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, Backing, Ptr
from cudakit.gpu.sim import Sim
from cudakit.gpu.sim.space import round_up

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
