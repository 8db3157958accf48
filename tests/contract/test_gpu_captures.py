"""Tests queries of a stream capture in progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from contract.workbench import Workbench, refused

from cudakit.gpu.api import LEGACY, Gpu, GraphNode, Stream
from cudakit.gpu.driver_errors import Status

MIB = 1 << 20


@contextmanager
def capturing(gpu: Gpu, stream: Stream) -> Iterator[None]:
    gpu.capture_begin(stream)
    yield
    gpu.destroy_graph(gpu.capture_end(stream))


def ancestors(gpu: Gpu, stream: Stream) -> set[GraphNode]:
    """Return all transitive dependencies of the next captured node of a stream."""
    visited: set[GraphNode] = set()
    remaining = [*gpu.capture_dependencies(stream)]
    while remaining:
        node = remaining.pop()
        if node not in visited:
            visited.add(node)
            remaining += gpu.dependencies(node)
    return visited


def test_capture_has_id_while_in_progress(gpu: Gpu) -> None:
    first, second = gpu.stream(), gpu.stream()
    ids = []
    for stream in (first, second, first):
        assert gpu.capture_id(stream) is None
        with capturing(gpu, stream):
            ids.append(gpu.capture_id(stream))
            assert gpu.capture_id(first if stream == second else second) is None
            assert gpu.capture_id(LEGACY) is None
            assert gpu.capture_dependencies(LEGACY) == ()
    assert gpu.capture_id(first) is None

    assert None not in ids
    assert len(set(ids)) == 3


def test_waiting_streams_join_capture(bench: Workbench) -> None:
    gpu, first, second = bench.gpu, bench.gpu.stream(), bench.gpu.stream()
    with capturing(gpu, first):
        gpu.wait(second, bench.recorded(first))
        assert gpu.capture_id(second) == gpu.capture_id(first)
        gpu.wait(first, bench.recorded(second))
    assert gpu.capture_id(second) is None


def test_concurrent_captures_have_distinct_ids(bench: Workbench) -> None:
    gpu, first, second = bench.gpu, bench.gpu.stream(), bench.gpu.stream()
    value = bench.ints(0)
    with capturing(gpu, first), capturing(gpu, second):
        assert gpu.capture_id(first) != gpu.capture_id(second)
        for stream in (first, second):
            bench.add(value, 1, 1, stream)
        assert not ancestors(gpu, first) & ancestors(gpu, second)


def test_next_captured_node_depends_on_last_node_of_stream(bench: Workbench) -> None:
    gpu, stream, value = bench.gpu, bench.gpu.stream(), bench.ints(0)
    with capturing(gpu, stream):
        assert gpu.capture_dependencies(stream) == ()
        bench.add(value, 1, 1, stream)
        (first,) = gpu.capture_dependencies(stream)
        assert gpu.capture_dependencies(stream) == (first,)
        bench.add(value, 1, 1, stream)
        (second,) = gpu.capture_dependencies(stream)

        assert second != first
        assert gpu.dependencies(first) == ()
        assert gpu.dependencies(second) == (first,)
    assert gpu.capture_dependencies(stream) == ()


def test_waiting_stream_depends_only_on_recorded_work(bench: Workbench) -> None:
    gpu, first, second = bench.gpu, bench.gpu.stream(), bench.gpu.stream()
    value, other_value = bench.ints(0), bench.ints(0)
    with capturing(gpu, first):
        bench.add(value, 1, 1, first)
        gpu.wait(second, bench.recorded(first))
        assert gpu.capture_dependencies(second) == gpu.capture_dependencies(first)
        bench.add(value, 1, 1, first)
        bench.add(other_value, 1, 1, second)
        on_first, on_second = gpu.capture_dependencies(first), gpu.capture_dependencies(second)
        assert len(ancestors(gpu, first)) == len(ancestors(gpu, second)) == 2
        assert not {*on_first} & ancestors(gpu, second)

        gpu.wait(first, bench.recorded(second))
        assert {*gpu.capture_dependencies(first)} == {*on_first, *on_second}
        bench.add(value, 1, 1, first)
        (joined,) = gpu.capture_dependencies(first)
        assert {*gpu.dependencies(joined)} == {*on_first, *on_second}
        assert len(ancestors(gpu, first)) == 4
        assert gpu.capture_dependencies(second) == on_second


def test_invalidated_capture_has_no_id(bench: Workbench) -> None:
    gpu, stream, value = bench.gpu, bench.gpu.stream(), bench.ints(0)
    gpu.capture_begin(stream)
    bench.add(value, 1, 1, stream)
    with refused(Status.STREAM_CAPTURE_UNSUPPORTED):
        gpu.malloc(512)

    assert gpu.capture_id(stream) is None
    assert gpu.capture_dependencies(stream) == ()
    with refused(Status.STREAM_CAPTURE_INVALIDATED):
        gpu.capture_end(stream)


def test_destroyed_stream_cannot_be_queried_for_capture(gpu: Gpu) -> None:
    stream = gpu.stream()
    gpu.destroy_stream(stream)
    with refused(Status.INVALID_HANDLE):
        gpu.capture_id(stream)
    with refused(Status.INVALID_HANDLE):
        gpu.capture_dependencies(stream)


def test_relaxed_thread_allocates_during_capture(bench: Workbench) -> None:
    gpu, stream, value = bench.gpu, bench.gpu.stream(), bench.ints(0)
    gpu.capture_begin(stream)
    with gpu.relaxed():
        with gpu.relaxed():
            ptr = gpu.malloc(MIB)
        pinned = gpu.host_malloc(MIB)
        registered = gpu.host_malloc(MIB, pinned=False)
        gpu.host_register(registered)
        page = gpu.granularity()
        backing, addresses = gpu.create(page), gpu.reserve(page)
        gpu.map(addresses, backing, page)
    bench.add(value, 1, 1, stream)
    executable = gpu.instantiate(gpu.capture_end(stream))
    gpu.graph_launch(executable, stream)

    assert bench.read(value) == [1]
    gpu.unmap(addresses, page)
    gpu.unreserve(addresses, page)
    gpu.release(backing)
    gpu.host_free(pinned)
    gpu.host_unregister(registered)
    gpu.host_free(registered)
    gpu.free(ptr)


def test_thread_is_restricted_again_after_relaxed_block(gpu: Gpu) -> None:
    stream = gpu.stream()
    gpu.capture_begin(stream)
    with pytest.raises(KeyError), gpu.relaxed():
        raise KeyError
    with refused(Status.STREAM_CAPTURE_UNSUPPORTED):
        gpu.malloc(512)
    with refused(Status.STREAM_CAPTURE_INVALIDATED):
        gpu.capture_end(stream)
