"""Which of the tasks that could run is next."""

from __future__ import annotations

import random
from heapq import heappop, heappush
from typing import Protocol

from cudakit.gpu.sim.tasks import Task

# How likely a device does one thing more before the next call: never 0, so that who asks often enough
# whether it is done gets a yes.
_PACES = (0.02, 0.2, 0.5, 0.9)


class Policy(Protocol):
    """The tasks that wait for nothing, and which of them is next."""

    def __len__(self) -> int: ...
    def push(self, task: Task) -> None: ...
    def pop(self) -> Task: ...
    def is_due(self, now_ns: int) -> bool: ...


class InTime:
    """The one that can begin first; of several, the one of the highest priority."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Task]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, task: Task) -> None:
        heappush(self._heap, (task.earliest_ns, task.priority, task.number, task))

    def pop(self) -> Task:
        return heappop(self._heap)[-1]

    def is_due(self, now_ns: int) -> bool:
        return bool(self._heap) and self._heap[0][0] <= now_ns


class Shuffled:
    """Any one, at any time, on a device that is as quick or as slow as the seed wants it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 chance that can be repeated, not a secret
        self._pace = self._random.choice(_PACES)
        self._tasks: list[Task] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def push(self, task: Task) -> None:
        self._tasks.append(task)

    def pop(self) -> Task:
        at = self._random.randrange(len(self._tasks))
        self._tasks[at], self._tasks[-1] = self._tasks[-1], self._tasks[at]
        return self._tasks.pop()

    def is_due(self, now_ns: int) -> bool:  # noqa: ARG002 a device may lag, or be quick
        return bool(self._tasks) and self._random.random() < self._pace
