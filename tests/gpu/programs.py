"""Random programs of streams, events, memory and graphs, with and without races."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeAlias

from gpu.happens_before import races
from gpu.kernels import INT_BYTES, SimBench
from hypothesis import strategies as st

from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, PER_THREAD, GraphExec, Ptr
from cudakit.trace.events import Event, EventQueryOk, StreamQueryOk

# An operation, and indices of streams, buffers and events.
Step: TypeAlias = tuple[str, int, int, int]
Program: TypeAlias = Sequence[Step]

STREAMS, BUFFERS, EVENTS = 6, 3, 3
WORDS = (
    *("mix", "mix", "mix", "copy", "fill", "record", "wait", "wait"),
    *("sync stream", "sync event", "query", "borrow", "return", "graph", "replay"),
)


def programs() -> st.SearchStrategy[list[Step]]:
    numbers = (
        st.integers(0, STREAMS - 1),
        st.integers(0, BUFFERS - 1),
        st.integers(0, BUFFERS - 1),
    )
    return st.lists(st.tuples(st.sampled_from(WORDS), *numbers), min_size=5, max_size=16)


def ordered(program: Program) -> list[Step]:
    """Insert a device synchronization before each step that races with an earlier one."""
    result = list(program)
    while True:
        run = Run(result)
        second_times = [race.second.time_ns for race in races(certain_facts(run.trace))]
        if not second_times:
            return result
        result.insert(bisect_left(run.began_ns, min(second_times)) - 1, ("sync", 0, 0, 0))


def certain_facts(trace: Sequence[Event]) -> list[Event]:
    """Remove successful queries, which depend on timing."""
    return [event for event in trace if not isinstance(event.body, (EventQueryOk, StreamQueryOk))]


class Run:
    """A finished program and its results."""

    def __init__(self, program: Program, *, seed: int | None = None) -> None:
        self.trace: list[Event] = []
        self.bench = SimBench(seed=seed, sink=self.trace.append)
        gpu = self.gpu = self.bench.gpu
        self.streams = [LEGACY, PER_THREAD, gpu.stream(), gpu.stream()]
        self.streams += [gpu.stream(blocking=False), gpu.stream(blocking=False)]
        self.events = [gpu.event() for _ in range(EVENTS)]
        self.buffers = [self.bench.ints() for _ in range(BUFFERS)]
        for buffer, value in zip(self.buffers, (7, 11, 13), strict=True):
            self.bench.store(buffer, value)
        gpu.sync()
        self.borrowed: list[Ptr] = []
        self.graphs: list[GraphExec] = []
        self.began_ns: list[int] = []
        self.result: list[int] = []
        self.failure = ""
        try:
            self._do_all(program)
        except CudaError as error:
            self.failure = error.name
        gpu.close()

    def _do_all(self, program: Program) -> None:
        for number, step in enumerate(program, 1):
            self.began_ns.append(self.gpu.clock.now_ns)
            self._do(number, *step)
        self.result = [self.bench.read(buffer)[0] for buffer in self.buffers]

    def _do(self, number: int, operation: str, stream_index: int, target: int, source: int) -> None:
        gpu, stream, event = self.gpu, self.streams[stream_index], self.events[target]
        match operation:
            case "mix":
                self.bench.mix(self.buffers[target], self.buffers[source], number, stream)
            case "copy":
                gpu.copy(self.buffers[target], self.buffers[source], INT_BYTES, stream)
            case "fill":
                gpu.fill(self.buffers[target], number, INT_BYTES, stream)
            case "record":
                gpu.record(event, stream)
            case "wait":
                gpu.wait(stream, event)
            case "sync":
                gpu.sync()
            case "sync stream":
                gpu.sync_stream(stream)
                assert gpu.query_stream(stream)
            case "sync event":
                gpu.sync_event(event)
                assert gpu.query_event(event)
            case _:
                self._do_more(number, operation, stream_index, target, source)

    def _do_more(
        self, number: int, operation: str, stream_index: int, target: int, source: int
    ) -> None:
        match operation:
            case "query":
                self.gpu.query_stream(self.streams[stream_index])
                self.gpu.query_event(self.events[target])
            case "borrow" | "return":
                self._borrow_or_return(operation, stream_index, target)
            case _:
                self._use_graph(operation, number, stream_index, target, source)

    def _borrow_or_return(self, operation: str, stream_index: int, target: int) -> None:
        """Allocate memory in stream order, or free it in the order of another stream."""
        if operation == "borrow":
            ptr = self.gpu.malloc(INT_BYTES, self.streams[stream_index])
            self.gpu.copy(ptr, self.buffers[target], INT_BYTES, self.streams[stream_index])
            self.borrowed.append(ptr)
        elif self.borrowed:
            ptr = self.borrowed.pop()
            self.gpu.copy(self.buffers[target], ptr, INT_BYTES, self.streams[stream_index])
            self.gpu.free(ptr, self.streams[stream_index])

    def _use_graph(
        self, operation: str, number: int, stream_index: int, target: int, source: int
    ) -> None:
        if operation == "replay":
            if self.graphs:
                self.gpu.graph_launch(
                    self.graphs[target % len(self.graphs)], self.streams[stream_index]
                )
            return
        gpu, event = self.gpu, self.gpu.event()
        first, second = gpu.stream(blocking=False), gpu.stream(blocking=False)
        gpu.capture_begin(first)
        self.bench.mix(self.buffers[target], self.buffers[source], number, first)
        gpu.record(event, first)
        gpu.wait(second, event)
        self.bench.mix(self.buffers[target], self.buffers[target], number, second)
        gpu.fill(self.buffers[source], number, 1 if stream_index % 2 else INT_BYTES, second)
        gpu.record(event, second)
        gpu.wait(first, event)
        gpu.copy(self.buffers[source], self.buffers[target], INT_BYTES, first)
        self.graphs.append(gpu.instantiate(gpu.capture_end(first)))
        gpu.graph_launch(self.graphs[-1], self.streams[stream_index])
