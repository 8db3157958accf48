"""Streams and events as the simulator keeps them: what the next piece of work has to wait for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cudakit.gpu.sim.capture import Capture, Nodes
from cudakit.gpu.sim.tasks import Task
from cudakit.trace.kinds import StreamFlag


@dataclass(slots=True, eq=False)
class Lane:
    """A stream."""

    number: int
    flag: StreamFlag
    priority: int = 0
    tail: tuple[Task, ...] = ()  # what the next task waits for
    capture: Capture | None = None
    nodes: Nodes = ()  # likewise, of a capture

    @property
    def blocks(self) -> bool:
        """Whether it and the legacy stream wait for each other."""
        return self.flag in (StreamFlag.BLOCKING, StreamFlag.PER_THREAD)


@dataclass(slots=True, eq=False)
class Lanes:
    """The streams of a device, and the rules of order among them.

    CUDA C++ Programming Guide, "Default Stream": what is enqueued in the legacy stream waits for all that
    is in blocking streams, and what is enqueued there later waits for it.
    """

    legacy: Lane
    others: list[Lane] = field(default_factory=list)
    _left: tuple[Task, ...] = ()  # the ends of blocking streams that were destroyed

    def before(self, lane: Lane) -> tuple[Task, ...]:
        """Return what a new task of a stream has to wait for."""
        if lane is self.legacy:
            return _without_past([*lane.tail, *self._blocking_tails()])
        if lane.blocks:
            return _without_past([*lane.tail, *self.legacy.tail])
        return _without_past(lane.tail)

    def work_of(self, lane: Lane) -> tuple[Task, ...]:
        """Return what to wait for to have all that is in a stream done."""
        return self.before(lane) if lane is self.legacy else lane.tail

    def destroy(self, lane: Lane) -> None:
        """Take a stream out; its work goes on."""
        self.others.remove(lane)
        if lane.blocks:
            self._left = _without_past([*self._left, *lane.tail])

    def captures(self) -> list[Capture]:
        """List the captures that blocking streams take part in."""
        return [lane.capture for lane in self.others if lane.blocks and lane.capture]

    def _blocking_tails(self) -> Iterable[Task]:
        yield from self._left
        for lane in self.others:
            if lane.blocks:
                yield from lane.tail


@dataclass(slots=True, eq=False)
class Mark:
    """An event: the place of its last record, in a stream or in a capture."""

    number: int
    timing: bool
    task: Task | None = None
    capture: Capture | None = None
    nodes: Nodes = ()


def _without_past(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Leave out what is over anyway: of all that is done, keep what ended last."""
    left = dict.fromkeys(tasks)
    done = [task for task in left if task.done]
    last = max(done, key=lambda task: task.end_ns, default=None)
    return tuple(task for task in left if not task.done or task is last)
