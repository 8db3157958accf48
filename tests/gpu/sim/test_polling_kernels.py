"""Tests kernels of the simulated device that poll host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.gpu.api import LEGACY, Kernel, Ptr, Stream
from cudakit.gpu.sim import Launch, Sim

LIMIT_NS = 1_000_000
SOURCE = """
extern "C" __global__ void poll(const int* go, int* late, unsigned long long timeout_ns) {}
extern "C" __global__ void store(int* where, int value) {}
"""


def poll(launch: Launch, release_word: Ptr, late_word: Ptr, timeout_ns: np.uint64) -> None:
    word = launch.read(release_word, np.int32)

    def on_timeout() -> None:
        launch.write(late_word, np.int32)[:] = 1

    launch.poll(lambda: bool(word[0]), int(timeout_ns), on_timeout)


def store(launch: Launch, address: Ptr, value: np.int32) -> None:
    launch.write(address, np.int32)[:] = value


class BlockedStream:
    """A stream blocked by a polling kernel, followed by a store to ``done``."""

    def __init__(self, *, seed: int | None = None) -> None:
        self.gpu = Sim(seed=seed, host_kernels={"poll": poll, "store": store})
        module = self.gpu.load(self.gpu.compile(SOURCE))
        self._poll, self.store = (self.gpu.kernel(module, name) for name in ("poll", "store"))
        self.memory = self.gpu.host_malloc(12)
        self.release_word, self.late_word, self.done_word = (
            Ptr(self.memory + offset) for offset in (0, 4, 8)
        )
        self.words = np.frombuffer(self.gpu.host_view(self.memory, 12), np.int32)
        self.words[:] = 0
        self.stream = self.gpu.stream(blocking=False)
        self.poll(self.stream)
        self.put(self.store, self.done_word, self.stream)

    def poll(self, stream: Stream) -> None:
        args = (self.release_word, self.late_word, np.uint64(LIMIT_NS))
        self.gpu.launch(self._poll, (1, 1, 1), (1, 1, 1), args, stream)

    def put(self, kernel: Kernel, address: Ptr, stream: Stream) -> None:
        self.gpu.launch(kernel, (1, 1, 1), (1, 1, 1), (address, np.int32(1)), stream)


@pytest.fixture
def blocked() -> Iterator[BlockedStream]:
    blocked = BlockedStream()
    with closing(blocked.gpu):
        yield blocked


def test_work_behind_polling_kernel_waits_for_host(blocked: BlockedStream) -> None:
    assert not any(blocked.gpu.query_stream(blocked.stream) for _ in range(500))
    assert blocked.words.tolist() == [0, 0, 0]

    blocked.words[0] = 1
    blocked.gpu.sync_stream(blocked.stream)

    assert blocked.words.tolist() == [1, 0, 1]


def test_polling_kernel_lasts_until_host_signals(blocked: BlockedStream) -> None:
    begin = blocked.gpu.clock.now_ns
    for _ in range(100):
        blocked.gpu.memory_info()
    blocked.words[0] = 1
    blocked.gpu.sync_stream(blocked.stream)

    assert 50_000 <= blocked.gpu.clock.now_ns - begin < 60_000


def test_other_streams_run_during_polling_kernel(blocked: BlockedStream) -> None:
    other_stream, value = blocked.gpu.stream(blocking=False), blocked.gpu.malloc(4)
    blocked.put(blocked.store, value, other_stream)
    blocked.gpu.sync_stream(other_stream)

    assert blocked.words.tolist() == [0, 0, 0]


def test_second_stream_can_end_polling_kernel(blocked: BlockedStream) -> None:
    other_stream = blocked.gpu.stream(blocking=False)
    blocked.put(blocked.store, blocked.release_word, other_stream)
    blocked.gpu.sync_stream(blocked.stream)

    assert blocked.words.tolist() == [1, 0, 1]


def test_waiting_host_reaches_limit_of_polling_kernel(blocked: BlockedStream) -> None:
    begin = blocked.gpu.clock.now_ns
    blocked.gpu.sync()

    assert blocked.words.tolist() == [0, 1, 1]
    assert LIMIT_NS <= blocked.gpu.clock.now_ns - begin < LIMIT_NS + 10_000


def test_querying_host_reaches_limit_of_polling_kernel(blocked: BlockedStream) -> None:
    queries = 0
    while not blocked.gpu.query_stream(blocked.stream) and queries < 10_000:
        queries += 1

    assert blocked.words.tolist() == [0, 1, 1]
    assert queries * blocked.gpu.costs.call_ns == pytest.approx(LIMIT_NS, rel=0.02)


def test_two_polling_kernels_reach_limits_concurrently(blocked: BlockedStream) -> None:
    other_stream = blocked.gpu.stream(blocking=False)
    blocked.poll(other_stream)
    begin = blocked.gpu.clock.now_ns
    blocked.gpu.sync()

    assert LIMIT_NS <= blocked.gpu.clock.now_ns - begin < LIMIT_NS + 10_000


def test_legacy_stream_and_close_wait_for_polling_kernel() -> None:
    blocked = BlockedStream()
    blocked.gpu.sync_stream(LEGACY)
    assert blocked.words.tolist() == [0, 0, 0]  # a stream that is not blocked by the polling kernel

    blocked.gpu.close()
    assert blocked.words.tolist() == [0, 1, 1]


@given(st.integers(0, 2**32), st.booleans())
def test_no_schedule_ends_polling_kernel_early(seed: int, let_go: bool) -> None:
    blocked = BlockedStream(seed=seed)
    with closing(blocked.gpu):
        for _ in range(30):
            blocked.gpu.memory_info()
        assert blocked.words.tolist() == [0, 0, 0]
        blocked.words[0] = let_go
        blocked.gpu.sync_stream(blocked.stream)

        assert blocked.words.tolist() == [let_go, not let_go, 1]
