""""""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gpu.kernels import ONE_THREAD, SimBench

from cudakit.gpu.api import LEGACY, PER_THREAD, Ptr
from cudakit.gpu.open import open_gpu
from cudakit.gpu.sim import Sim
from cudakit.gpu.sim.recorder import PROCESS_VARIABLE, SPOOL_VARIABLE, attach_to_spool
from cudakit.stacks import Frame, Stack
from cudakit.trace.events import (
    Access,
    Alloc,
    CaptureBegin,
    CaptureEnd,
    ContextSync,
    Copy,
    Event,
    EventBody,
    EventQueryOk,
    EventRecord,
    EventSync,
    Fill,
    Free,
    GraphEdge,
    GraphLaunch,
    GraphNode,
    Launch,
    StreamCreate,
    StreamDestroy,
    StreamQueryOk,
    StreamSync,
    StreamWait,
)
from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    Direction,
    EventKind,
    HostMemory,
    NodeType,
    StreamFlag,
)
from cudakit.trace.spool import Spool
from cudakit.trace.trace_file import Clock, TraceReader, TraceWriter, unpack

READ, WRITE = AccessMode.READ, AccessMode.WRITE


def bodies_of(submit_work: Callable[[SimBench], object], **options: int) -> list[EventBody]:
    """Return the bodies of the trace events of a use of a device."""
    trace: list[Event] = []
    bench = SimBench(sink=trace.append, **options)
    bench.gpu.sync()
    begin = len(trace)
    submit_work(bench)
    bench.gpu.close()
    return [event.body for event in trace[begin:]]


def test_allocations_and_frees_are_traced() -> None:
    def submit_work(bench: SimBench) -> None:
        gpu, stream = bench.gpu, bench.gpu.stream()
        gpu.free(gpu.malloc(100))
        gpu.free(gpu.malloc(200, stream), stream)
        gpu.host_free(gpu.host_malloc(300))
        page = gpu.granularity()
        base, backing = gpu.reserve(page), gpu.create(page)
        gpu.map(base, backing, page)
        gpu.unmap(base, page)

    bodies = [body for body in bodies_of(submit_work) if isinstance(body, (Alloc, Free))]

    expected = [
        (100, AllocationKind.SYNC, 0),
        (200, AllocationKind.STREAM_ORDERED, 3),
        (300, AllocationKind.PINNED, 0),
        (2 << 20, AllocationKind.VIRTUAL, 0),
    ]
    assert [
        (alloc.size_bytes, alloc.allocation_kind, alloc.stream) for alloc in bodies[::2]
    ] == expected
    assert [
        (free.size_bytes, free.allocation_kind, free.stream) for free in bodies[1::2]
    ] == expected
    assert [alloc.address for alloc in bodies[::2]] == [free.address for free in bodies[1::2]]


def test_stream_and_event_calls_are_traced() -> None:
    def submit_work(bench: SimBench) -> None:
        gpu, first = bench.gpu, bench.gpu.stream()
        second = gpu.stream(blocking=False, priority=-1)
        event = gpu.event()
        gpu.record(event, first)
        gpu.wait(second, event)
        gpu.sync_event(event)
        gpu.query_event(event)
        gpu.sync_stream(second)
        gpu.query_stream(first)
        gpu.sync()
        gpu.destroy_stream(first)

    assert bodies_of(submit_work) == [
        StreamCreate(3, StreamFlag.BLOCKING),
        StreamCreate(4, StreamFlag.NON_BLOCKING, -1),
        EventRecord(event=1, stream=3),
        StreamWait(stream=4, event=1),
        EventSync(1),
        EventQueryOk(1),
        StreamSync(4),
        StreamQueryOk(3),
        ContextSync(),
        StreamDestroy(3),
    ]


def test_unsuccessful_query_is_not_traced() -> None:
    def submit_work(bench: SimBench) -> None:
        bench.spin(1_000_000)
        event = bench.gpu.event()
        bench.gpu.record(event, LEGACY)
        assert not bench.gpu.query_event(event)
        assert not bench.gpu.query_stream(LEGACY)

    assert [type(body) for body in bodies_of(submit_work)] == [Launch, EventRecord]


def test_wait_for_unrecorded_event_is_not_traced() -> None:
    assert bodies_of(lambda bench: bench.gpu.wait(LEGACY, bench.gpu.event())) == []


def test_elapsed_is_traced_as_query_of_both_events() -> None:
    def submit_work(bench: SimBench) -> None:
        events = [bench.gpu.event(), bench.gpu.event()]
        for event in events:
            bench.gpu.record(event, LEGACY)
        bench.gpu.sync()
        bench.gpu.elapsed(*events)

    assert bodies_of(submit_work)[-2:] == [EventQueryOk(1), EventQueryOk(2)]


def test_copies_and_fills_are_traced_with_ranges() -> None:
    addresses: list[Ptr] = []

    def submit_work(bench: SimBench) -> None:
        gpu = bench.gpu
        addresses.extend((gpu.malloc(8), gpu.malloc(8), gpu.host_malloc(8)))
        device, other_memory, pinned = addresses
        gpu.copy(device, pinned, 8, LEGACY)
        gpu.copy(pinned, device, 4, LEGACY)
        gpu.copy(other_memory, device, 8, LEGACY)
        gpu.fill(other_memory, 1, 3, LEGACY)

    bodies = bodies_of(submit_work)[3:]

    device, other_memory, pinned = addresses
    host, back = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
    assert bodies == [
        Copy(1, device, pinned, 8, direction=host, host=HostMemory.PINNED),
        Copy(1, pinned, device, 4, direction=back, host=HostMemory.PINNED),
        Copy(1, other_memory, device, 8, direction=Direction.DEVICE_TO_DEVICE),
        Fill(1, other_memory, 3),
    ]


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_launch_is_traced_before_its_accesses(seed: int | None) -> None:
    trace: list[Event] = []
    bench = SimBench(sink=trace.append, seed=seed)
    first_array, second_array = bench.ints(), bench.ints()
    begin = len(trace)
    bench.mix(first_array, second_array, 5, LEGACY)
    bench.gpu.fill(second_array, 0, 4, LEGACY)
    bench.gpu.sync()

    new_events = trace[begin:]
    assert [event.body for event in new_events] == [
        Launch(stream=1, name="mix", grid=ONE_THREAD, block=ONE_THREAD),
        Access(first_array, first_array + 4, READ | WRITE),
        Access(second_array, second_array + 4, READ),
        Fill(1, second_array, 4),
        ContextSync(),
    ]
    assert (
        new_events[0].seq
        == new_events[1].seq
        == new_events[2].seq
        < new_events[3].seq
        < new_events[4].seq
    )


def test_strided_access_is_traced_with_stride() -> None:
    table: list[Ptr] = []

    def submit_work(bench: SimBench) -> None:
        table.append(bench.ints(6))
        bench.launch("column", table[0], np.int32(3), np.int32(2), np.int32(1))

    (access,) = (body for body in bodies_of(submit_work) if isinstance(body, Access))

    assert access == Access(table[0], table[0] + 20, WRITE, stride_bytes=8, count=3)


def test_per_thread_default_streams_have_own_numbers() -> None:
    trace: list[Event] = []
    bench = SimBench(sink=trace.append)
    bench.spin(1, PER_THREAD)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(bench.spin, 1, PER_THREAD).result()
    bench.spin(1, PER_THREAD)
    bench.gpu.close()

    launches = [
        (event.body.stream, event.thread) for event in trace if isinstance(event.body, Launch)
    ]
    created = [event.body for event in trace if isinstance(event.body, StreamCreate)]
    assert launches == [(3, 1), (4, 2), (3, 1)]
    assert created == [
        StreamCreate(1, StreamFlag.LEGACY),
        StreamCreate(3, StreamFlag.PER_THREAD),
        StreamCreate(4, StreamFlag.PER_THREAD),
    ]


def test_capture_is_traced_as_nodes_and_edges() -> None:
    def submit_work(bench: SimBench) -> None:
        gpu, array = bench.gpu, bench.ints()
        first, second = gpu.stream(), gpu.stream()
        event = gpu.event()
        gpu.capture_begin(first)
        bench.store(array, 1, first)
        gpu.record(event, first)
        gpu.wait(second, event)
        gpu.fill(array, 0, 4, second)
        bench.store(array, 2, first)
        gpu.record(event, second)
        gpu.wait(first, event)
        bench.store(array, 3, first)
        gpu.graph_launch(gpu.instantiate(gpu.capture_end(first)), first)

    bodies = bodies_of(submit_work)[5:]

    (fill,) = (body for body in bodies if isinstance(body, Access) and body.node == 2)
    array = fill.lo
    assert bodies == [
        CaptureBegin(graph=1, stream=3),
        GraphNode(1, 1, NodeType.LAUNCH, "store"),
        GraphNode(1, 2, NodeType.FILL),
        Access(array, array + 4, WRITE, node=2),
        GraphEdge(1, before=1, after=2),
        GraphNode(1, 3, NodeType.LAUNCH, "store"),
        GraphEdge(1, before=1, after=3),
        GraphNode(1, 4, NodeType.LAUNCH, "store"),
        GraphEdge(1, before=3, after=4),
        GraphEdge(1, before=2, after=4),
        CaptureEnd(graph=1, stream=3),
        GraphLaunch(stream=3, graph=1, executable=1),
        Access(array, array + 4, WRITE, node=1),
        Access(array, array + 4, WRITE, node=3),
        Access(array, array + 4, WRITE, node=4),
    ]


def test_graph_launched_into_capture_is_inlined() -> None:
    def submit_work(bench: SimBench) -> None:
        gpu, array, stream = bench.gpu, bench.ints(), bench.gpu.stream()
        gpu.capture_begin(stream)
        bench.mix(array, array, 1, stream)
        inner = gpu.instantiate(gpu.capture_end(stream))
        gpu.capture_begin(stream)
        bench.mix(array, array, 2, stream)
        gpu.graph_launch(inner, stream)
        bench.mix(array, array, 3, stream)
        gpu.graph_launch(gpu.instantiate(gpu.capture_end(stream)), stream)
        assert bench.read(array) == [(2 * 32 + 1) * 32 + 3]

    edges = [body for body in bodies_of(submit_work) if isinstance(body, GraphEdge)]

    assert edges == [GraphEdge(2, 1, 2), GraphEdge(2, 2, 3)]


def test_events_have_time_device_and_thread() -> None:
    trace: list[Event] = []
    gpu = Sim(sink=trace.append, current_site=lambda: 42)
    gpu.sync()
    gpu.close()

    assert {(event.device, event.context, event.thread) for event in trace} == {(0, 1, 1)}
    assert trace[-1].site == 42
    assert trace[-1].time_ns > 0


def test_events_round_trip_through_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    trace: list[Event] = []
    frame = Frame("step", "train.py", 7)
    with TraceWriter(path, clock=Clock.VIRTUAL) as writer:

        def sink(event: Event) -> None:
            writer.write(event)
            trace.append(event)

        bench = SimBench(sink=sink, current_site=lambda: writer.stack((frame,)))
        bench.mix(bench.ints(), bench.ints(), 1, LEGACY)
        bench.gpu.close()

    with TraceReader(path) as reader:
        events = [event for batch in reader.batches() for event in unpack(batch, reader.strings)]
        assert reader.stacks[events[-1].site] == (frame,)
    assert events == trace


def test_failed_launch_is_traced() -> None:
    def submit_work(bench: SimBench) -> None:
        bench.store(Ptr(0), 1)
        bench.gpu.query_stream(LEGACY)

    assert bodies_of(submit_work) == [Launch(1, "store")]


PROGRAM = """
from cudakit.gpu.sim import Sim

def step(gpu):
    ptr = gpu.malloc(64)
    gpu.fill(ptr, 1, 64, gpu.stream())

gpu = Sim()
for _ in range(3):
    step(gpu)
"""


LAUNCHES = """
import numpy as np
from cudakit.gpu.api import LEGACY
from cudakit.gpu.sim import Sim, host_kernel

@host_kernel("store")
def store(launch, where, value):
    launch.write(where, np.int32)[:] = value

gpu = Sim()
source = 'extern "C" __global__ void store(int* where, int value) {}'
kernel = gpu.kernel(gpu.load(gpu.compile(source)), "store")
for value in range(100):
    gpu.launch(kernel, (1, 1, 1), (1, 1, 1), (gpu.malloc(4), np.int32(value)), LEGACY)
"""


def run(script: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
    )


def read(directory: Path) -> list[tuple[Event, Stack]]:
    with Spool(directory) as spool:
        return [
            (event, batch.stacks[event.site])
            for batch in spool.batches()
            for event in unpack(batch.records, batch.strings)
        ]


def kinds(directory: Path) -> list[EventKind]:
    return [event.body.kind for event, _ in read(directory)]


def test_device_of_traced_program_writes_to_spool(tmp_path: Path) -> None:
    result = run(PROGRAM, {SPOOL_VARIABLE: str(tmp_path)})

    assert (result.returncode, result.stderr) == (0, "")
    assert kinds(tmp_path).count(EventKind.ALLOC) == 3
    assert kinds(tmp_path).count(EventKind.FILL) == 3


def test_event_has_call_stack(tmp_path: Path) -> None:
    run(PROGRAM, {SPOOL_VARIABLE: str(tmp_path)})

    stacks = {stack for event, stack in read(tmp_path) if event.body.kind is EventKind.ALLOC}
    (stack,) = stacks
    assert [(frame.name, frame.filename, frame.line) for frame in stack] == [
        ("step", "<string>", 5),
        ("<module>", "<string>", 10),
    ]


def test_pending_work_is_traced_at_exit(tmp_path: Path) -> None:
    result = run(LAUNCHES, {SPOOL_VARIABLE: str(tmp_path)})

    assert (result.returncode, result.stderr) == (0, "")
    assert kinds(tmp_path).count(EventKind.LAUNCH) == kinds(tmp_path).count(EventKind.ACCESS) == 100


def test_events_before_sigkill_are_kept(tmp_path: Path) -> None:
    end = "gpu.sync(); import os, signal; os.kill(os.getpid(), signal.SIGKILL)"

    run(PROGRAM + end, {SPOOL_VARIABLE: str(tmp_path)})

    assert kinds(tmp_path).count(EventKind.FILL) == 3


def test_untraced_process_writes_no_spool(tmp_path: Path) -> None:
    assert attach_to_spool({}) is None
    assert attach_to_spool({SPOOL_VARIABLE: str(tmp_path), PROCESS_VARIABLE: "1"}) is None
    assert (
        attach_to_spool({SPOOL_VARIABLE: str(tmp_path), PROCESS_VARIABLE: str(os.getpid())})
        is not None
    )


def test_device_with_sink_does_not_use_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SPOOL_VARIABLE, str(tmp_path))
    events: list[Event] = []

    Sim(sink=events.append).malloc(8)

    assert events
    assert kinds(tmp_path) == []


def test_device_opened_by_name_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPOOL_VARIABLE, str(tmp_path))
    gpu = open_gpu("sim")
    ptr = gpu.malloc(8)
    gpu.fill(ptr, 0, 8, LEGACY)
    gpu.close()

    traces = read(tmp_path)
    assert traces[-1][0].body.kind is EventKind.FILL
    assert traces[-1][1][0].filename == __file__
