from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from contract.workbench import Workbench, refused

from cudakit.gpu.api import LEGACY, PER_THREAD, Event, Gpu, Stream
from cudakit.gpu.driver_errors import Status


def follows(bench: Workbench, first: Stream, second: Stream) -> bool:
    """Return whether work of one stream waits for earlier work of another."""
    value, result = bench.ints(0), bench.ints(0)
    bench.gpu.sync()
    bench.spin(first)
    bench.store(value, 1, first)
    bench.move(result, value, second)
    bench.gpu.sync_stream(second)
    waited = bench.gpu.query_stream(first)
    assert bench.read(result) == [int(waited)]
    return waited


def test_stream_work_is_ordered(bench: Workbench) -> None:
    for stream in (bench.gpu.stream(), bench.gpu.stream(blocking=False), LEGACY, PER_THREAD):
        assert follows(bench, stream, stream)


def test_created_streams_are_concurrent(bench: Workbench) -> None:
    gpu = bench.gpu

    assert not follows(bench, gpu.stream(), gpu.stream())
    assert not follows(bench, gpu.stream(), gpu.stream(blocking=False))


def test_legacy_stream_and_blocking_streams_wait_for_each_other(bench: Workbench) -> None:
    stream = bench.gpu.stream()

    assert follows(bench, stream, LEGACY)
    assert follows(bench, LEGACY, stream)


def test_non_blocking_streams_do_not_synchronize_with_legacy_stream(bench: Workbench) -> None:
    stream = bench.gpu.stream(blocking=False)

    assert not follows(bench, stream, LEGACY)
    assert not follows(bench, LEGACY, stream)


def test_per_thread_stream_is_blocking(bench: Workbench) -> None:
    assert follows(bench, PER_THREAD, LEGACY)
    assert follows(bench, LEGACY, PER_THREAD)
    assert not follows(bench, PER_THREAD, bench.gpu.stream())


def test_legacy_stream_orders_blocking_streams(
    bench: Workbench,
) -> None:
    gpu, first, second = bench.gpu, bench.gpu.stream(), bench.gpu.stream()
    value, intermediate, result = bench.ints(0), bench.ints(0), bench.ints(0)
    bench.spin(first)
    bench.store(value, 4, first)
    bench.move(intermediate, value, LEGACY)
    bench.move(result, intermediate, second)
    gpu.sync_stream(second)

    assert bench.read(result) == [4]


def test_per_thread_default_streams_are_independent(bench: Workbench) -> None:
    value = bench.ints(0)
    bench.spin(PER_THREAD)

    def run_in_thread() -> None:
        bench.store(value, 6, PER_THREAD)
        bench.gpu.sync_stream(PER_THREAD)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run_in_thread).result()
    is_pending = not bench.gpu.query_stream(PER_THREAD)

    assert bench.read(value) == [6]
    assert is_pending


def test_stream_query_is_true_after_work_completes(bench: Workbench) -> None:
    stream = bench.gpu.stream()
    before_work = bench.gpu.query_stream(stream)
    bench.spin(stream)
    during_work = bench.gpu.query_stream(stream)
    bench.gpu.sync_stream(stream)

    assert (before_work, during_work, bench.gpu.query_stream(stream)) == (True, False, True)


def test_sync_waits_for_every_stream(bench: Workbench) -> None:
    streams = [bench.gpu.stream(), bench.gpu.stream(blocking=False), PER_THREAD]
    for stream in streams:
        bench.spin(stream)

    bench.gpu.sync()

    assert all(map(bench.gpu.query_stream, streams))


def test_destroyed_stream_completes_its_work(bench: Workbench) -> None:
    stream, value = bench.gpu.stream(), bench.ints(0)
    bench.spin(stream)
    bench.store(value, 7, stream)

    bench.gpu.destroy_stream(stream)

    assert bench.read(value) == [7]


def test_stream_priority_is_clamped(gpu: Gpu) -> None:
    highest = gpu.priority(gpu.stream(priority=-(10**12)))
    lowest = gpu.priority(gpu.stream(priority=10**12))

    assert highest <= 0 <= lowest
    assert gpu.priority(gpu.stream(priority=highest)) == highest
    assert gpu.priority(gpu.stream(priority=lowest)) == lowest
    assert gpu.priority(gpu.stream()) == 0
    assert gpu.priority(LEGACY) == 0


@pytest.mark.parametrize("stream", [LEGACY, PER_THREAD])
def test_default_stream_cannot_be_destroyed(gpu: Gpu, stream: Stream) -> None:
    with refused(Status.INVALID_HANDLE):
        gpu.destroy_stream(stream)
    gpu.sync_stream(stream)


USES: dict[str, Callable[[Gpu, Stream, Event], object]] = {
    "destroy": lambda gpu, stream, _: gpu.destroy_stream(stream),
    "query": lambda gpu, stream, _: gpu.query_stream(stream),
    "sync": lambda gpu, stream, _: gpu.sync_stream(stream),
    "priority": lambda gpu, stream, _: gpu.priority(stream),
    "record": lambda gpu, stream, event: gpu.record(event, stream),
    "wait": lambda gpu, stream, event: gpu.wait(stream, event),
    "malloc": lambda gpu, stream, _: gpu.malloc(8, stream),
    "free": lambda gpu, stream, _: gpu.free(gpu.malloc(8), stream),
    "fill": lambda gpu, stream, _: gpu.fill(gpu.malloc(8), 0, 8, stream),
    "copy": lambda gpu, stream, _: gpu.copy(gpu.malloc(8), gpu.malloc(8), 8, stream),
    "capture": lambda gpu, stream, _: gpu.capture_begin(stream),
}


@pytest.mark.parametrize("call", USES.values(), ids=USES)
def test_destroyed_stream_is_invalid(
    gpu: Gpu, call: Callable[[Gpu, Stream, Event], object]
) -> None:
    stream, event = gpu.stream(), gpu.event()
    gpu.destroy_stream(stream)

    with refused(Status.INVALID_HANDLE) as caught:
        call(gpu, stream, event)
    assert f"stream {stream}" in caught.value.message


def test_stream_ids_are_not_reused(gpu: Gpu) -> None:
    stream = gpu.stream()
    gpu.destroy_stream(stream)

    assert gpu.stream() not in (stream, LEGACY, PER_THREAD)
