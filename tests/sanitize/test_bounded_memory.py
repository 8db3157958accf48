"""Tests that the analysis of a program that repeats the same work for a long time needs no more memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType

import numpy as np
import pytest

from cudakit.sanitize.detector import RaceDetector
from cudakit.sanitize.findings import RaceCollector
from cudakit.trace.events import (
    Access,
    Accessed,
    Alloc,
    Copy,
    Event,
    EventBody,
    EventQueryOk,
    EventRecord,
    Fill,
    Free,
    HostCall,
    Launch,
    RangePop,
    RangePush,
    StreamCreate,
    StreamSync,
    StreamWait,
    Template,
    TemplatePointers,
)
from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    AllocationLayer,
    Direction,
    HostCallPhase,
    HostMemory,
    Precision,
    StreamFlag,
    TemplateCheck,
)
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import pack

BASE, PINNED = 0x7F00_0000_0000, 0x100_0000_0000
BATCHES = BASE + (1 << 28)  # buffers to which the side stream copies batches
MAIN, SIDE = 1, 2
READ, WRITE = AccessMode.READ, AccessMode.WRITE
STRINGS = ["", "kernel", "step"]

_VALUES = (int, float, str, bytes, memoryview, type, type(None))
_FUNCTIONS = (FunctionType, MethodType, ModuleType, partial)


def item_counts(root: object) -> Counter[str]:
    """Return the number of items in all containers that an object refers to, by the path of attributes."""
    counts: Counter[str] = Counter()
    seen: set[int] = set()
    remaining = [("", root)]
    while remaining:
        path, found = remaining.pop()
        if isinstance(found, _VALUES + _FUNCTIONS) or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, np.ndarray | bytearray):
            counts[path] += len(found)
        elif isinstance(found, Mapping):
            counts[path] += len(found)
            remaining += [(f"{path}[]", value) for item in found.items() for value in item]
        elif isinstance(found, list | tuple | set | frozenset):
            counts[path] += len(found)
            remaining += [(f"{path}[]", value) for value in found]
        else:
            counts[path] += 1
            remaining += [(f"{path}.{name}", value) for name, value in attributes(found)]
    return counts


def attributes(found: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes of an object, and the number of states of a shadow memory as ranges."""
    for name in ("range_state_count", "pointer_state_count", "strided_state_count"):
        if hasattr(found, name):
            yield name, [None] * getattr(found, name)
    names = list(getattr(found, "__dict__", ()))
    names += [name for cls in type(found).__mro__ for name in getattr(cls, "__slots__", ())]
    for name in names:
        # The last batch has the tables of the trace, which belong to the reader.
        if name != "last_batch":
            yield name, getattr(found, name, None)


Step = Callable[[int], list[list[EventBody]]]


def exact_launch(*accesses: Access, more: tuple[EventBody, ...] = ()) -> list[EventBody]:
    """Return a launch whose accesses were read back from the device."""
    pointers = [Access(each.lo, each.hi, READ | WRITE, Precision.ASSUMED) for each in accesses[:2]]
    return [Launch(MAIN, "kernel", pending=True), *pointers, *accesses, Accessed(), *more]


def template_of_step(number: int) -> list[list[EventBody]]:
    """Return a new signature: launches of its template, of which one is checked, until it is forgotten."""
    template_id, first = 1 + number, BASE + number % 5 * 65536
    # These accesses are not those of an array, so launches may have accessed other bytes.
    accesses = [Access(first + i * i * 100, first + i * i * 100 + 8, WRITE) for i in range(20)]
    pointers = TemplatePointers((first, 0, 0, 0, 0, 0, 0))
    moved = TemplatePointers((first + 65536, 0, 0, 0, 0, 0, 0))
    return [
        exact_launch(*accesses, more=(Template(template_id), pointers)),
        *(
            [Launch(MAIN, "kernel", template_id=template_id, is_relative=True), moved]
            for _ in range(20)
        ),
        exact_launch(*accesses, more=(Template(0, TemplateCheck.EQUAL),)),
        [Template(template_id)],
    ]


def batch_of_step(number: int) -> list[list[EventBody]]:
    """Return the copy of a batch on the side stream, as of a data loader, and a kernel that reads it."""
    buffer, first_event = BATCHES + number % 4 * (1 << 20), 40 * number + 1
    copy = partial(Copy, SIDE, direction=Direction.HOST_TO_DEVICE, host=HostMemory.PINNED)
    return [
        [EventRecord(first_event, MAIN)],
        [StreamWait(SIDE, first_event)],
        [copy(buffer, PINNED + number % 8 * 65536, 65536)],
        [EventRecord(first_event + 1, SIDE)],
        [StreamWait(MAIN, first_event + 1)],
        exact_launch(Access(buffer, buffer + 65536, READ)),
        [Fill(MAIN, BASE + (1 << 26), 4096)],
        *([EventRecord(event, MAIN)] for event in range(first_event + 2, first_event + 40)),
        [EventQueryOk(first_event + 39)],
    ]


def memory_of_step(number: int) -> list[list[EventBody]]:
    """Return an allocation and its release, by the driver at a new address and by a pool."""
    address = BASE + (1 << 40) + number * (1 << 20)
    block = BASE + (1 << 27) + number % 9 * 1024
    return [
        [Alloc(address, 1 << 16)],
        exact_launch(Access(address, address + 4096, WRITE)),
        [Free(address, 1 << 16)],
        [Alloc(block, 1024, layer=AllocationLayer.POOL)],
        exact_launch(Access(block, block + 1024, WRITE)),
        [Free(block, 1024, layer=AllocationLayer.POOL)],
    ]


def host_work_of_step(number: int) -> list[list[EventBody]]:
    """Return a host function, and ranges of the thread and of the process."""
    event = 1_000_000 + number
    return [
        [EventRecord(event, MAIN)],
        [RangePush("step", number=1 + number)],
        [RangePush("step")],
        exact_launch(Access(BASE, BASE + 512, READ)),
        [RangePop()],
        [RangePop(number=1 + number)],
        [HostCall(MAIN, HostCallPhase.BEGIN, event)],
        [HostCall(MAIN, HostCallPhase.END, event)],
    ]


def scattered_reads_of_step(number: int) -> list[list[EventBody]]:
    """Return a kernel that reads other elements of a large table in each step."""
    rows = np.random.default_rng(number).choice(1 << 16, 200, replace=False).tolist()
    first = BASE + (1 << 29)
    return [
        exact_launch(*(Access(first + row * 256, first + row * 256 + 64, READ) for row in rows))
    ]


def largest_counts(step: Step, step_counts: tuple[int, ...]) -> list[Counter[str]]:
    """Analyze a program of many steps; return the largest item counts up to each number of steps.

    The host waits after each step. A batch has ten steps.
    """
    detector, report = RaceDetector(), RaceCollector()
    calls: list[list[EventBody]] = [
        [StreamCreate(MAIN, StreamFlag.LEGACY)],
        [StreamCreate(SIDE, StreamFlag.NON_BLOCKING)],
        [Alloc(BASE, 1 << 31)],
        [Alloc(PINNED, 1 << 24, AllocationKind.PINNED)],
    ]
    seq, largest, results = 0, Counter[str](), []
    for number in range(step_counts[-1]):
        calls += [*step(number), [StreamSync(MAIN)], [StreamSync(SIDE)]]
        if number % 10 < 9:
            continue
        events = [
            Event(body, seq=seq + i, thread=1, context=1, site=1, program_call=seq + i)
            for i, bodies in enumerate(calls, 1)
            for body in bodies
        ]
        seq, calls = seq + len(calls), []
        assert not detector.feed(Batch(1, pack(events, STRINGS.index), STRINGS, [(), ()]), report)
        largest = largest | item_counts((detector, report))
        if number + 1 in step_counts:
            results.append(largest)
    return results


@pytest.mark.parametrize(
    "step",
    [
        template_of_step,
        batch_of_step,
        memory_of_step,
        host_work_of_step,
        scattered_reads_of_step,
    ],
)
def test_analysis_keeps_no_item_of_each_step(step: Step) -> None:
    few_steps, many_steps = largest_counts(step, (50, 500))
    # The tolerance is half an item for each further step, because memory is released after several steps.
    assert [path for path, count in many_steps.items() if count > few_steps[path] + 225] == []
