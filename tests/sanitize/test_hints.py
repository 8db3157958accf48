"""Sentences about races, and fixes in terms of CUDA and of each framework."""

from __future__ import annotations

import re
from functools import partial

import pytest
from sanitize.sample_races import (
    BLOCKING_STREAM,
    DEFAULT_STREAM,
    EVENT,
    IN_BACKWARD,
    PER_THREAD_STREAM,
    PREFETCH,
    SIDE_STREAM,
    TRAIN_STEP,
    WAIT_EVENT,
    exact_operation,
    found_race,
    kernel,
    race,
    side,
)

from cudakit.sanitize import hints
from cudakit.sanitize.hints import call_site, frameworks, remedies, stream_name
from cudakit.sanitize.races import Operation, RaceKind, Sync, SyncKind
from cudakit.stacks import Frame
from cudakit.trace.kinds import AccessMode, EventKind, Precision, StreamFlag

READ = AccessMode.READ
exact_kernel = partial(kernel, precision=Precision.EXACT)


@pytest.mark.parametrize(
    ("kind", "current", "previous", "sentence"),
    [
        (
            RaceKind.READ_AFTER_WRITE,
            exact_kernel("add"),
            exact_operation(),
            "kernel add on the legacy default stream reads 1.00 KiB that the copy on stream 7 may "
            "still be writing",
        ),
        (
            RaceKind.WRITE_AFTER_READ,
            exact_operation(EventKind.FILL, stream=BLOCKING_STREAM),
            exact_kernel("add"),
            "the memset on stream 9 overwrites 1.00 KiB that kernel add on the legacy default stream "
            "may still be reading",
        ),
        (
            RaceKind.WRITE_AFTER_WRITE,
            exact_operation(EventKind.FILL, stream=BLOCKING_STREAM),
            exact_operation(),
            "the memset on stream 9 writes 1.00 KiB that the copy on stream 7 may still be writing",
        ),
        (
            RaceKind.USE_BEFORE_ALLOCATION,
            exact_kernel("add"),
            exact_operation(EventKind.ALLOC),
            "kernel add on the legacy default stream uses 1.00 KiB while the allocation on stream 7 "
            "may still be pending",
        ),
        (
            RaceKind.USE_AFTER_FREE,
            exact_kernel("add"),
            exact_operation(EventKind.FREE),
            "kernel add on the legacy default stream uses 1.00 KiB that the free on stream 7 has freed",
        ),
        (
            RaceKind.USE_AFTER_FREE,
            exact_operation(EventKind.FREE),
            exact_kernel("add"),
            "the free on stream 7 releases 1.00 KiB that kernel add on the legacy default stream may "
            "still be using",
        ),
        (
            RaceKind.REUSE,
            exact_kernel("add"),
            exact_operation(mode=READ),
            "kernel add on the legacy default stream uses 1.00 KiB of a reused block, while the copy "
            "on stream 7 may still be using the block's previous contents",
        ),
        (
            RaceKind.HOST,
            exact_operation(stream=0, mode=READ, site=WAIT_EVENT),
            exact_operation(),
            "the copy (train.py:59) on the host reads 1.00 KiB that the copy on stream 7 may "
            "still be writing",
        ),
        (
            RaceKind.HOST,
            exact_operation(stream=0, site=WAIT_EVENT),
            exact_operation(mode=READ),
            "the copy (train.py:59) on the host overwrites 1.00 KiB that the copy on stream 7 may "
            "still be reading",
        ),
        (
            RaceKind.READ_AFTER_WRITE,
            exact_kernel("add", graph=2, node=3),
            exact_operation(graph=2, node=2),
            "kernel add (node 3 of graph 2) on the legacy default stream reads 1.00 KiB that the "
            "copy (node 2 of graph 2) on stream 7 may still be writing",
        ),
    ],
)
def test_sentence_names_operations_streams_and_bytes(
    kind: RaceKind, current: Operation, previous: Operation, sentence: str
) -> None:
    assert hints.race_sentence(kind, side(current), side(previous), 1024) == sentence


@pytest.mark.parametrize(
    ("kind", "current", "previous", "fix"),
    [
        (
            RaceKind.READ_AFTER_WRITE,
            kernel(),
            exact_operation(),
            "record an event on stream 7 after the copy (loader.py:31) and make the legacy default "
            "stream wait for it before the kernel (train.py:44)",
        ),
        (
            RaceKind.READ_AFTER_WRITE,
            kernel("add", site=0),
            exact_operation(site=0),
            "record an event on stream 7 after the copy and make the legacy default stream wait for "
            "it before kernel add",
        ),
        (
            RaceKind.USE_AFTER_FREE,
            exact_operation(EventKind.FREE),
            kernel(),
            "record an event on the legacy default stream after the kernel (train.py:44) and make "
            "stream 7 wait for it before the free (loader.py:31), or free the memory on the legacy "
            "default stream",
        ),
        (
            RaceKind.USE_AFTER_FREE,
            kernel(),
            exact_operation(EventKind.FREE),
            "free the memory after its last use: move the free (loader.py:31) after the kernel "
            "(train.py:44); cudakit cannot check that this removes the race",
        ),
        (
            RaceKind.REUSE,
            kernel(),
            exact_operation(),
            "keep a reference to the memory until stream 7 has finished with it, or record an event "
            "on stream 7 after the copy (loader.py:31) and make the legacy default stream wait for "
            "it before the kernel (train.py:44)",
        ),
        (
            RaceKind.HOST,
            exact_operation(stream=0, site=TRAIN_STEP),
            exact_operation(),
            "make the host wait for stream 7, or for an event recorded there after the copy "
            "(loader.py:31), before the host uses the memory at train.py:44",
        ),
        (
            RaceKind.USE_AFTER_FREE,
            exact_operation(EventKind.FREE, stream=0, site=0),
            kernel("add", site=0),
            "make the host wait for the legacy default stream, or for an event recorded there after "
            "kernel add, before the host frees the memory",
        ),
        (
            RaceKind.HOST,
            exact_operation(),
            exact_operation(stream=0, site=TRAIN_STEP),
            "synchronize the host threads: the copy (train.py:44) must finish before the copy "
            "(loader.py:31) is enqueued; cudakit cannot check that this removes the race",
        ),
        (
            RaceKind.WRITE_AFTER_WRITE,
            kernel(graph=2, node=3),
            exact_operation(graph=2, node=2),
            "make node 3, the kernel (train.py:44), depend on node 2, the copy (loader.py:31): add this "
            "dependency to the graph or, if the graph is captured, make the stream of node 3 wait for an "
            "event recorded after node 2",
        ),
    ],
)
def test_fix_is_the_smallest_one(
    kind: RaceKind, current: Operation, previous: Operation, fix: str
) -> None:
    assert hints.smallest_fix(kind, side(current), side(previous)) == fix


@pytest.mark.parametrize(
    ("sync", "sentence"),
    [
        (
            EVENT,
            "too early: the legacy default stream last waited for stream 7 at train.py:59, for an "
            "event recorded at loader.py:30 before the copy (loader.py:31) was enqueued",
        ),
        (
            Sync(SyncKind.EVENT, 101, 0, 104, 0),
            "too early: the legacy default stream last waited for stream 7, for an event recorded "
            "before the copy (loader.py:31) was enqueued",
        ),
        (
            Sync(SyncKind.HOST, 90, WAIT_EVENT, 90, WAIT_EVENT),
            "too early: the host last waited for stream 7 at train.py:59, before the copy "
            "(loader.py:31) was enqueued",
        ),
        (
            Sync(SyncKind.DEFAULT_STREAM, 90, TRAIN_STEP, 91, PREFETCH),
            "too early: the implicit synchronization of the default stream last made the legacy "
            "default stream wait for stream 7 at loader.py:31, before the copy (loader.py:31) was "
            "enqueued",
        ),
    ],
)
def test_last_wait_is_reported_as_too_early(sync: Sync, sentence: str) -> None:
    described_sync = found_race(race(last_sync=sync)).last_sync

    assert described_sync is not None
    assert described_sync.sentence == sentence


@pytest.mark.parametrize(
    ("current", "previous", "words"),
    [
        (
            kernel("add"),
            exact_operation(),
            "receives a pointer to 1.00 KiB that the copy on stream 7 may still be writing",
        ),
        (
            exact_operation(),
            kernel("add"),
            "writes 1.00 KiB that kernel add on the legacy default stream may still be using",
        ),
    ],
)
def test_assumed_access_is_not_stated_as_fact(
    current: Operation, previous: Operation, words: str
) -> None:
    sentence = hints.race_sentence(RaceKind.WRITE_AFTER_WRITE, side(current), side(previous), 1024)

    assert sentence.endswith(words)


def test_work_of_autograd_thread_names_the_start_of_the_backward_pass() -> None:
    described_race = found_race(race(previous=kernel(stream=SIDE_STREAM, site=IN_BACKWARD)))

    assert described_race.hint == (
        "record an event on stream 7 after the kernel (backward pass started at train.py:46) and "
        "make the legacy default stream wait for it before the kernel (train.py:44)"
    )


def test_stream_constants_match_the_stream_table() -> None:
    names = [
        side(exact_operation(stream=stream)).stream
        for stream in (DEFAULT_STREAM, SIDE_STREAM, BLOCKING_STREAM, PER_THREAD_STREAM)
    ]

    assert names == [
        "the legacy default stream",
        "stream 7 (non-blocking)",
        "stream 9",
        "per-thread default stream 11",
    ]


@pytest.mark.parametrize(
    ("kind", "current", "previous", "remedy"),
    [
        (
            RaceKind.READ_AFTER_WRITE,
            kernel(),
            exact_operation(),
            "torch: b.wait_stream(a), where a is stream 7 and b is the legacy default stream",
        ),
        (
            RaceKind.REUSE,
            kernel(),
            exact_operation(mode=AccessMode.READ),
            "torch: tensor.record_stream(a) before the tensor is dropped, where a is stream 7",
        ),
        (
            RaceKind.USE_AFTER_FREE,
            kernel(),
            exact_operation(EventKind.FREE),
            "torch: tensor.record_stream(a) before the tensor is dropped, where a is the legacy "
            "default stream",
        ),
        (
            RaceKind.HOST,
            exact_operation(stream=0, site=2),
            exact_operation(),
            "torch: a.synchronize(), or event.synchronize(), or a copy with non_blocking=False, "
            "where a is stream 7",
        ),
        (
            RaceKind.WRITE_AFTER_WRITE,
            kernel(graph=2, node=3, stream=7),
            exact_operation(graph=2, node=2),
            "torch: b.wait_stream(a), where a is the stream on which the earlier operation was captured "
            "and b is the stream on which the later operation was captured",
        ),
    ],
)
def test_remedy_for_torch_uses_torch_terms(
    kind: RaceKind, current: Operation, previous: Operation, remedy: str
) -> None:
    assert remedies(kind, side(current), side(previous)) == (remedy,)


@pytest.mark.parametrize(
    ("name", "kernel_name", "file"),
    [
        ("torch", "", "/v/site-packages/torch/cuda/streams.py"),
        ("torch", "", "/v/site-packages/triton/runtime/jit.py"),
        ("torch", "void at::native::fill<float>(float*)", ""),
        ("torch", "triton_poi_fused_add_0", ""),
        ("CuPy", "", "/v/site-packages/cupy/_core/core.py"),
        ("CuPy", "cupy_add__float32_float_float32", ""),
        ("Numba", "", "/v/site-packages/numba_cuda/numba/cuda/dispatcher.py"),
        ("Numba", "cudapy::__main__::add[abi:v1](Array<float>)", ""),
        ("JAX", "", "/v/site-packages/jax/_src/api.py"),
        ("cuda.core", "", "/v/site-packages/cuda/core/_stream.py"),
        ("cudakit", "", "/src/cudakit/gpu/sim/device.py"),
    ],
)
def test_framework_is_recognized_by_its_kernels_and_its_files(
    name: str, kernel_name: str, file: str
) -> None:
    current = side(kernel(kernel_name, site=0))
    frames = (Frame("f", file, 1),) if file else ()

    (remedy,) = remedies(RaceKind.READ_AFTER_WRITE, current, side(exact_operation(site=0)), frames)
    assert remedy.startswith(f"{name}: ")


def test_program_without_framework_gets_only_the_general_fix() -> None:
    race_without_framework = found_race(race(current=kernel("add", site=1)))

    assert race_without_framework.remedies == ()
    assert race_without_framework.hint


@pytest.mark.parametrize("kind", RaceKind)
def test_every_framework_has_a_fix_for_every_kind(kind: RaceKind) -> None:
    frames = tuple(Frame("f", f"/v/{name}/x.py", 1) for name in ("torch", "cupy", "numba", "jax"))
    found_race = remedies(kind, side(kernel("add", site=0)), side(exact_operation(site=0)), frames)

    assert len(found_race) == 4
    assert all(
        "where a is" in remedy or not re.search(r"\ba[.,)]", remedy) for remedy in found_race
    )


def test_framework_names_are_unique() -> None:
    assert len({framework.name for framework in frameworks()}) == len(frameworks())


# --- Names of streams and call sites ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "flag", "name"),
    [
        (0, None, "the host"),
        (1, StreamFlag.LEGACY, "the legacy default stream"),
        (7, StreamFlag.NON_BLOCKING, "stream 7 (non-blocking)"),
        (9, StreamFlag.BLOCKING, "stream 9"),
        (11, StreamFlag.PER_THREAD, "per-thread default stream 11"),
        (13, None, "stream 13"),
    ],
)
def test_stream_name_uses_cuda_terms(number: int, flag: StreamFlag | None, name: str) -> None:
    assert stream_name(number, flag) == name


def test_call_site_is_the_file_and_line() -> None:
    frames = (Frame("f", "", 3), Frame("step", "/home/u/train.py", 7), Frame("m", "/x.py", 1))

    assert call_site(frames) == "train.py:7"
    assert call_site(()) == ""
