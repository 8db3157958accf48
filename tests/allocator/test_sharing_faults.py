"""Every driver call can fail in either process of shared memory: nothing leaks."""

from __future__ import annotations

import gc
from contextlib import suppress
from types import TracebackType

import pytest
from allocator import invariants
from allocator.device import MIB
from allocator.failing_gpu import FailingGpu

from cudakit.allocator.ipc import OpenedMemory, SharedMemory
from cudakit.api.allocator import CachingAllocator
from cudakit.errors import CudaError
from cudakit.gpu.sim import Sim
from cudakit.torch_rules.settings import Settings

CAPACITY = 128 * MIB
PLAIN, EXPANDING = Settings(), Settings(expandable_segments=True)


class TwoProcesses:
    """TwoProcesses processes that share memory and continue after failures."""

    def __init__(self, settings: Settings) -> None:
        self.exporting_gpu = FailingGpu(CAPACITY)
        self.importing_gpu = FailingGpu(CAPACITY, same_machine_as=self.exporting_gpu)
        self.exporter = CachingAllocator(self.exporting_gpu, settings=settings.as_text())
        self.importer = CachingAllocator(self.importing_gpu, settings=settings.as_text())
        self.errors: list[CudaError] = []

    def run(self) -> None:
        """Share, open twice, close explicitly and by garbage collection, and release all."""
        blocks = [self.alloc(size) for size in (30 * MIB, 15 * MIB)]
        shared = [self.share(block) for block in [*blocks, blocks[0]]]
        opened = [self.opened(opened_memory) for opened_memory in shared]
        for opened_memory in opened[:1]:
            with self.recording_errors():
                if opened_memory is not None:
                    opened_memory.close()
        del opened, opened_memory
        gc.collect()
        for block in blocks:
            with self.recording_errors():
                self.exporter.free(block)
        for allocator in (self.exporter, self.importer):
            with self.recording_errors():
                allocator.empty_cache()
            invariants.check(allocator)

    def settle(self) -> None:
        """Repeat the refused calls."""
        self.exporting_gpu.fail_at = self.importing_gpu.fail_at = 0
        block = self.exporter.alloc(15 * MIB)
        self.importer.open_shared(self.exporter.share(block)).close()
        self.exporter.free(block)
        for allocator in (self.exporter, self.importer):
            allocator.empty_cache()
            invariants.check(allocator)

    def left_over(self) -> list[object]:
        """Return everything that either process still has open or allocated."""
        machine = self.exporting_gpu.ipc.registry
        lists: list[object] = [machine.descriptors, machine.handles]
        for gpu in (self.exporting_gpu, self.importing_gpu):
            lists += [
                gpu.reserved,
                gpu.ipc.open_mappings,
                gpu.virtual.mapped_memory,
                gpu.virtual.backings,
            ]
        return [opened_memory for opened_memory in lists if opened_memory]

    def alloc(self, size_bytes: int) -> int:
        with self.recording_errors():
            return self.exporter.alloc(size_bytes)
        return 0

    def share(self, ptr: int) -> SharedMemory | None:
        with self.recording_errors():
            return self.exporter.share(ptr) if ptr else None
        return None

    def opened(self, shared: SharedMemory | None) -> OpenedMemory | None:
        with self.recording_errors():
            return self.importer.open_shared(shared) if shared else None
        return None

    def recording_errors(self) -> RecordErrors:
        return RecordErrors(self.errors)


class RecordErrors(suppress):
    """Continues after errors of the driver, and records them."""

    def __init__(self, errors: list[CudaError]) -> None:
        super().__init__(CudaError)
        self._errors = errors

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(error, CudaError):
            self._errors.append(error)
        return super().__exit__(kind, error, traceback)


PLAIN_CALLS = {"ipc_handle", "ipc_open", "ipc_close", "sync"}
PAGE_CALLS = {"create", "map", "unmap", "export", "revoke", "import_backing", "backing_at"}
QUIET = {"release", "revoke", "ipc_close", "sync", "unmap", "unreserve", "backing_at"}


@pytest.mark.parametrize("failing_side", ["exporting_gpu", "importing_gpu"])
@pytest.mark.parametrize(
    ("settings", "calls"),
    [(PLAIN, PLAIN_CALLS), (EXPANDING, PAGE_CALLS)],
    ids=["plain", "expanding"],
)
def test_failed_driver_call_leaks_nothing(
    settings: Settings, calls: set[str], failing_side: str
) -> None:
    without_failures = TwoProcesses(settings)
    without_failures.run()
    assert without_failures.errors == []
    assert without_failures.left_over() == []
    calls_made = {*without_failures.exporting_gpu.calls, *without_failures.importing_gpu.calls}
    assert calls <= calls_made

    for fail_at in range(1, len(getattr(without_failures, failing_side).calls) + 1):
        processes = TwoProcesses(settings)
        gpu = getattr(processes, failing_side)
        if len(gpu.calls) >= fail_at:  # The earlier calls create the allocators.
            continue
        gpu.fail_at = fail_at
        processes.run()
        name = gpu.calls[fail_at - 1]
        assert gpu.failed
        assert processes.errors or name in QUIET, name
        processes.settle()

        assert processes.left_over() == [], name
        assert (processes.exporting_gpu.used, processes.importing_gpu.used) == (0, 0)


@pytest.mark.parametrize("name", ["ipc_open", "import_backing", "map", "reserve"])
def test_failed_open_leaves_nothing_open(name: str) -> None:
    processes = TwoProcesses(PLAIN if name == "ipc_open" else EXPANDING)
    shared = processes.exporter.share(processes.exporter.alloc(30 * MIB))
    processes.importing_gpu.fail(name, 1)

    with pytest.raises(CudaError, match="requested by the test"):
        processes.importer.open_shared(shared)
    assert processes.importing_gpu.ipc.open_mappings == {}
    assert processes.importing_gpu.virtual.mapped_memory == {}
    assert processes.importing_gpu.reserved == set()
    assert processes.importer.open_shared(shared).size_bytes == 30 * MIB


@pytest.mark.parametrize("settings", [PLAIN, EXPANDING], ids=["plain", "expanding"])
def test_failed_close_is_reported_and_repeated_at_the_next_call(settings: Settings) -> None:
    processes = TwoProcesses(settings)
    shared = processes.exporter.share(processes.exporter.alloc(30 * MIB))
    gpu = Sim(capacity_bytes=CAPACITY, same_machine_as=processes.exporting_gpu)
    importer = CachingAllocator(gpu, settings="")
    memory = importer.open_shared(shared)
    for _ in range(2):  # The device is synchronized by the last close, and by the query.
        gpu.fail_next("sync", CudaError(999, "CUDA_ERROR_UNKNOWN", "requested by the test"))

    with pytest.raises(CudaError, match="requested by the test"):
        memory.close()
    assert gpu.ipc.open_mappings or gpu.virtual.mapped_memory
    importer.open_shared(shared).close()
    assert gpu.ipc.open_mappings == {}
    assert gpu.virtual.mapped_memory == {}


def test_failed_export_of_one_page_exports_no_page() -> None:
    processes = TwoProcesses(EXPANDING)
    block = processes.exporter.alloc(30 * MIB)
    processes.exporting_gpu.fail("export", 2)

    with pytest.raises(CudaError, match="requested by the test"):
        processes.exporter.share(block)
    assert processes.exporting_gpu.ipc.registry.descriptors == {}
    assert len(processes.exporter.share(block).handles) == 2
