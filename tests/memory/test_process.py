"""The memory of a process from the batches of its trace."""

from __future__ import annotations

from typing import Any

import pytest

from cudakit.memory.process import END_MARK, OWN_DOMAIN, MemoryModel, ProcessMemory
from cudakit.memory.snapshot import HOST
from cudakit.stacks import Frame
from cudakit.trace.events import Alloc, Event, EventBody, Free, Mark, RangePop, RangePush
from cudakit.trace.kinds import AllocationKind, AllocationLayer
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import pack

MIB = 1 << 20
BASE = 1 << 40
STACK = (Frame("train", "t.py", 3),)


def fed(*bodies: EventBody, thread: int = 1) -> ProcessMemory:
    """Return the memory after a batch of events, one in each nanosecond."""
    strings: list[str] = [""]

    def index(text: str) -> int:
        if text not in strings:
            strings.append(text)
        return strings.index(text)

    events = [
        Event(body, time_ns=number, thread=thread, site=1) for number, body in enumerate(bodies)
    ]
    memory = ProcessMemory()
    memory.feed(Batch(7, pack(events, index), strings, [(), STACK]))
    return memory


def block(address: int, size: int, requested: int = 0) -> Alloc:
    return Alloc(address, size, layer=AllocationLayer.POOL, pool="cupy", requested_bytes=requested)


def test_records_of_driver_and_pool_become_segments_and_blocks() -> None:
    memory = fed(Alloc(BASE, 2 * MIB), block(BASE + 512, 1024, 1000), block(BASE, 512))

    (segment,) = memory.model.segments
    assert (segment.size_bytes, segment.pool, segment.stack) == (2 * MIB, "cupy", STACK)
    assert {address - BASE: each[:2] for address, each in segment.blocks.items()} == {
        512: (1024, 1000),
        0: (512, 512),
    }


def test_frees_of_pool_and_driver_are_distinguished() -> None:
    pool_free = Free(BASE, 512, layer=AllocationLayer.POOL, pool="cupy")

    (segment,) = fed(Alloc(BASE, MIB), block(BASE, 512), pool_free).model.segments
    assert segment.blocks == {}
    assert list(fed(Alloc(BASE, MIB), block(BASE, 512), Free(BASE, MIB)).model.segments) == []


def test_records_after_the_end_mark_are_ignored() -> None:
    memory = fed(Alloc(BASE, MIB), Mark(END_MARK, OWN_DOMAIN), Free(BASE, MIB))

    assert len(list(memory.model.segments)) == 1


def test_mark_of_the_program_does_not_end_the_recording() -> None:
    memory = fed(Alloc(BASE, MIB), Mark(END_MARK), Free(BASE, MIB))

    assert list(memory.model.segments) == []


def test_pinned_memory_is_separate_from_devices() -> None:
    memory = fed(Alloc(BASE, MIB, allocation_kind=AllocationKind.PINNED))

    assert [segment.device for segment in memory.model.segments] == [-1]


def test_nested_ranges_end_in_reverse_order() -> None:
    memory = fed(RangePush("step"), RangePush("forward"), RangePop(), RangePop())

    assert [(each.name, each.begin_ns, each.end_ns) for each in memory.ranges] == [
        ("step", 0, 3),
        ("forward", 1, 2),
    ]


def test_ranges_of_the_process_end_by_their_number() -> None:
    memory = fed(RangePush("a", number=1), RangePush("b", number=2), RangePop(number=1))

    assert [(each.name, each.end_ns) for each in memory.ranges] == [("a", 2), ("b", None)]


def test_copies_of_ranges_for_autograd_threads_are_ignored() -> None:
    memory = fed(RangePush("step", is_copy=True), RangePop(is_copy=True))

    assert memory.is_empty


def test_unknown_call_stack_of_a_damaged_trace_is_empty() -> None:
    memory = ProcessMemory()
    records = pack([Event(Alloc(BASE, MIB), site=9)], lambda _: 0)
    memory.feed(Batch(7, records, [""], [()]))

    assert [segment.stack for segment in memory.model.segments] == [()]


def test_ranges_of_libraries_are_ignored() -> None:
    domains = ("CCCL", "NCCL", "TSL", "")
    pushed = fed(*(RangePush(f"call {domain}", domain) for domain in domains))

    assert [each.domain for each in pushed.ranges] == [""]


# --- The replay of a process's memory: segments, blocks of pools, and missing events ---------------

CALLERS = (Frame("f", "a.py", 1),)


@pytest.fixture
def model() -> MemoryModel:
    return MemoryModel(max_entries=100)


def driver(model: MemoryModel, address: int, size: int, **more: Any) -> None:
    fields = {"device": 0, "kind": AllocationKind.SYNC, "pool": "", "stream": 0, "stack": CALLERS}
    model.driver_alloc(address=address, size_bytes=size, time_ns=0, **(fields | more))


def pool(model: MemoryModel, address: int, size: int, name: str = "cupy") -> None:
    model.pool_alloc(
        device=0,
        address=address,
        size_bytes=size,
        requested_bytes=0,
        pool=name,
        stack=CALLERS,
        time_ns=0,
    )


def in_use(model: MemoryModel) -> list[tuple[int, str, list[int]]]:
    """List (size, pool, sizes of blocks) of the segments in use."""
    return [
        (each.size_bytes, each.pool, [block.size_bytes for block in each.blocks.values()])
        for each in model.segments
    ]


def actions(model: MemoryModel, device: int = 0) -> list[str]:
    return [entry.action for entry in model.entries[device]]


def test_first_block_decides_the_pool_of_a_segment(model: MemoryModel) -> None:
    driver(model, BASE, 2 * MIB)
    assert in_use(model) == [(2 * MIB, "driver", [])]

    pool(model, BASE + 512, 512)
    assert in_use(model) == [(2 * MIB, "cupy", [512])]


def test_block_outside_of_known_segments_is_a_segment_until_it_is_freed(model: MemoryModel) -> None:
    pool(model, BASE, 1000)
    assert in_use(model) == [(1024, "cupy", [1024])]

    model.pool_free(address=BASE, pool="cupy", stack=(), time_ns=1)
    assert in_use(model) == []


def test_block_at_the_address_of_another_pool_is_ignored(model: MemoryModel) -> None:
    pool(model, BASE, 512, "rmm")
    pool(model, BASE, 512, "numba")
    model.pool_free(address=BASE, pool="numba", stack=(), time_ns=1)

    assert in_use(model) == [(512, "rmm", [512])]


def test_new_segment_replaces_segments_whose_free_was_not_recorded(model: MemoryModel) -> None:
    driver(model, BASE, MIB)
    driver(model, BASE + MIB, MIB)
    pool(model, BASE + MIB, 512)
    driver(model, BASE, 4 * MIB)

    assert in_use(model) == [(4 * MIB, "driver", [])]
    assert actions(model).count("segment_free") == 2


def test_new_block_replaces_a_block_whose_free_was_not_recorded(model: MemoryModel) -> None:
    driver(model, BASE, MIB)
    pool(model, BASE, 512)
    pool(model, BASE, 1024)

    assert in_use(model) == [(MIB, "cupy", [1024])]


def test_frees_of_unknown_memory_are_ignored(model: MemoryModel) -> None:
    model.driver_free(address=BASE, stack=(), time_ns=0)
    model.pool_free(address=BASE, pool="cupy", stack=(), time_ns=0)

    assert model.is_empty


def test_pinned_memory_belongs_to_the_host(model: MemoryModel) -> None:
    driver(model, BASE, MIB, kind=AllocationKind.PINNED)

    assert list(model.entries) == [HOST]


def test_managed_memory_has_a_pool_of_its_own(model: MemoryModel) -> None:
    driver(model, BASE, MIB, kind=AllocationKind.MANAGED)

    assert in_use(model) == [(MIB, "managed memory", [])]


def test_only_the_last_events_are_kept_but_all_memory_in_use() -> None:
    model = MemoryModel(max_entries=4)
    for index in range(5):
        driver(model, BASE + index * MIB, MIB)

    assert len(model.entries[0]) == 4
    assert model.overflowed_devices == {0}
    assert len(in_use(model)) == 5


def test_blocks_of_a_pool_without_history_are_replaced(model: MemoryModel) -> None:
    driver(model, BASE, MIB)
    first, second, third = ((0, BASE + offset) for offset in (0, 512, 1024))
    model.replace_blocks("jax", {first: (512, CALLERS), second: (512, CALLERS)}, 1)
    events = len(model.entries[0])
    model.replace_blocks("jax", {second: (512, CALLERS), third: (512, ())}, 2)

    assert in_use(model) == [(MIB, "jax", [512, 512])]
    assert actions(model)[events:] == ["free_requested", "free_completed", "alloc"]
