"""``cudakit.graph`` on the simulated device, without frameworks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import contract.host_kernels  # noqa: F401 gives the simulated device its kernels
import numpy as np
import pytest
from contract.kernels import SOURCE
from contract.workbench import Workbench

import cudakit
from cudakit.arrays.graph import Graphed
from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import LEGACY, Ptr, Stream
from cudakit.gpu.sim import Sim


@pytest.fixture
def bench() -> Iterator[Workbench]:
    with closing(Sim()) as gpu:
        yield Workbench(gpu, gpu.compile(SOURCE))


class Array:
    """Integers of the simulated device with the CUDA Array Interface."""

    def __init__(self, bench: Workbench, *values: int) -> None:
        self.ptr = bench.ints(*values)
        self.__cuda_array_interface__ = {
            "shape": (len(values),),
            "typestr": "<i4",
            "data": (int(self.ptr), False),
            "version": 3,
        }


def adding(bench: Workbench, value: Ptr, amount: int, **options: int) -> Graphed[str]:
    def add(address: Ptr, stream: Stream) -> str:
        bench.add(address, 1, amount, stream)
        return "added"

    return cudakit.graph(add, value, device=bench.gpu, **options)


def test_replay_repeats_enqueued_work(bench: Workbench) -> None:
    value = bench.ints(0)
    with adding(bench, value, 1, warmup=0) as graphed:
        assert bench.read(value) == [0]
        assert graphed.replay() == "added"
        graphed.replay()

    assert bench.read(value) == [2]


def test_function_runs_warmup_times(bench: Workbench) -> None:
    value = bench.ints(0)
    with adding(bench, value, 1):
        assert bench.read(value) == [3]
    with adding(bench, value, 10, warmup=1):
        assert bench.read(value) == [13]


def test_function_runs_after_earlier_work(bench: Workbench) -> None:
    value, observed, second_array = bench.ints(0), bench.ints(0), bench.gpu.stream(blocking=False)
    bench.spin(second_array)
    bench.store(value, 7, second_array)
    with cudakit.graph(
        lambda stream: bench.move(observed, value, stream), device=bench.gpu, warmup=1
    ):
        assert bench.read(observed) == [7]


def test_call_copies_new_contents_and_replays(bench: Workbench) -> None:
    source, result = Array(bench, 0, 0), Array(bench, 0, 0)

    def work(source: Array, result: Array, stream: Stream) -> Array:
        bench.gpu.copy(result.ptr, source.ptr, 8, stream)
        bench.add(result.ptr, 2, 100, stream)
        return result

    with cudakit.graph(work, source, result, device=bench.gpu) as graphed:
        for values in ((1, 2), (3, 4)):
            assert graphed(Array(bench, *values), result) is result
            assert bench.read(result.ptr, 2) == [value + 100 for value in values]
            assert bench.read(source.ptr, 2) == [*values]


def test_contents_and_replay_are_stream_ordered(bench: Workbench) -> None:
    source, new_array, observed = Array(bench, 0), Array(bench, 0), bench.ints(0)
    stream = bench.gpu.stream(blocking=False)

    def work(source: Array, stream: Stream) -> None:
        bench.move(observed, source.ptr, stream)

    with cudakit.graph(work, source, device=bench.gpu) as graphed:
        bench.spin(stream)
        bench.store(new_array.ptr, 5, stream)
        graphed(new_array, stream=stream)
        bench.store(source.ptr, 6, stream)
        assert bench.read(observed) == [5]
        graphed.replay(stream)
        assert bench.read(observed) == [6]


def test_plain_address_accepts_no_contents(bench: Workbench) -> None:
    value, second_array = bench.ints(4), bench.ints(5)
    with adding(bench, value, 1, warmup=0) as graphed:
        graphed(value)
        assert bench.read(value) == [5]
        with pytest.raises(UsageError, match="buffer 0 was captured as a plain address"):
            graphed(second_array)
        assert bench.read(value) == [5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (3,)}, r"captured as int32 \[2\], got int32 \[3\]"),
        ({"shape": (1, 2)}, r"got int32 \[1, 2\]"),
        ({"typestr": "<f4"}, r"got float32 \[2\]"),
        ({"strides": (8,)}, r"got int32 \[2\], strided"),
    ],
)
def test_mismatched_contents_are_rejected_before_copies(
    bench: Workbench, change: dict[str, object], message: str
) -> None:
    first, second = Array(bench, 1, 1), Array(bench, 2, 2)
    new_array, wrong_array = Array(bench, 3, 3), Array(bench, 4, 4)
    wrong_array.__cuda_array_interface__.update(change)

    def work(first_array: Array, second_array: Array, stream: Stream) -> None:
        bench.gpu.copy(second_array.ptr, first_array.ptr, 8, stream)

    with cudakit.graph(work, first, second, device=bench.gpu, warmup=0) as graphed:
        with pytest.raises(UsageError, match=f"buffer 1 was.*{message}"):
            graphed(new_array, wrong_array)
        with pytest.raises(UsageError, match="2 buffers were captured, 1 given"):
            graphed(new_array)
    assert bench.read(first.ptr, 2) == [1, 1]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("words", "buffer 1 is not a device buffer: str"),
        (1.5, "float"),
        (True, "bool"),
        (None, "NoneType"),
        (np.zeros(3), r"numpy\.ndarray in host memory"),
    ],
)
def test_non_buffer_is_refused(bench: Workbench, argument: object, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        cudakit.graph(lambda *_: None, bench.ints(0), argument, device=bench.gpu)
    assert "functools.partial" in caught.value.hint


def test_update_changes_replay(bench: Workbench) -> None:
    value, amount = bench.ints(0), 1

    def add(address: Ptr, stream: Stream) -> int:
        bench.add(address, 1, amount, stream)
        return amount

    with cudakit.graph(add, value, device=bench.gpu, warmup=0) as graphed:
        amount = 10
        assert (graphed.replay(), graphed.update(), graphed.replay()) == (1, 10, 10)
        assert bench.read(value) == [11]
        graphed.update(lambda address, stream: bench.store(address, 7, stream))
        graphed.replay()
        assert bench.read(value) == [7]
        graphed.update(warmup=2)
        assert bench.read(value) == [7]


def test_failed_update_keeps_old_graph(bench: Workbench) -> None:
    value = bench.ints(0)

    def twice(address: Ptr, stream: Stream) -> None:
        bench.add(address, 1, 1, stream)
        bench.add(address, 1, 1, stream)

    with adding(bench, value, 1, warmup=0) as graphed:
        with pytest.raises(CudaError, match=r"GRAPH_EXEC_UPDATE_FAILURE.*TOPOLOGY_CHANGED"):
            graphed.update(twice)
        assert graphed.replay() == "added"
        assert bench.read(value) == [1]
        graphed.update()


REFUSED = {
    "sync": (
        "STREAM_CAPTURE_UNSUPPORTED",
        lambda gpu, stream: gpu.sync_stream(stream),
        "synchronization",
    ),
    "malloc": ("STREAM_CAPTURE_UNSUPPORTED", lambda gpu, _: gpu.malloc(512), "allocations"),
    "legacy": (
        "STREAM_CAPTURE_IMPLICIT",
        lambda gpu, _: gpu.record(gpu.event(), LEGACY),
        "parameter named `stream`",
    ),
}


@pytest.mark.parametrize(("name", "call_name", "hint"), REFUSED.values(), ids=REFUSED)
def test_uncapturable_work_is_named_and_leaves_nothing_behind(
    bench: Workbench, name: str, call_name: object, hint: str
) -> None:
    gpu, value = bench.gpu, bench.ints(0)

    def work(address: Ptr, stream: Stream) -> None:
        bench.add(address, 1, 1, stream)
        call_name(gpu, stream)  # type: ignore[operator]

    with pytest.raises(CudaError, match=f"CUDA_ERROR_{name}: the function cannot be captured") as e:
        cudakit.graph(work, value, device=gpu, warmup=0)
    assert hint in e.value.hint
    assert "\n" not in e.value.message
    with adding(bench, value, 1, warmup=0) as graphed:
        graphed.replay()
    assert bench.read(value) == [1]


def test_caught_capture_error_is_raised_at_end(bench: Workbench) -> None:
    def work(stream: Stream) -> None:
        with pytest.raises(CudaError):
            bench.gpu.sync_stream(stream)

    with pytest.raises(CudaError, match=r"STREAM_CAPTURE_INVALIDATED.*cannot be captured"):
        cudakit.graph(work, device=bench.gpu, warmup=0)


def test_unjoined_stream_is_reported_with_hint(bench: Workbench) -> None:
    gpu, value, second_array = bench.gpu, bench.ints(0), bench.gpu.stream()

    def work(stream: Stream) -> None:
        gpu.wait(second_array, bench.recorded(stream))
        bench.store(value, 1, second_array)

    with pytest.raises(CudaError, match="STREAM_CAPTURE_UNJOINED") as caught:
        cudakit.graph(work, device=gpu, warmup=0)
    assert "wait for all forked streams" in caught.value.hint


def test_exception_of_function_is_raised_unchanged(bench: Workbench) -> None:
    value = bench.ints(0)

    def work(address: Ptr, stream: Stream) -> None:
        bench.add(address, 1, 1, stream)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cudakit.graph(work, value, device=bench.gpu, warmup=0)
    bench.gpu.sync()
    assert bench.read(value) == [0]


@pytest.mark.parametrize("warmup", [0, 1])
def test_function_that_enqueues_nothing_is_rejected(bench: Workbench, warmup: int) -> None:
    with pytest.raises(UsageError, match="enqueued nothing") as caught:
        cudakit.graph(lambda: None, device=bench.gpu, warmup=warmup)
    assert "stream" in caught.value.hint


def test_garbage_collection_is_off_during_capture(bench: Workbench) -> None:
    value, observed = bench.ints(0), list[bool]()

    def work(address: Ptr, stream: Stream) -> None:
        observed.append(gc.isenabled())
        bench.add(address, 1, 1, stream)

    assert gc.isenabled()
    with cudakit.graph(work, value, device=bench.gpu, warmup=1):
        assert observed == [True, False]
        assert gc.isenabled()


def test_closed_graph_raises_and_device_stays_open(bench: Workbench) -> None:
    graphed = adding(bench, bench.ints(0), 1)
    graphed.close()
    graphed.close()

    for method in (graphed.replay, graphed.update, lambda: graphed(1)):
        with pytest.raises(UsageError, match="was closed"):
            method()
    bench.gpu.sync()


def test_invalid_stream_and_device_are_rejected(bench: Workbench) -> None:
    with (
        adding(bench, bench.ints(0), 1) as graphed,
        pytest.raises(UsageError, match="not a stream of the simulated device"),
    ):
        graphed.replay(SimpleNamespace(ptr=1))
    with pytest.raises(UsageError, match="warmup is -1"):
        adding(bench, bench.ints(0), 1, warmup=-1)
