"""The same operations in PyTorch's pool and in cudakit's pool, in one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from allocator.device import MIB

from cudakit.allocator.pinned import CachingHostAllocator
from cudakit.allocator.upstream import GpuHostUpstream
from cudakit.api.allocator import CachingAllocator
from cudakit.gpu.api import Gpu
from cudakit.gpu.open import open_gpu

PROGRAM = (
    *(("alloc", "a", 3 * MIB), ("alloc", "b", 100), ("alloc", "c", 4 * MIB), ("free", "a", 0)),
    *(("free", "c", 0), ("alloc", "d", 2 * MIB + 1), ("alloc", "e", 4 * MIB), ("free", "b", 0)),
    *(("alloc", "f", 65), ("alloc", "g", 64), ("free", "d", 0), ("empty", "", 0)),
    *(("alloc", "h", 3 * MIB), ("free", "e", 0), ("free", "h", 0), ("free", "f", 0)),
)
# Active blocks are not compared: in some versions their counts are wrong (CachingHostAllocator.h, free).
COMPARED = ("allocations", "allocated_bytes", "num_host")


class OfTorch:
    """PyTorch's pool, through tensors."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.live: dict[str, Any] = {}
        torch.zeros(1, device="cuda")
        gc.collect()
        self.empty("", 0)
        torch.cuda.memory.reset_accumulated_host_memory_stats()
        torch.cuda.memory.reset_peak_host_memory_stats()

    def alloc(self, name: str, size: int) -> int:
        self.live[name] = self.torch.empty(size, dtype=self.torch.int8, pin_memory=True)
        return int(self.live[name].data_ptr())

    def free(self, name: str, _: int) -> int:
        del self.live[name]
        return 0

    def empty(self, _: str, __: int) -> int:
        self.torch._C._host_emptyCache()
        return 0

    def statistics(self) -> dict[str, int]:
        return dict(self.torch.cuda.memory.host_memory_stats())


class OfOurs:
    """cudakit's pool."""

    def __init__(self, pool: CachingHostAllocator | None = None) -> None:
        self.pool = pool or CachingHostAllocator(GpuHostUpstream(open_gpu("cuda")))
        self.live: dict[str, int] = {}

    def alloc(self, name: str, size: int) -> int:
        self.live[name] = self.pool.alloc(size)
        return self.live[name]

    def free(self, name: str, _: int) -> int:
        self.pool.free(self.live.pop(name))
        return 0

    def empty(self, _: str, __: int) -> int:
        self.pool.empty_cache()
        return 0

    def statistics(self) -> dict[str, int]:
        return self.pool.statistics()


def same_addresses(addresses: list[int]) -> list[int]:
    """Replace each address by the position of its first occurrence."""
    names: dict[int, int] = {}
    return [names.setdefault(ptr, len(names)) for ptr in addresses]


@pytest.fixture
def torch_pool() -> Iterator[OfTorch]:
    pool = OfTorch(pytest.importorskip("torch"))
    if pool.statistics()["allocations.current"]:
        pytest.skip("pinned memory of PyTorch is in use in this process")
    yield pool
    pool.live.clear()


@pytest.mark.gpu
def test_pinned_operations_give_pytorchs_blocks_and_statistics(torch_pool: OfTorch) -> None:
    cudakit_pool = OfOurs()
    addresses: list[list[int]] = [[], []]
    for operation, name, size in PROGRAM:
        for pool, pool_addresses in zip((torch_pool, cudakit_pool), addresses, strict=True):
            # After empty_cache the driver may return any address again.
            pool_addresses.append(getattr(pool, operation)(name, size))
        expected, statistics = torch_pool.statistics(), cudakit_pool.statistics()
        for key in filter(lambda key: key.startswith(COMPARED), statistics):
            assert statistics[key] == expected[key], (operation, name, key)
    empty_index = next(i for i, step in enumerate(PROGRAM) if step[0] == "empty")
    assert same_addresses(addresses[1][:empty_index]) == same_addresses(addresses[0][:empty_index])
    assert set(cudakit_pool.statistics()) <= set(torch_pool.statistics())
    for name in list(cudakit_pool.live):
        cudakit_pool.free(name, 0)
    cudakit_pool.pool.close()


class GraphOfTorch:
    """Pinned memory of PyTorch within a capture."""

    def __init__(self, pool: OfTorch) -> None:
        self.pool = pool
        self.torch = pool.torch
        self.graph: Any = None

    @contextmanager
    def captured(self) -> Iterator[None]:
        self.graph, target = self.torch.cuda.CUDAGraph(), self.torch.zeros(1, device="cuda")
        with self.torch.cuda.graph(self.graph):
            target.add_(1)
            yield

    def drop(self) -> None:
        self.graph = None
        gc.collect()


class GraphOfOurs:
    """Pinned memory of cudakit within a capture."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.allocator = CachingAllocator(self.gpu, settings="")
        self.pool = OfOurs(self.allocator.pinned)
        self.memory: Any = None

    @contextmanager
    def captured(self) -> Iterator[None]:
        stream, target = self.gpu.stream(), self.gpu.malloc(4)
        self.pool.empty("", 0)  # torch.cuda.graph does the same
        with self.allocator.capture(stream=stream) as self.memory:
            self.gpu.capture_begin(stream)
            try:
                self.gpu.fill(target, 1, 4, stream)
                yield
            finally:
                self.gpu.destroy_graph(self.gpu.capture_end(stream))

    def drop(self) -> None:
        self.memory.close()


def lives_with_its_graph(subject: GraphOfTorch | GraphOfOurs) -> Iterator[tuple[str, bool]]:
    """Run the steps with either library; yield a condition that must be true after each step."""
    pool = subject.pool
    result_block = pool.alloc("kept", 3 * MIB)
    pool.alloc("before", 64)
    pool.free("before", 0)
    with subject.captured():
        first = pool.alloc("first", 4 * MIB)
        yield "another pool", first != result_block
        pool.free("first", 0)
        yield "freed", pool.alloc("again", 3 * MIB + 1) == first
    pool.free("again", 0)
    yield "not for others", pool.alloc("outside", 4 * MIB) != first
    pool.empty("", 0)
    yield "held", True
    pool.free("outside", 0)
    subject.drop()
    pool.empty("", 0)
    yield "given back", True


def life(subject: GraphOfTorch | GraphOfOurs) -> list[tuple[str, bool, dict[str, int]]]:
    """Run all steps, and return each step with its observed result."""
    steps = lives_with_its_graph(subject)
    return [(step, holds, subject.pool.statistics()) for step, holds in steps]


def test_pinned_graph_memory_lives_as_long_as_the_graph_on_a_simulated_device() -> None:
    cudakit_pool = GraphOfOurs(open_gpu("sim"))

    assert [step for step, holds, _ in life(cudakit_pool) if not holds] == []
    assert (
        cudakit_pool.pool.statistics()["num_host_free"] == 3
    )  # All allocations except the retained result.

    cudakit_pool.allocator.close()
    cudakit_pool.gpu.close()


@pytest.mark.gpu
def test_pinned_graph_memory_lives_as_long_as_the_graph_as_in_pytorch(torch_pool: OfTorch) -> None:
    if tuple(map(int, torch_pool.torch.__version__.split(".")[:2])) < (2, 11):
        pytest.skip("pinned memory of this PyTorch has no pools of graphs")
    # The runs are sequential, because PyTorch captures in global mode: no other thread may then allocate.
    expected, cudakit_pool = life(GraphOfTorch(torch_pool)), GraphOfOurs(open_gpu("cuda"))
    for (step, torch_condition, numbers), (_, condition, cudakit_numbers) in zip(
        expected, life(cudakit_pool), strict=True
    ):
        assert (condition, torch_condition) == (True, True), step
        for key in filter(lambda key: key.startswith(COMPARED), cudakit_numbers):
            assert cudakit_numbers[key] == numbers[key], (step, key)
    cudakit_pool.allocator.close()
    cudakit_pool.gpu.close()
