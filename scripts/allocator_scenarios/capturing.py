"""Captures of streams: as the driver makes them, and in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any


class CapturedByDriver:
    """Begins and ends captures. Streams are the driver's handles."""

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

    def _call(self, function: Callable[..., tuple[Any, ...]], *args: object) -> list[Any]:
        status, *values = function(*args)
        if status:
            raise RuntimeError(f"{function.__name__}: {status!r}")
        return values


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
