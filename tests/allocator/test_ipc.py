"""Memory shared between two simulated processes."""

from __future__ import annotations

import gc
import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import pytest
from allocator import invariants
from allocator.device import MIB, Device
from allocator.failing_gpu import FailingGpu
from allocator.two_processes import CAPACITY, EXPANDING, PLAIN, Pair
from hypothesis import given
from hypothesis import strategies as st

from cudakit.allocator.allocator import InvalidPointer
from cudakit.allocator.ipc import OpenedMemory, SharedMemory
from cudakit.allocator.pools import MemPool
from cudakit.api.allocator import CachingAllocator
from cudakit.errors import CudaError, EnvironmentUnusable, InputError, Unsupported, UsageError
from cudakit.gpu.api import HANDLE_BYTES, LEGACY, DescriptorHandle, FabricHandle, ProcessId
from cudakit.gpu.sim import Sim
from cudakit.torch_rules.settings import Settings

PAGE = 20 * MIB


@pytest.fixture(params=[PLAIN, EXPANDING], ids=["plain", "expanding"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    processes = Pair(request.param)
    yield processes
    invariants.check(processes.exporter)
    invariants.check(processes.importer)


def used_bytes(gpu: Sim) -> int:
    info = gpu.memory_info()
    return info.total_bytes - info.free_bytes


def test_opened_block_has_its_offset_and_requested_size(pair: Pair) -> None:
    below, block, above = (pair.exporter.alloc(size) for size in (3 * MIB, 25 * MIB + 3, 3 * MIB))
    for number, ptr in enumerate((below, block, above)):
        pair.write(ptr, number, 3 * MIB)
    pair.write(block, 7, 25 * MIB + 3)

    with pair.importer.open_shared(pair.exporter.share(block)) as memory:
        assert memory.size_bytes == 25 * MIB + 3
        assert pair.read(memory) == b"\7" * 4
        assert pair.read(memory, memory.size_bytes - 4) == b"\7" * 4


def test_address_inside_an_allocation_shares_its_rest(pair: Pair) -> None:
    block = pair.exporter.alloc(45 * MIB)
    pair.write(block, 1, 45 * MIB)
    pair.write(block + 30 * MIB, 2, 1)

    memory = pair.importer.open_shared(pair.exporter.share(block + 30 * MIB))

    assert memory.size_bytes == 15 * MIB
    assert pair.read(memory) == b"\2\1\1\1"


def test_writes_of_another_process_are_visible(pair: Pair) -> None:
    block = pair.exporter.alloc(MIB)
    memory = pair.importer.open_shared(pair.exporter.share(block))
    pair.second.fill(memory.ptr, 9, MIB, LEGACY)
    pair.second.sync()
    reopened = Sim(same_machine_as=pair.first)
    other = CachingAllocator(reopened, settings="").open_shared(pair.exporter.share(block))
    pair.second = reopened

    assert pair.read(other) == b"\t" * 4


def test_two_blocks_open_their_segment_once() -> None:
    pair = Pair()
    first, second = (pair.exporter.alloc(2 * MIB) for _ in range(2))
    first_memory = pair.importer.open_shared(pair.exporter.share(first))
    other = pair.importer.open_shared(pair.exporter.share(second))

    assert other.ptr - first_memory.ptr == second - first


def test_memory_opened_twice_closes_at_the_last_close(pair: Pair) -> None:
    block = pair.exporter.alloc(MIB)
    pair.write(block, 3, MIB)
    first_memory = pair.importer.open_shared(pair.exporter.share(block))
    other = pair.importer.open_shared(pair.exporter.share(block))
    assert first_memory.ptr == other.ptr
    address = first_memory.ptr

    first_memory.close()
    first_memory.close()
    assert pair.read(other) == b"\3" * 4
    with pytest.raises(UsageError, match="is closed"):
        _ = first_memory.ptr
    other.close()
    assert pair.second.heap.space.region_at(address) is None
    assert pair.importer.open_shared(pair.exporter.share(block)).size_bytes == MIB


def test_collected_opened_memory_is_closed(pair: Pair) -> None:
    memory = pair.importer.open_shared(pair.exporter.share(pair.exporter.alloc(MIB)))
    address = memory.ptr

    del memory
    gc.collect()

    assert pair.second.heap.space.region_at(address) is None


def test_opened_memory_has_a_cuda_array_interface(pair: Pair) -> None:
    memory = pair.importer.open_shared(pair.exporter.share(pair.exporter.alloc(1000)))
    interface = memory.__cuda_array_interface__

    assert (interface["shape"], interface["typestr"], interface["data"]) == (
        (1000,),
        "|u1",
        (memory.ptr, False),
    )
    assert interface["version"] == 3


def test_process_cannot_open_its_own_memory(pair: Pair) -> None:
    shared = pair.exporter.share(pair.exporter.alloc(MIB))

    with pytest.raises(UsageError, match="this process shared") as caught:
        pair.exporter.open_shared(shared)
    assert "the shared address" in caught.value.hint


def test_open_refuses_memory_of_another_device(pair: Pair) -> None:
    shared = replace(pair.exporter.share(pair.exporter.alloc(MIB)), device="GPU-1")

    with pytest.raises(UsageError, match="GPU-1, and this allocator to GPU-"):
        pair.importer.open_shared(shared)


def test_memory_of_an_ended_process_cannot_be_opened(pair: Pair) -> None:
    shared = pair.exporter.share(pair.exporter.alloc(MIB))
    pair.first.close()

    with pytest.raises(EnvironmentUnusable, match=r"has ended|or ended"):
        pair.importer.open_shared(shared)
    assert used_bytes(pair.second) == 0
    pair.exporter = CachingAllocator("sim", settings="")


def test_share_of_an_unallocated_address_is_refused(pair: Pair) -> None:
    block = pair.exporter.alloc(1000)
    for ptr in (0, block - 1, block + 1000, 1 << 40):
        with pytest.raises(InvalidPointer, match="nothing is allocated"):
            pair.exporter.share(ptr)
        with pytest.raises(InvalidPointer):
            pair.exporter.ipc_handle(ptr)
    pair.exporter.free(block)
    with pytest.raises(InvalidPointer, match="freed before"):
        pair.exporter.share(block)


def test_uncached_allocation_is_shared_whole() -> None:
    pair = Pair()
    pair.exporter.enable_caching(enabled=False)
    block = pair.exporter.alloc(5000)
    pair.write(block, 4, 5000)

    memory = pair.importer.open_shared(pair.exporter.share(block))
    assert (memory.size_bytes, pair.read(memory)) == (5000, b"\4" * 4)
    pair.exporter.free(block)


def test_private_pool_memory_is_shared_unless_it_has_its_own_upstream(
    pair: Pair,
) -> None:
    with MemPool(pair.exporter) as pool, pair.exporter.use_pool(pool):
        block = pair.exporter.alloc(MIB)
        pair.write(block, 8, MIB)
        assert pair.read(pair.importer.open_shared(pair.exporter.share(block))) == b"\10" * 4
        pair.exporter.free(block)
    with (
        MemPool(pair.exporter, upstream=Device(base=1 << 50)) as own_pool,
        pair.exporter.use_pool(own_pool),
    ):
        block = pair.exporter.alloc(MIB)
        with pytest.raises(Unsupported, match="its own upstream"):
            pair.exporter.share(block)
        pair.exporter.free(block)


def test_ipc_handle_is_that_of_the_segment_base() -> None:
    pair = Pair()
    first, second = (pair.exporter.alloc(2 * MIB) for _ in range(2))
    base, inside = pair.exporter.ipc_handle(first), pair.exporter.ipc_handle(second + 5)

    assert base.data == inside.data
    assert (base.offset_bytes, inside.offset_bytes) == (0, second + 5 - first)


def test_ipc_handle_of_an_expandable_segment_names_the_alternative() -> None:
    exporter = Pair(EXPANDING).exporter

    with pytest.raises(Unsupported, match="no handle of") as caught:
        exporter.ipc_handle(exporter.alloc(MIB))
    assert "share()" in caught.value.hint


def test_share_exports_only_the_pages_under_a_block() -> None:
    exporter = Pair(EXPANDING).exporter
    first, second = exporter.alloc(30 * MIB), exporter.alloc(15 * MIB)

    pages = exporter.share(first).handles
    assert [type(page) for page in pages] == [DescriptorHandle, DescriptorHandle]
    after = exporter.share(second)
    assert after.handles[0] == pages[1]
    assert (after.offset_bytes, after.page_bytes, len(after.handles)) == (10 * MIB, PAGE, 2)


def test_released_pages_cannot_be_opened() -> None:
    pair = Pair(EXPANDING)
    block = pair.exporter.alloc(PAGE)
    shared = pair.exporter.share(block)
    pair.exporter.free(block)
    pair.exporter.empty_cache()

    assert used_bytes(pair.first) == 0
    with pytest.raises(EnvironmentUnusable, match="has freed the memory"):
        pair.importer.open_shared(shared)
    assert pair.exporter.share(pair.exporter.alloc(PAGE)).handles != shared.handles


def test_pages_open_in_another_process_live_until_closed() -> None:
    pair = Pair(EXPANDING)
    block = pair.exporter.alloc(PAGE)
    pair.write(block, 6, PAGE)
    memory = pair.importer.open_shared(pair.exporter.share(block))
    pair.exporter.free(block)
    pair.exporter.empty_cache()

    assert pair.read(memory) == b"\6" * 4
    memory.close()
    assert used_bytes(pair.first) == 0


def test_released_segment_is_an_illegal_address_in_another_process() -> None:
    pair = Pair()
    block = pair.exporter.alloc(PAGE)
    memory = pair.importer.open_shared(pair.exporter.share(block))
    pair.exporter.free(block)
    pair.exporter.empty_cache()

    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        pair.read(memory)


def test_share_of_pages_without_handles_is_refused() -> None:
    exporter = Pair(EXPANDING, shares=False).exporter

    with pytest.raises(Unsupported, match="without a shareable handle") as caught:
        exporter.share(exporter.alloc(MIB))
    assert "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC" in caught.value.hint


def test_fabric_device_exports_fabric_handles() -> None:
    gpu = Sim(capacity_bytes=CAPACITY, handle_kinds=("fabric", "descriptor"))
    exporter = CachingAllocator(gpu, settings=EXPANDING.as_text())
    shared = exporter.share(exporter.alloc(PAGE))
    other = CachingAllocator(Sim(capacity_bytes=CAPACITY, same_machine_as=gpu), settings="")

    assert [type(handle) for handle in shared.handles] == [FabricHandle]
    # The memory may be opened on any device of the fabric.
    assert other.open_shared(replace(shared, device="GPU-1")).size_bytes == PAGE


class WithoutChannel(Sim):
    """A device that reports a fabric, and refuses its handles."""

    def create(self, size_bytes: int, handle: str | None = None) -> int:  # type: ignore[override]
        if handle == "fabric":
            raise CudaError(800, "CUDA_ERROR_NOT_PERMITTED", "no channel")
        return super().create(size_bytes, handle)  # type: ignore[arg-type]


def test_refused_fabric_handles_fall_back_to_descriptors() -> None:
    gpu = WithoutChannel(handle_kinds=("fabric", "descriptor"))
    exporter = CachingAllocator(gpu, settings=EXPANDING.as_text())

    assert isinstance(exporter.share(exporter.alloc(PAGE)).handles[0], DescriptorHandle)


def test_opened_memory_keeps_its_device_open(pair: Pair) -> None:
    memory = pair.importer.open_shared(pair.exporter.share(pair.exporter.alloc(MIB)))
    owner = memory._owner

    assert owner is pair.importer


def test_forked_child_has_no_opened_memory(pair: Pair) -> None:
    memory = pair.importer.open_shared(pair.exporter.share(pair.exporter.alloc(MIB)))
    error = CudaError(3, "CUDA_ERROR_NOT_INITIALIZED", "as in a forked child")
    for _ in range(2):  # The device is synchronized by the last close, and by the query.
        pair.second.fail_next("sync", error)

    memory.close()
    assert not pair.importer._upstream.ipc._unused_handles  # type: ignore[attr-defined]


def test_closing_the_device_closes_opened_memory(pair: Pair) -> None:
    memory = pair.importer.open_shared(pair.exporter.share(pair.exporter.alloc(MIB)))
    pair.second.close()

    memory.close()
    del memory
    assert not pair.importer._upstream.ipc._unused_handles  # type: ignore[attr-defined]


def test_threads_open_and_close_concurrently(pair: Pair) -> None:
    shared = [pair.exporter.share(pair.exporter.alloc(MIB)) for _ in range(3)]
    failures: list[Exception] = []

    def work() -> None:
        try:
            for iteration in range(30):
                with pair.importer.open_shared(shared[iteration % 3]) as memory:
                    assert memory.size_bytes == MIB
        except Exception as error:  # noqa: BLE001  whatever it is, it is shown
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pair.importer._upstream.ipc.close_unused()  # type: ignore[attr-defined]

    assert failures == []
    assert pair.second.ipc.open_mappings == {}
    assert pair.second.virtual.mapped_memory == {}


# --- Sharing and opening memory during a graph capture keep the capture valid ----------------------


def test_share_during_a_capture_keeps_the_capture_valid(pair: Pair) -> None:
    stream = pair.first.stream()
    block = pair.exporter.alloc(MIB)
    with pair.exporter.capture(stream=stream):
        pair.first.capture_begin(stream)
        shared = pair.exporter.share(block)
        graph = pair.first.capture_end(stream)

    assert pair.importer.open_shared(shared).size_bytes == MIB
    pair.first.instantiate(graph)


def test_memory_dropped_during_a_capture_is_closed_later(pair: Pair) -> None:
    stream = pair.second.stream()
    shared = pair.exporter.share(pair.exporter.alloc(MIB))
    memory = pair.importer.open_shared(shared)
    address = memory.ptr
    with pair.importer.capture(stream=stream):
        pair.second.capture_begin(stream)
        memory.close()
        graph = pair.second.capture_end(stream)
    assert pair.second.heap.space.region_at(address) is not None

    pair.second.instantiate(graph)
    pair.importer.open_shared(shared).close()
    assert pair.second.ipc.open_mappings == {}
    assert pair.second.virtual.mapped_memory == {}


# --- Every driver call can fail in either process of shared memory: nothing leaks ------------------


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


# --- The text of SharedMemory, and invalid texts ---------------------------------------------------

SMALL_PAGE = 2 << 20
NUMBERS = st.integers(0, (1 << 63) - 1)
PROCESSES = st.builds(ProcessId, st.integers(1, 1 << 22), NUMBERS)
BYTES = st.binary(min_size=HANDLE_BYTES, max_size=HANDLE_BYTES)


@st.composite
def memory(draw: st.DrawFn) -> SharedMemory:
    process, device = draw(PROCESSES), draw(st.text(max_size=40))
    size, offset = draw(st.integers(1, SMALL_PAGE // 2)), draw(st.integers(0, SMALL_PAGE // 2))
    kind = draw(st.sampled_from(("segment", "fabric", "descriptor")))
    if kind == "segment":
        return SharedMemory(size, offset, device, process, 0, (draw(BYTES),))
    descriptors = st.builds(
        DescriptorHandle, st.just(process), st.integers(0, 1 << 20), st.integers(1, 10**18)
    )
    any_handle = st.builds(FabricHandle, BYTES) if kind == "fabric" else descriptors
    handles = tuple(draw(st.lists(any_handle, min_size=1, max_size=4)))
    return SharedMemory(size, offset, device, process, SMALL_PAGE, handles)


@given(memory())
def test_shared_memory_survives_text_and_pickle(shared: SharedMemory) -> None:
    assert SharedMemory.from_text(shared.as_text()) == shared
    assert pickle.loads(pickle.dumps(shared)) == shared  # noqa: S301  written right here


def form(**changed: Any) -> str:
    process = ProcessId(17, 4)
    shared = SharedMemory(100, 0, "GPU-0", process, SMALL_PAGE, (DescriptorHandle(process, 7, 1),))
    return json.dumps({**json.loads(shared.as_text()), **changed})


def test_unknown_version_of_the_text_is_named() -> None:
    with pytest.raises(
        InputError, match=r"reads 'cudakit\.shared/1', not 'cudakit\.shared/2'"
    ) as caught:
        SharedMemory.from_text(form(schema="cudakit.shared/2"))
    assert "same version" in caught.value.hint


SEGMENT = "ipc:" + "00" * HANDLE_BYTES


@pytest.mark.parametrize(
    "changed",
    [
        {"size_bytes": -1},
        {"size_bytes": 0},
        {"size_bytes": 1.5},
        {"size_bytes": True},
        {"size_bytes": 1 << 63},
        {"offset_bytes": None},
        {"offset_bytes": SMALL_PAGE - 99},
        {"device": 3},
        {"pid": "17"},
        {"pid": 1 << 31},
        {"started": -4},
        {"page_bytes": 1 << 62, "handles": ["fd:7:1", "fd:8:2"]},
        {"page_bytes": 0},
        {"page_bytes": 1},
        {"handles": []},
        {"handles": {}},
        {"handles": [7]},
        {"handles": ["fd:7"]},
        {"handles": ["fd:123456789:1"]},
        {"handles": ["socket:7:1"]},
        {"handles": ["ipc:0011"]},
        {"handles": [SEGMENT]},
        {"handles": ["fd:7:1", "fabric:" + "00" * HANDLE_BYTES]},
        {"handles": [SEGMENT + ":1"], "page_bytes": 0},
        {"handles": [SEGMENT, SEGMENT], "page_bytes": 0},
    ],
)
def test_invalid_field_of_shared_memory_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="in shared memory"):
        SharedMemory.from_text(form(**changed))


@pytest.mark.parametrize("text", ["", "{", "3", "[]", "null", "{}", "[" * 100_000])
def test_invalid_text_of_shared_memory_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        SharedMemory.from_text(text)
