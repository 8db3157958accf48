from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from contract.workbench import INT_BYTES, Workbench, refused

from cudakit.gpu.api import LEGACY, Gpu, Graph, GraphExec, Ptr, Stream
from cudakit.gpu.driver_errors import Status


def captured(bench: Workbench, stream: Stream, work: Callable[[], object]) -> GraphExec:
    bench.gpu.capture_begin(stream)
    work()
    return bench.gpu.instantiate(bench.gpu.capture_end(stream))


def test_graph_replay_uses_new_data(bench: Workbench) -> None:
    gpu, stream = bench.gpu, bench.gpu.stream()
    source, result = bench.ints(1), bench.ints(0)

    def work() -> None:
        gpu.copy(result, source, 4, stream)
        bench.add(result, 1, 10, stream)
        bench.add(result, 1, 100, stream)

    graph = captured(bench, stream, work)
    for value in (1, 2):
        bench.write(source, np.array([value], np.int32))
        gpu.graph_launch(graph, stream)
        assert bench.read(result) == [value + 110]


def test_captured_work_does_not_run(bench: Workbench) -> None:
    stream, value = bench.gpu.stream(), bench.ints(1)
    graph = captured(bench, stream, lambda: bench.add(value, 1, 1, stream))

    assert bench.read(value) == [1]
    bench.gpu.graph_launch(graph, stream)
    assert bench.read(value) == [2]


def test_fill_is_captured(bench: Workbench) -> None:
    stream, value = bench.gpu.stream(), bench.ints(1)
    graph = captured(bench, stream, lambda: bench.gpu.fill(value, 0, 4, stream))

    assert bench.read(value) == [1]
    bench.gpu.graph_launch(graph, stream)
    assert bench.read(value) == [0]


def test_graph_launches_are_stream_ordered(bench: Workbench) -> None:
    stream, value = bench.gpu.stream(), bench.ints(0)
    graph = captured(bench, stream, lambda: bench.add(value, 1, 1, stream))
    other_stream, result = bench.gpu.stream(), bench.ints(0)
    bench.spin(other_stream)
    bench.gpu.graph_launch(graph, other_stream)
    bench.move(result, value, other_stream)
    bench.gpu.graph_launch(graph, other_stream)

    assert bench.read(result) == [1]
    assert bench.read(value) == [2]


def test_empty_capture_gives_empty_graph(bench: Workbench) -> None:
    stream = bench.gpu.stream()
    bench.gpu.graph_launch(captured(bench, stream, lambda: None), stream)
    bench.gpu.sync()


def test_events_fork_and_join_streams_in_capture(bench: Workbench) -> None:
    gpu, first, second = bench.gpu, bench.gpu.stream(), bench.gpu.stream()
    value, result = bench.ints(0), bench.ints(0)

    def work() -> None:
        bench.spin(first, 1_000_000)
        bench.add(value, 1, 1, first)
        gpu.wait(second, bench.recorded(first))
        bench.move(result, value, second)
        gpu.wait(first, bench.recorded(second))
        bench.add(result, 1, 10, first)

    graph = captured(bench, first, work)
    for launches in (1, 2):
        gpu.graph_launch(graph, first)
        assert bench.read(result) == [launches + 10]


def test_graph_outlives_stream_and_executable_outlives_graph(bench: Workbench) -> None:
    gpu, stream, value = bench.gpu, bench.gpu.stream(), bench.ints(0)
    gpu.capture_begin(stream)
    bench.add(value, 1, 3, stream)
    graph = gpu.capture_end(stream)
    gpu.destroy_stream(stream)
    first, second = gpu.instantiate(graph), gpu.instantiate(graph)
    gpu.destroy_graph(graph)
    gpu.graph_launch(first, LEGACY)
    gpu.graph_launch(second, LEGACY)

    assert bench.read(value) == [6]


INVALIDATING_CALLS: dict[str, tuple[Status, Callable[[Gpu, Stream], object]]] = {
    "sync of the stream": (
        Status.STREAM_CAPTURE_UNSUPPORTED,
        lambda gpu, stream: gpu.sync_stream(stream),
    ),
    "query of the stream": (
        Status.STREAM_CAPTURE_UNSUPPORTED,
        lambda gpu, stream: gpu.query_stream(stream),
    ),
    "sync of the device": (Status.STREAM_CAPTURE_UNSUPPORTED, lambda gpu, _: gpu.sync()),
    "malloc": (Status.STREAM_CAPTURE_UNSUPPORTED, lambda gpu, _: gpu.malloc(512)),
    "legacy stream": (
        Status.STREAM_CAPTURE_IMPLICIT,
        lambda gpu, _: gpu.record(gpu.event(), LEGACY),
    ),
}


@pytest.mark.parametrize(
    ("status", "prohibited_call"), INVALIDATING_CALLS.values(), ids=INVALIDATING_CALLS
)
def test_call_that_is_prohibited_in_capture_invalidates_it(
    bench: Workbench, status: Status, prohibited_call: Callable[[Gpu, Stream], object]
) -> None:
    gpu, stream, value = bench.gpu, bench.gpu.stream(), bench.ints(0)
    gpu.capture_begin(stream)
    bench.add(value, 1, 1, stream)

    with refused(status):
        prohibited_call(gpu, stream)
    with refused(Status.STREAM_CAPTURE_INVALIDATED):
        gpu.capture_end(stream)

    bench.store(value, 7, stream)
    assert bench.read(value) == [7]


def test_capture_in_non_blocking_stream_allows_legacy_stream(bench: Workbench) -> None:
    gpu, stream, value = bench.gpu, bench.gpu.stream(blocking=False), bench.ints(0)
    captured(bench, stream, lambda: bench.store(value, 1, LEGACY))

    assert bench.read(value) == [1]
    gpu.sync_stream(stream)


def test_capture_does_not_restrict_other_threads(bench: Workbench) -> None:
    gpu, stream, value = bench.gpu, bench.gpu.stream(), bench.ints(0)
    other_stream = gpu.stream()

    def run_in_thread() -> None:
        gpu.free(gpu.malloc(512))
        bench.store(value, 1, other_stream)
        gpu.sync_stream(other_stream)

    def work() -> None:
        bench.add(value, 1, 1, stream)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(run_in_thread).result()

    graph = captured(bench, stream, work)
    gpu.graph_launch(graph, stream)

    assert bench.read(value) == [2]


def test_unjoined_fork_invalidates_capture(bench: Workbench) -> None:
    gpu, first, second = bench.gpu, bench.gpu.stream(), bench.gpu.stream()
    value = bench.ints(0)
    gpu.capture_begin(first)
    gpu.wait(second, bench.recorded(first))
    bench.store(value, 1, second)

    with refused(Status.STREAM_CAPTURE_UNJOINED):
        gpu.capture_end(first)
    gpu.sync_stream(second)


def test_captured_event_cannot_be_queried(bench: Workbench) -> None:
    gpu, stream = bench.gpu, bench.gpu.stream()
    gpu.capture_begin(stream)
    event = bench.recorded(stream)

    with refused(Status.CAPTURED_EVENT):
        gpu.query_event(event)
    with refused(Status.STREAM_CAPTURE_INVALIDATED):
        gpu.capture_end(stream)


def test_capture_does_not_depend_on_earlier_work(bench: Workbench) -> None:
    gpu, first, second = bench.gpu, bench.gpu.stream(), bench.gpu.stream()
    event = bench.recorded(second)
    gpu.capture_begin(first)

    with refused(Status.STREAM_CAPTURE_ISOLATION):
        gpu.wait(first, event)
    with refused(Status.STREAM_CAPTURE_INVALIDATED):
        gpu.capture_end(first)


def test_second_capture_begin_is_refused_and_capture_continues(bench: Workbench) -> None:
    gpu, stream, value = bench.gpu, bench.gpu.stream(), bench.ints(0)

    def work() -> None:
        with refused(Status.ILLEGAL_STATE):
            gpu.capture_begin(stream)
        bench.add(value, 1, 1, stream)

    gpu.graph_launch(captured(bench, stream, work), stream)

    assert bench.read(value) == [1]


def test_capture_end_without_begin_is_rejected(gpu: Gpu) -> None:
    with refused(Status.ILLEGAL_STATE):
        gpu.capture_end(gpu.stream())


def test_legacy_stream_cannot_be_captured(gpu: Gpu) -> None:
    with refused(Status.STREAM_CAPTURE_UNSUPPORTED):
        gpu.capture_begin(LEGACY)


def test_destroyed_graphs_cannot_be_used(bench: Workbench) -> None:
    gpu, stream = bench.gpu, bench.gpu.stream()
    gpu.capture_begin(stream)
    graph = gpu.capture_end(stream)
    executable = gpu.instantiate(graph)
    gpu.destroy_graph(graph)
    gpu.destroy_graph_exec(executable)

    with refused(Status.INVALID_HANDLE):
        gpu.destroy_graph(graph)
    with refused(Status.INVALID_HANDLE):
        gpu.instantiate(graph)
    with refused(Status.INVALID_HANDLE):
        gpu.graph_launch(executable, stream)
    with refused(Status.INVALID_HANDLE):
        gpu.destroy_graph_exec(executable)


def graph_of(bench: Workbench, stream: Stream, work: Callable[[], object]) -> Graph:
    bench.gpu.capture_begin(stream)
    work()
    return bench.gpu.capture_end(stream)


def test_graph_update_replaces_parameters(bench: Workbench) -> None:
    gpu, stream, first, second = bench.gpu, bench.gpu.stream(), bench.ints(0), bench.ints(0)
    executable = captured(bench, stream, lambda: bench.add(first, 1, 1, stream))
    gpu.graph_launch(executable, stream)
    gpu.graph_update(executable, graph_of(bench, stream, lambda: bench.add(second, 1, 5, stream)))
    gpu.graph_launch(executable, stream)

    assert (bench.read(first), bench.read(second)) == ([1], [5])


def test_graph_update_can_replace_kernel(bench: Workbench) -> None:
    gpu, stream, value = bench.gpu, bench.gpu.stream(), bench.ints(0)
    executable = captured(bench, stream, lambda: bench.add(value, 1, 1, stream))
    gpu.graph_update(executable, graph_of(bench, stream, lambda: bench.store(value, 9, stream)))
    gpu.graph_launch(executable, stream)

    assert bench.read(value) == [9]


def test_graph_update_does_not_change_running_launch(bench: Workbench) -> None:
    gpu, stream, value = bench.gpu, bench.gpu.stream(), bench.ints(0)
    executable = captured(bench, stream, lambda: bench.add(value, 1, 1, stream))
    other_graph = graph_of(bench, stream, lambda: bench.add(value, 1, 10, stream))
    bench.spin(stream)
    gpu.graph_launch(executable, stream)
    gpu.graph_update(executable, other_graph)
    gpu.graph_launch(executable, stream)

    assert bench.read(value) == [11]


def test_executable_outlives_graph_of_update(bench: Workbench) -> None:
    gpu, stream, value = bench.gpu, bench.gpu.stream(), bench.ints(0)
    executable = captured(bench, stream, lambda: bench.add(value, 1, 1, stream))
    other_graph = graph_of(bench, stream, lambda: bench.add(value, 1, 10, stream))
    gpu.graph_update(executable, other_graph)
    gpu.destroy_graph(other_graph)
    gpu.graph_launch(executable, stream)

    assert bench.read(value) == [10]


Work = Callable[[Workbench, Ptr, Stream], object]


def _twice(bench: Workbench, value: Ptr, stream: Stream) -> None:
    bench.add(value, 1, 1, stream)
    bench.add(value, 1, 1, stream)


def _fork(bench: Workbench, value: Ptr, stream: Stream) -> None:
    """Enqueue the additions of ``_twice`` in parallel branches."""
    other_stream = bench.gpu.stream()
    bench.gpu.wait(other_stream, bench.recorded(stream))
    bench.add(value, 1, 1, stream)
    bench.add(Ptr(value + INT_BYTES), 1, 1, other_stream)
    bench.gpu.wait(stream, bench.recorded(other_stream))


DIFFERENT_GRAPHS: dict[str, tuple[str, Work, Work]] = {
    "more nodes": (
        "TOPOLOGY_CHANGED",
        lambda bench, value, stream: bench.add(value, 1, 2, stream),
        _twice,
    ),
    "other edges": ("TOPOLOGY_CHANGED", _twice, _fork),
    "another kind of node": (
        "NODE_TYPE_CHANGED",
        lambda bench, value, stream: bench.add(value, 1, 2, stream),
        lambda bench, value, stream: bench.gpu.fill(value, 0, 4, stream),
    ),
}


@pytest.mark.parametrize(
    ("reason", "work", "other_work"), DIFFERENT_GRAPHS.values(), ids=DIFFERENT_GRAPHS
)
def test_update_with_different_graph_is_refused_without_effect(
    bench: Workbench, reason: str, work: Work, other_work: Work
) -> None:
    gpu, stream, value = bench.gpu, bench.gpu.stream(), bench.ints(0, 0)
    executable = captured(bench, stream, lambda: work(bench, value, stream))
    different_graph = graph_of(bench, stream, lambda: other_work(bench, value, stream))

    with refused(Status.GRAPH_EXEC_UPDATE_FAILURE) as caught:
        gpu.graph_update(executable, different_graph)
    assert reason in caught.value.message
    gpu.graph_launch(executable, stream)
    assert bench.read(value) == [2]


def test_uploaded_graph_runs_once_per_launch(bench: Workbench) -> None:
    gpu, stream, value = bench.gpu, bench.gpu.stream(), bench.ints(0)
    executable = captured(bench, stream, lambda: bench.add(value, 1, 1, stream))
    gpu.graph_upload(executable, stream)
    assert bench.read(value) == [0]
    gpu.graph_launch(executable, stream)
    gpu.graph_upload(executable, stream)
    gpu.graph_launch(executable, stream)

    assert bench.read(value) == [2]


def test_graph_upload_is_stream_ordered(bench: Workbench) -> None:
    gpu, stream, value = bench.gpu, bench.gpu.stream(blocking=False), bench.ints(0)
    result, side_stream = bench.ints(0), gpu.stream(blocking=False)
    executable = captured(bench, stream, lambda: bench.add(value, 1, 1, stream))
    bench.spin(stream)
    bench.store(value, 7, stream)
    gpu.graph_upload(executable, stream)
    gpu.sync_event(bench.recorded(stream))
    bench.move(result, value, side_stream)

    assert bench.read(result) == [7]


def test_graph_upload_waits_for_launches_in_other_streams(bench: Workbench) -> None:
    gpu, value, result = bench.gpu, bench.ints(0), bench.ints(0)
    first, second, third = (gpu.stream(blocking=False) for _ in range(3))

    def work() -> None:
        bench.spin(first)
        bench.store(value, 1, first)

    executable = captured(bench, first, work)
    gpu.graph_launch(executable, first)
    gpu.graph_upload(executable, second)
    gpu.sync_event(bench.recorded(second))
    bench.move(result, value, third)

    assert bench.read(result) == [1]


def test_destroyed_graph_cannot_be_updated_or_uploaded(bench: Workbench) -> None:
    gpu, stream = bench.gpu, bench.gpu.stream()
    graph = graph_of(bench, stream, lambda: None)
    executable = gpu.instantiate(graph)
    gpu.destroy_graph(graph)
    with refused(Status.INVALID_HANDLE):
        gpu.graph_update(executable, graph)
    gpu.destroy_graph_exec(executable)
    with refused(Status.INVALID_HANDLE):
        gpu.graph_update(executable, graph)
    with refused(Status.INVALID_HANDLE):
        gpu.graph_upload(executable, stream)
