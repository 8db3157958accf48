"""Captures of streams: as the driver makes them, and in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any


class CapturedByDriver:
    """Begins and ends captures, and knows the graph so far. Streams are the driver's handles."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver

    def begin(self, handle: Any) -> None:
        """Begin a capture in which the thread may allocate (as PyTorch sees to by other means)."""
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._call(self._driver.cuStreamBeginCapture, handle, mode)

    def end(self, handle: Any) -> None:
        """End a capture; nobody needs the graph."""
        (graph,) = self._call(self._driver.cuStreamEndCapture, handle)
        self._call(self._driver.cuGraphDestroy, graph)

    def info(self, handle: Any) -> tuple[int | None, list[Any]]:
        """Return the number of the capture that a stream is in, and the nodes it has come to."""
        active = self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        status, number, _, nodes, *_ = self._call(self._driver.cuStreamGetCaptureInfo, handle)
        return (int(number), list(nodes)) if status == active else (None, [])

    def predecessors(self, node: Any) -> list[Any]:
        """Return what a node depends on."""
        ask = self._driver.cuGraphNodeGetDependencies
        count = self._call(ask, node, 0)[-1]
        return list(self._call(ask, node, count)[0])[:count] if count else []

    def _call(self, function: Callable[..., tuple[Any, ...]], *args: object) -> list[Any]:
        status, *values = function(*args)
        if status:
            raise RuntimeError(f"{function.__name__}: {status!r}")
        return values


class GraphOnGpu:
    """The graph of a capture, as the allocator asks for it; ``handle`` gives that of a stream's number."""

    def __init__(self, captured: CapturedByDriver, handle: Callable[[int], Any]) -> None:
        self._captured = captured
        self._handle = handle
        self._nodes: dict[int, Any] = {}

    def capture(self, stream: int) -> int | None:
        return self._captured.info(self._handle(stream))[0]

    def terminals(self, stream: int) -> Collection[int]:
        return self._numbers(self._captured.info(self._handle(stream))[1])

    def predecessors(self, node: int) -> Collection[int]:
        return self._numbers(self._captured.predecessors(self._nodes[node]))

    def _numbers(self, nodes: Collection[Any]) -> list[int]:
        found = {int(node): node for node in nodes}
        self._nodes |= found
        return list(found)


class GraphInMemory:
    """The graph of a capture that begins on one stream and takes in those that wait for it."""

    def __init__(self, stream: int) -> None:
        self._terminals: dict[int, set[int]] = {stream: set()}
        self._before: list[set[int]] = []  # of each node

    def add(self, stream: int) -> None:
        """Give a captured stream one more node."""
        if stream in self._terminals:
            self._before.append(self._terminals[stream])
            self._terminals[stream] = {len(self._before) - 1}

    def join(self, stream: int, other: int) -> None:
        """Let a stream wait for a captured one."""
        if other in self._terminals:
            own = self._terminals.setdefault(stream, set())
            self._terminals[stream] = own | self._terminals[other]

    def capture(self, stream: int) -> int | None:
        return 1 if stream in self._terminals else None

    def terminals(self, stream: int) -> Collection[int]:
        return self._terminals[stream]

    def predecessors(self, node: int) -> Collection[int]:
        return self._before[node]
