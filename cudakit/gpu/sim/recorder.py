"""What the device tells of itself: events, in the order of the calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from cudakit.gpu.sim.tasks import Task
from cudakit.trace.events import Event

Sink: TypeAlias = Callable[[Event], None]

# The tasks that an event's accesses come from, by the number of the graph's node; 0 outside of graphs.
Sources: TypeAlias = Mapping[int, Task]


class Recorder:
    """Hands events to a sink, each followed by its accesses.

    What a kernel accesses is known when it has run: until then its launch waits here, and with it all
    that came after it, so that the sink sees everything in order.
    """

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink
        self._waiting: deque[tuple[Event, Sources]] = deque()

    def record(self, event: Event, sources: Sources) -> None:
        if self._sink is not None:
            self._waiting.append((event, sources))

    def flush(self, *, all_of_it: bool = False) -> None:
        """Hand over what is known by now; at the end, also what will never be."""
        while self._waiting and (all_of_it or _are_known(self._waiting[0][1])):
            self._hand_over(*self._waiting.popleft())

    def _hand_over(self, event: Event, sources: Sources) -> None:
        if self._sink is None:
            return
        self._sink(event)
        for node, task in sources.items():
            for access in task.accesses:
                self._sink(replace(event, fact=replace(access, node=node)))


def _are_known(sources: Sources) -> bool:
    return all(task.done for task in sources.values())
