"""The memory of a process from the batches of its trace."""

from __future__ import annotations

from cudakit.memory.process import END_MARK, OWN_DOMAIN, ProcessMemory
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
