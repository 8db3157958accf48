"""The native types alone: wrong use raises, and unused objects are collected."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from allocator.device import MIB, Device

from cudakit.allocator.allocator import DeviceCachingAllocator, InvalidPointer
from cudakit.allocator.blocks import BlockPool
from cudakit.allocator.memory import native_module
from cudakit.allocator.stats import DeviceStats
from cudakit.torch_rules.oom import DEFAULT_POOL

pytestmark = pytest.mark.skipif(
    native_module() is None, reason="the native types were not compiled"
)
EVENT = ("alloc", 1, 2, 0, 3, None, (0, 0), "")


def make_pool() -> BlockPool:
    native: Any = native_module()
    stats = DeviceStats(1 << 62, native.BlockCounters).small
    return BlockPool(DEFAULT_POOL, stats, is_small=True, free_blocks_type=native.FreeBlocks)


@pytest.fixture
def free() -> Any:
    """The free blocks of an empty pool."""
    return make_pool().free_blocks(0)


@pytest.fixture
def allocator() -> DeviceCachingAllocator:
    return DeviceCachingAllocator(Device(), native=True)


@pytest.mark.parametrize("name", ["Block", "FreeBlocks", "Events", "FastPath"])
@pytest.mark.parametrize("args", [(), (None,), (object(),) * 2, ("",) * 9])
def test_native_types_refuse_wrong_constructor_arguments(name: str, args: tuple[Any, ...]) -> None:
    native: Any = native_module()
    native_type = getattr(native, name)
    with pytest.raises((TypeError, AttributeError)):
        native_type.__new__(native_type, *args)


@pytest.mark.parametrize("name", ["ptr", "size", "requested", "gc_count_base", "event_count"])
@pytest.mark.parametrize("value", ["1", None, 1.5, 1 << 70], ids=repr)
def test_block_number_fields_are_checked(free: Any, name: str, value: Any) -> None:
    block = free.new_block(0, 512)
    with pytest.raises((TypeError, OverflowError)):
        setattr(block, name, value)
    with pytest.raises(TypeError):
        delattr(block, name)


@pytest.mark.parametrize("name", ["prev", "next"])
@pytest.mark.parametrize("value", [1, "", object()], ids=["1", "text", "object"])
def test_prev_and_next_accept_only_blocks(free: Any, name: str, value: Any) -> None:
    block, other = free.new_block(0, 512), free.new_block(512, 512)
    setattr(block, name, other)
    with pytest.raises(TypeError, match="block"):
        setattr(block, name, value)
    assert getattr(block, name) is other
    setattr(block, name, None)
    assert getattr(block, name) is None


@pytest.mark.parametrize(
    "name",
    ["prev", "next", "stack", "segment_stack", "stream_uses", "expandable_segment"],
)
def test_deleted_block_attribute_reads_none(free: Any, name: str) -> None:
    block = free.new_block(0, 512)
    setattr(block, name, free.new_block(512, 512))
    delattr(block, name)
    assert getattr(block, name) is None


@pytest.mark.parametrize("name", ["free", "free_blocks"])
def test_block_fields_of_the_tree_are_read_only(free: Any, name: str) -> None:
    block = free.new_block(0, 512)
    with pytest.raises(AttributeError):
        setattr(block, name, False)
    with pytest.raises((AttributeError, TypeError)):
        delattr(block, name)


def test_foreign_block_is_refused(free: Any) -> None:
    block, foreign = free.new_block(0, 512), make_pool().free_blocks(0).new_block(0, 512)
    for call in (free.add, free.remove):
        for not_a_block in (foreign, None, 1, free):
            with pytest.raises(ValueError, match="not a block of this"):
                call(not_a_block)
    with pytest.raises(ValueError, match="that is free"):
        free.remove(block)
    free.add(block)
    with pytest.raises(ValueError, match="that is not free"):
        free.add(block)
    assert list(free) == [block]


def test_free_block_with_a_changed_size_can_be_removed(free: Any) -> None:
    blocks = [free.new_block(512 * number, 512) for number in range(50)]
    for block in blocks:
        free.add(block)
    for block in blocks:
        block.size = 512 * 100
        free.remove(block)
        assert block not in list(free)
    assert not free


def test_many_equal_blocks_do_not_exhaust_the_stack(free: Any) -> None:
    for _ in range(50_000):
        free.add(free.new_block(0, 512))
    assert len(list(free)) == 50_000
    assert gc.collect() >= 0
    blocks = [free.take(512, 1024) for _ in range(50_000)]
    assert None not in blocks
    assert free.take(512, 1024) is None


@pytest.mark.parametrize("size", [1 << 70, -(1 << 70), "1", None], ids=repr)
def test_search_sizes_are_checked(free: Any, size: Any) -> None:
    with pytest.raises((TypeError, OverflowError)):
        free.blocks_from_size(size)
    with pytest.raises((TypeError, OverflowError)):
        free.take(size, 1)


def test_adjacent_block_of_other_free_blocks_is_not_merged(
    allocator: DeviceCachingAllocator,
) -> None:
    foreign: Any = make_pool().free_blocks(0)
    other = foreign.new_block(0, 512)
    foreign.add(other)
    ptrs = [allocator.alloc(700) for _ in range(3)]
    block: Any = allocator._live_blocks[ptrs[1]]
    old_links = block.prev, block.next
    block.prev = block.next = other
    allocator.free(ptrs[1])
    assert list(foreign) == [other]
    block.prev, block.next = old_links


@pytest.mark.parametrize("value", [None, 1, object()], ids=["None", "1", "object"])
def test_live_entry_that_is_not_a_block_is_not_freed(
    allocator: DeviceCachingAllocator, value: Any
) -> None:
    allocator._live_blocks[7] = value
    with pytest.raises((InvalidPointer, AttributeError)):
        allocator.free(7)


@pytest.mark.parametrize("maxlen", [-1, 0, 1, 100, sys.maxsize])
def test_events_keep_the_last_maxlen(maxlen: int) -> None:
    events = make_events(maxlen)
    for number in range(300):
        events.append((*EVENT[:1], number, *EVENT[2:]))
    expected = min(max(maxlen, 1), 300)
    assert events.count == 300
    assert [event[1] for event in events] == list(range(300 - expected, 300))


@pytest.mark.parametrize("event", [None, [*EVENT], "alloc"])
def test_event_that_is_not_a_tuple_is_refused(event: Any) -> None:
    events = make_events(10)
    with pytest.raises(TypeError):
        events.append(event)
    assert events.count == 0


def make_events(maxlen: int) -> Any:
    native: Any = native_module()
    return native.Events(maxlen, "")


class Finalized:
    """Calls a function when it is deallocated."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def __del__(self) -> None:
        self.call()


def test_finalizer_of_a_dropped_event_can_append_and_read() -> None:
    events = make_events(3)
    events_seen = []

    def append_and_read() -> None:
        events.append(EVENT)
        events_seen.append(list(events))

    for _ in range(20):
        events.append((*EVENT[:5], Finalized(append_and_read), *EVENT[6:]))
    assert events.count == 20 + len(events_seen)
    assert {len(event) for event in events_seen} == {3}


def test_finalizer_can_append_while_events_are_read() -> None:
    events = make_events(100)
    for number in range(100):
        events.append((*EVENT[:5], (object(), number), *EVENT[6:]))

    def append(*_: object) -> None:
        for number in range(40):
            events.append((*EVENT[:5], (object(), number), *EVENT[6:]))

    thresholds = gc.get_threshold()
    gc.callbacks.append(append)
    try:
        gc.set_threshold(1)
        events_read = list(events)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(append)
    assert len(events_read) == 100
    assert all(len(event) == 8 and isinstance(event[5], tuple) for event in events_read)


def test_finalizer_of_a_dropped_event_can_stop_the_history(
    allocator: DeviceCachingAllocator,
) -> None:
    allocator.alloc(MIB)  # A part of the segment stays free.
    allocator.record_history(context=None, max_entries=1)
    ptr = allocator.alloc(700)
    ends = Finalized(lambda: allocator.record_history(None))
    events = allocator._history.events
    events.append((*EVENT[:5], ends, *EVENT[6:]))  # type: ignore[arg-type]
    del ends, events
    allocator.free(ptr)  # The first event of this call drops the event above.
    assert allocator.alloc(700) == ptr


def test_garbage_collection_during_alloc_can_allocate(allocator: DeviceCachingAllocator) -> None:
    old_links = [allocator.alloc(700)]

    def alloc(*_: object) -> None:
        old_links.append(allocator.alloc(700))

    thresholds = gc.get_threshold()
    gc.callbacks.append(alloc)
    try:
        gc.set_threshold(1)
        old_links += [allocator.alloc(700) for _ in range(50)]
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(alloc)
    assert len(old_links) == len(set(old_links))
    for ptr in old_links:
        allocator.free(ptr)
    assert allocator.statistics()["allocation.all.current"] == 0


class Key:
    """Equals an address, and calls a function when compared."""

    def __init__(self, ptr: int, call: Callable[[], object]) -> None:
        self.ptr = ptr
        self.call = call

    def __hash__(self) -> int:
        return hash(self.ptr)

    def __eq__(self, other: object) -> bool:
        self.call()
        return other == self.ptr


def test_key_that_frees_when_compared_frees_once(allocator: DeviceCachingAllocator) -> None:
    ptr = allocator.alloc(700)
    freed: list[int] = []

    def free_and_replace() -> None:
        if not freed:
            freed.append(ptr)
            allocator.free(ptr)
            assert allocator.alloc(500) == ptr

    allocator.free(Key(ptr, free_and_replace))  # type: ignore[arg-type]
    assert allocator.statistics()["allocation.all.current"] == 0
    assert allocator._live_blocks == {}


def test_block_split_from_a_merged_segment_has_no_old_stack(
    allocator: DeviceCachingAllocator,
) -> None:
    allocator.record_history(context="all")
    allocator.alloc(700)
    for _ in range(3):
        ptr = allocator.alloc(700)
        assert allocator._live_blocks[ptr].segment_stack is None
        allocator.free(ptr)


@pytest.mark.parametrize("recorded", [None, "all"])
def test_allocator_in_a_cycle_is_collected(recorded: str | None) -> None:
    allocator: Any = DeviceCachingAllocator(Device(), native=True)
    allocator.record_history(recorded, context="all")
    ptrs = [allocator.alloc(size) for size in (700, MIB, 30 * MIB) for _ in range(5)]
    for ptr in ptrs[::2]:
        allocator.free(ptr)
    pending_frees, engine = allocator._pending_frees, allocator._engine
    allocator._live_blocks[ptrs[1]].stack = [
        allocator
    ]  # a cycle through the fields of native objects
    if recorded:
        allocator._history.events.append((*EVENT[:5], [allocator], *EVENT[6:]))
    references = weakref.ref(pending_frees), weakref.ref(engine)
    del allocator, pending_frees, engine
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_collected_free_blocks_release_their_blocks() -> None:
    free: Any = make_pool().free_blocks(0)
    finalized = [Finalized(lambda: released.append(1)) for _ in range(100)]
    released: list[int] = []
    for number, finalized_object in enumerate(finalized):
        block = free.new_block(512 * number, 512)
        block.expandable_segment = finalized_object
        free.add(block)
    del free, block, finalized, finalized_object
    gc.collect()
    assert len(released) == 100
