"""A host function orders the work that was enqueued before it, however late it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from sanitize.trace_scene import (
    BLOCKING,
    LEGACY,
    NON_BLOCKING,
    READ,
    SIZE,
    WRITE,
    Scene,
    address_of,
)

from cudakit.sanitize.engine import Engine
from cudakit.sanitize.ordering import Call, StreamOrder, SyncTracker
from cudakit.sanitize.races import Race, SyncKind
from cudakit.sanitize.records import reorder_records
from cudakit.trace.events import (
    Access,
    CaptureBegin,
    CaptureEnd,
    Event,
    EventRecord,
    GraphEdge,
    GraphLaunch,
    GraphNode,
    HostCall,
    Launch,
)
from cudakit.trace.kinds import EventKind, HostCallPhase, NodeType, StreamFlag
from cudakit.trace.run_log import LogReader
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import layout, pack, unpack

LOGS = Path(__file__).parents[1] / "sanitize_corpus/logs"
# Number of later calls that are made before the host function runs.
DELAYS = range(4)


def run_after(
    scene: Scene, delay: int, stream: int, event: int, later_calls: list[Callable[[], object]]
) -> None:
    """Make calls, and run the host function after the first ``delay`` of them."""
    for call in later_calls[:delay]:
        call()
    scene.run_host_function(stream, event)
    for call in later_calls[delay:]:
        call()


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("native", [False, None])
def test_only_work_before_host_function_is_ordered(delay: int, native: bool | None) -> None:
    scene = Scene(native=native)
    scene.write(1, "b")
    scene.host_function(1, 1)
    later_calls = [lambda name=name: scene.write(1, name) for name in ("a", "c", "d")]

    run_after(scene, delay, 1, 1, later_calls)

    assert scene.read(2, "b") == []
    (race,) = scene.read(2, "a")
    assert (race.previous.stream, race.current.stream) == (1, 2)


@pytest.mark.parametrize("delay", DELAYS)
def test_host_copy_races_only_with_work_after_host_function(delay: int) -> None:
    """The host reads both buffers by synchronous copies in another stream."""
    scene = Scene()
    scene.write(1, "b")
    scene.host_function(1, 1)

    run_after(scene, delay, 1, 1, [lambda: scene.write(1, "a")] * 3)

    assert scene.copy(2, "H", "b", asynchronous=False) == []
    assert len(scene.copy(2, "H", "a", asynchronous=False)) == 1


@pytest.mark.parametrize("ends_in_order", [True, False])
def test_host_functions_in_flight_on_two_streams_order_only_their_streams(
    ends_in_order: bool,
) -> None:
    scene = Scene()
    for stream, event in ((1, 1), (2, 2)):
        scene.write(stream, f"b{stream}")
        scene.host_function(stream, event)
        scene.write(stream, f"a{stream}")
    first, second = (1, 2) if ends_in_order else (2, 1)

    scene.run_host_function(first, first)

    assert scene.read(3, f"b{first}") == []
    assert len(scene.read(3, f"a{first}")) == 1
    assert len(scene.read(3, f"b{second}")) == 1
    scene.run_host_function(second, second)
    assert scene.read(4, f"b{second}") == []
    assert len(scene.read(4, f"a{second}")) == 1


def test_host_functions_in_flight_on_one_stream_order_the_work_before_each() -> None:
    scene = Scene()
    for event in (1, 2, 3):
        scene.write(1, f"b{event}")
        scene.host_function(1, event)
    scene.write(1, "a")

    for event in (1, 2, 3):
        scene.run_host_function(1, event)
        assert scene.read(1 + event, f"b{event}") == []
        for later in range(event + 1, 4):
            assert len(scene.read(1 + event, f"b{later}")) == 1
    assert len(scene.read(5, "a")) == 1


def test_host_function_orders_work_that_its_stream_waited_for() -> None:
    scene = Scene()
    scene.write(1, "j")
    scene.record(1, 1)
    scene.wait(2, 1)
    scene.host_function(2, 2)
    scene.write(1, "l")
    scene.record(3, 1)
    scene.wait(2, 3)

    scene.run_host_function(2, 2)

    assert scene.read(3, "j") == []
    assert len(scene.read(3, "l")) == 1


def test_host_function_on_legacy_stream_orders_earlier_work_of_blocking_streams() -> None:
    scene = Scene(LEGACY, BLOCKING, NON_BLOCKING)
    scene.write(2, "b")
    scene.host_function(1, 1)
    scene.write(2, "a")

    scene.run_host_function(1, 1)

    assert scene.read(3, "b") == []
    assert len(scene.read(3, "a")) == 1


def test_host_function_may_run_after_its_stream_was_destroyed() -> None:
    scene = Scene(NON_BLOCKING, NON_BLOCKING)
    scene.write(1, "b")
    scene.host_function(1, 1)
    scene.destroy(1)

    scene.call(HostCall(1, HostCallPhase.BEGIN, 1))  # the engine forgets the stream after this call
    scene.call(HostCall(1, HostCallPhase.END, 1))

    assert scene.read(2, "b") == []
    assert scene.engine.gap_counts == {}


def test_host_function_that_runs_during_a_later_capture_orders_the_work_before_it() -> None:
    scene = Scene()
    scene.write(1, "b")
    scene.host_function(1, 1)
    scene.write(1, "a")
    scene.call(CaptureBegin(1, stream=1))

    scene.run_host_function(1, 1)

    assert scene.read(2, "b") == []
    assert len(scene.read(2, "a")) == 1
    scene.call(CaptureEnd(1, stream=1))


@pytest.mark.parametrize("is_launched_before", [True, False])
def test_host_function_orders_a_graph_launch_before_it(is_launched_before: bool) -> None:
    scene = Scene()
    written = Access(address_of("x"), address_of("x") + SIZE, WRITE, node=1)
    scene.call(GraphNode(1, 1, NodeType.COPY), written)
    if is_launched_before:
        scene.call(GraphLaunch(1, 1, executable=1))
    scene.host_function(1, 1)
    if not is_launched_before:
        scene.call(GraphLaunch(1, 1, executable=1))

    scene.run_host_function(1, 1)

    assert len(scene.read(2, "x")) == (not is_launched_before)


def test_host_function_in_a_graph_orders_the_nodes_of_the_graph_only() -> None:
    """The trace does not contain when the host function of a graph runs."""
    scene = Scene()
    for node, node_type in enumerate((NodeType.COPY, NodeType.HOST_CALL, NodeType.COPY), 1):
        mode = {1: WRITE, 3: READ}.get(node)
        accesses = (
            [Access(address_of("x"), address_of("x") + SIZE, mode, node=node)] if mode else []
        )
        scene.call(GraphNode(1, node, node_type), *accesses)
    for before, after in ((1, 2), (2, 3)):
        scene.call(GraphEdge(1, before, after))

    assert scene.call(GraphLaunch(1, 1, executable=1)) == []
    assert len(scene.write(2, "x")) == 1
    scene.sync(1)
    scene.sync(2)
    assert scene.write(3, "x") == []


def test_later_work_is_ordered_after_the_thread_of_a_host_function() -> None:
    scene = Scene(strict_threads=True)
    scene.write(1, "x", thread=1)
    scene.record(1, 1, thread=1)
    scene.call(HostCall(1, HostCallPhase.BEGIN, 1), thread=2)
    scene.write(3, "x", "y", thread=2)
    scene.sync(3, thread=2)
    scene.call(HostCall(1, HostCallPhase.END, 1), thread=2)
    assert scene.write(1, "y", thread=1) == []
    assert len(scene.write(4, "y", thread=1)) == 1


def test_older_trace_orders_all_work_before_the_function_ran() -> None:
    scene = Scene()
    scene.write(1, "b")
    scene.write(1, "a")
    scene.call(HostCall(1, HostCallPhase.BEGIN), HostCall(1, HostCallPhase.END))
    assert scene.read(2, "b", "a") == []


def test_older_record_of_host_function_has_no_event() -> None:
    body_bytes = pack([Event(HostCall(1, HostCallPhase.BEGIN, event=7), seq=1)], lambda _: 0)
    older = body_bytes.copy()
    older["body"] = b"\x01"  # an older recorder wrote the phase, and zeros behind it
    fields = older.view(layout(EventKind.HOST_CALL))
    assert (fields["phase"][0], fields["event"][0]) == (HostCallPhase.BEGIN, 0)


def test_last_synchronization_names_the_enqueueing_and_the_run_of_the_host_function() -> None:
    scene = Scene()
    scene.write(1, "b")
    scene.host_function(1, 1)
    enqueued = scene.seq
    scene.write(1, "a")
    scene.run_host_function(1, 1)

    (race,) = scene.read(2, "a")

    assert race.last_sync is not None
    assert race.last_sync.kind is SyncKind.HOST
    assert (race.last_sync.recorded_seq, race.last_sync.waited_seq) == (enqueued, scene.seq - 1)
    assert enqueued < race.previous.seq < scene.seq - 1


def test_event_before_a_host_function_is_forgotten_after_the_function() -> None:
    order = StreamOrder()
    syncs = SyncTracker(order, Counter())
    record, run = (Call(seq, EventKind.HOST_CALL, 0, 1, 1, 0, 1, 0) for seq in (1, 2))
    order.create_stream(record, StreamFlag.NON_BLOCKING)
    syncs.record_event(record, 1)
    assert len(syncs) == 1
    for phase in HostCallPhase:
        syncs.run_host_function(run, phase, 1)
    assert len(syncs) == 0


def analyzed_gpu_log(variant: str, *, runs_before: str) -> list[Race]:
    """Return the races of a program on a GPU, whose host function runs directly before a kernel."""
    with LogReader(LOGS / f"cupy_host_function_{variant}.npz") as log:
        (batch,) = log.batches()
    calls = [list(call) for _, call in groupby(in_call_order(batch), key=lambda event: event.seq)]
    enqueued = next(i for i, call in enumerate(calls) if isinstance(call[0].body, HostCall))
    first_event = calls[enqueued][0]
    stream, event = first_event.body.stream, 1 << 20
    phases = (HostCallPhase.BEGIN, HostCallPhase.END)
    run = [replace(first_event, body=HostCall(stream, phase, event)) for phase in phases]
    calls[enqueued] = [replace(first_event, body=EventRecord(event, stream))]
    kernel = next(
        i
        for i, call in enumerate(calls)
        if isinstance(call[0].body, Launch) and call[0].body.name.startswith(runs_before)
    )
    calls.insert(kernel, run)
    strings = {"": 0}
    records = pack(
        [replace(event, seq=seq) for seq, call in enumerate(calls, 1) for event in call],
        lambda text: strings.setdefault(text, len(strings)),
    )
    return Engine().feed(records, list(strings))


def in_call_order(batch: Batch) -> list[Event]:
    in_order, never_read_count = reorder_records(batch.records)
    assert never_read_count == 0
    return list(unpack(in_order, batch.strings))


@pytest.mark.parametrize("runs_before", ["cupy_add", "cupy_multiply"])
def test_race_of_gpu_program_is_found_whenever_its_host_function_runs(runs_before: str) -> None:
    (race,) = analyzed_gpu_log("race", runs_before=runs_before)
    assert race.previous.name.startswith("cupy_add")
    assert race.current.name.startswith("cupy_multiply")


def test_gpu_program_that_waits_for_its_host_function_has_no_race() -> None:
    assert analyzed_gpu_log("fixed", runs_before="cupy_multiply") == []
