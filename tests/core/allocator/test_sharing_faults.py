"""Every driver call can fail in either process of shared memory: nothing leaks."""

from __future__ import annotations

import gc
from contextlib import suppress
from types import TracebackType

import pytest
from core.allocator import invariants
from core.allocator.device import MIB
from core.allocator.failing_gpu import FailingGpu

from cudakit.core.allocator.allocator import CachingAllocator
from cudakit.core.allocator.ipc import OpenedMemory, SharedMemory
from cudakit.core.allocator.upstream import GpuUpstream
from cudakit.errors import CudaError
from cudakit.gpu.sim import Sim
from cudakit.torch_rules.settings import Settings

CAPACITY = 128 * MIB
PLAIN, EXPANDING = Settings(), Settings(expandable_segments=True)


class Two:
    """Two processes that share memory and continue after failures."""

    def __init__(self, settings: Settings) -> None:
        self.giving = FailingGpu(CAPACITY)
        self.taking = FailingGpu(CAPACITY, same_machine_as=self.giving)
        self.giver = CachingAllocator(GpuUpstream(self.giving), settings)
        self.taker = CachingAllocator(GpuUpstream(self.taking), settings)
        self.errors: list[CudaError] = []

    def run(self) -> None:
        """Share, open twice, close explicitly and by garbage collection, and release all."""
        blocks = [self.alloc(size) for size in (30 * MIB, 15 * MIB)]
        shared = [self.share(block) for block in [*blocks, blocks[0]]]
        opened = [self.opened(each) for each in shared]
        for each in opened[:1]:
            with self.recording_errors():
                if each is not None:
                    each.close()
        del opened, each
        gc.collect()
        for block in blocks:
            with self.recording_errors():
                self.giver.free(block)
        for allocator in (self.giver, self.taker):
            with self.recording_errors():
                allocator.empty_cache()
            invariants.check(allocator)

    def settle(self) -> None:
        """Repeat the refused calls."""
        self.giving.fail_at = self.taking.fail_at = 0
        block = self.giver.alloc(15 * MIB)
        self.taker.open_shared(self.giver.share(block)).close()
        self.giver.free(block)
        for allocator in (self.giver, self.taker):
            allocator.empty_cache()
            invariants.check(allocator)

    def left_over(self) -> list[object]:
        """Return everything that either process still has open or allocated."""
        machine = self.giving.ipc.registry
        lists: list[object] = [machine.descriptors, machine.handles]
        for gpu in (self.giving, self.taking):
            lists += [gpu.reserved, gpu.ipc.open_mappings, gpu.virtual.mapped, gpu.virtual.backings]
        return [each for each in lists if each]

    def alloc(self, size_bytes: int) -> int:
        with self.recording_errors():
            return self.giver.alloc(size_bytes)
        return 0

    def share(self, ptr: int) -> SharedMemory | None:
        with self.recording_errors():
            return self.giver.share(ptr) if ptr else None
        return None

    def opened(self, shared: SharedMemory | None) -> OpenedMemory | None:
        with self.recording_errors():
            return self.taker.open_shared(shared) if shared else None
        return None

    def recording_errors(self) -> RecordErrors:
        return RecordErrors(self.errors)


class RecordErrors(suppress):
    """Continues after errors of the driver, and records them."""

    def __init__(self, told: list[CudaError]) -> None:
        super().__init__(CudaError)
        self._told = told

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(error, CudaError):
            self._told.append(error)
        return super().__exit__(kind, error, traceback)


PLAIN_CALLS = {"ipc_handle", "ipc_open", "ipc_close", "sync"}
PAGE_CALLS = {"create", "map", "unmap", "export", "revoke", "import_backing", "backing_at"}
QUIET = {"release", "revoke", "ipc_close", "sync", "unmap", "unreserve", "backing_at"}


@pytest.mark.parametrize("side", ["giving", "taking"])
@pytest.mark.parametrize(
    ("settings", "calls"),
    [(PLAIN, PLAIN_CALLS), (EXPANDING, PAGE_CALLS)],
    ids=["plain", "expanding"],
)
def test_failed_driver_call_leaks_nothing(settings: Settings, calls: set[str], side: str) -> None:
    whole = Two(settings)
    whole.run()
    assert whole.errors == []
    assert whole.left_over() == []
    done = {*whole.giving.calls, *whole.taking.calls}
    assert calls <= done

    for fail_at in range(1, len(getattr(whole, side).calls) + 1):
        two = Two(settings)
        gpu = getattr(two, side)
        if len(gpu.calls) >= fail_at:  # The calls that create the allocators.
            continue
        gpu.fail_at = fail_at
        two.run()
        name = gpu.calls[fail_at - 1]
        assert gpu.failed
        assert two.errors or name in QUIET, name
        two.settle()

        assert two.left_over() == [], name
        assert (two.giving.used, two.taking.used) == (0, 0)


@pytest.mark.parametrize("name", ["ipc_open", "import_backing", "map", "reserve"])
def test_failed_open_leaves_nothing_open(name: str) -> None:
    two = Two(PLAIN if name == "ipc_open" else EXPANDING)
    shared = two.giver.share(two.giver.alloc(30 * MIB))
    two.taking.fail(name, 1)

    with pytest.raises(CudaError, match="requested by the test"):
        two.taker.open_shared(shared)
    assert two.taking.ipc.open_mappings == {}
    assert two.taking.virtual.mapped == {}
    assert two.taking.reserved == set()
    assert two.taker.open_shared(shared).size_bytes == 30 * MIB


@pytest.mark.parametrize("settings", [PLAIN, EXPANDING], ids=["plain", "expanding"])
def test_failed_close_is_reported_and_repeated_at_the_next_call(settings: Settings) -> None:
    two = Two(settings)
    shared = two.giver.share(two.giver.alloc(30 * MIB))
    gpu = Sim(capacity_bytes=CAPACITY, same_machine_as=two.giving)
    taker = CachingAllocator(GpuUpstream(gpu))
    memory = taker.open_shared(shared)
    for _ in range(2):  # At the last close, and at the query.
        gpu.fail_next("sync", CudaError(999, "CUDA_ERROR_UNKNOWN", "requested by the test"))

    with pytest.raises(CudaError, match="requested by the test"):
        memory.close()
    assert gpu.ipc.open_mappings or gpu.virtual.mapped
    taker.open_shared(shared).close()
    assert gpu.ipc.open_mappings == {}
    assert gpu.virtual.mapped == {}


def test_failed_export_of_one_page_exports_no_page() -> None:
    two = Two(EXPANDING)
    block = two.giver.alloc(30 * MIB)
    two.giving.fail("export", 2)

    with pytest.raises(CudaError, match="requested by the test"):
        two.giver.share(block)
    assert two.giving.ipc.registry.descriptors == {}
    assert len(two.giver.share(block).handles) == 2
