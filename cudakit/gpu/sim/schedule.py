"""The work of a simulated device in virtual time: tasks, what each waits for, and which one runs next.

The rules of order of CUDA are applied when work is enqueued: they decide which tasks a new one waits for.
Any order of execution that respects these dependencies may occur on a real device; the policy chooses one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import NamedTuple

from cudakit.errors import CudaError
from cudakit.trace.events import Access
from cudakit.trace.kinds import Work

# The probability that a device runs one more task before the next call; never 0, so that polling ends.
_PACES = (0.02, 0.2, 0.5, 0.9)


@dataclass(slots=True)
class Clock:
    """The time at the host, in integer nanoseconds since the device was opened; only calls advance it."""

    now_ns: int = 0

    def advance(self, nanoseconds: int) -> None:
        self.now_ns += max(nanoseconds, 0)

    def reach(self, time_ns: int) -> None:
        """Advance to a time, unless it is past."""
        self.now_ns = max(self.now_ns, time_ns)


class Engine(Enum):
    """A copy engine, which runs one task at a time. Kernels and copies within the device run concurrently."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    TO_PEER = 3
    FROM_PEER = 4


class Hold(NamedTuple):
    """A condition that a running job waits for, and what ends the job after a time limit."""

    is_over: Callable[[], bool]
    limit_ns: int
    give_up: Callable[[], None]


class Outcome(NamedTuple):
    """The duration of a job, and the memory that it accessed."""

    cost_ns: int = 0
    accesses: tuple[Access, ...] = ()
    hold: Hold | None = None  # the job runs until it is over, and no less than its cost


@dataclass(frozen=True, slots=True)
class Job:
    """Work of the device, done once or at each launch of a graph."""

    work: Work
    run: Callable[[], Outcome] = Outcome
    name: str = ""
    engine: Engine | None = None
    accesses: tuple[Access, ...] = ()  # those known before it runs


@dataclass(slots=True, eq=False)
class Task:
    """An enqueued job."""

    number: int
    job: Job
    earliest_ns: int
    priority: int
    waiting: int = 0  # the number of tasks that it waits for
    followers: list[Task] = field(default_factory=list)
    accesses: tuple[Access, ...] = ()
    begin_ns: int = 0
    end_ns: int = 0
    done: bool = False


class Schedule:
    """The work of one device. Nothing runs after the first failure, which is ``fault``.

    Without a seed, the task that can begin first runs first. With one, the seed picks among all tasks that
    can run, and how many run between two calls: correctly ordered programs give the same results.
    """

    def __init__(self, clock: Clock, *, seed: int | None) -> None:
        self.fault: CudaError | None = None
        self._clock = clock
        self._ready: InTime | Shuffled = InTime() if seed is None else Shuffled(seed)
        self._count = 0
        self._front_ns = 0  # no task begins before the one that ran last
        self._end_ns = 0  # the latest end of all tasks that ran
        self._engines: dict[Engine, int] = {}
        self._unfinished: dict[int, Task] = {}
        self._held: dict[Task, tuple[Hold, Outcome]] = {}  # running tasks that wait for the host

    @property
    def begin_ns(self) -> int:
        """The begin of the running task."""
        return self._front_ns

    def add(self, job: Job, after: Iterable[Task], *, delay_ns: int = 0, priority: int = 0) -> Task:
        """Enqueue a job that begins after other tasks and after a delay."""
        self._count += 1
        task = Task(self._count, job, self._clock.now_ns + delay_ns, priority)
        for other in after:
            task.earliest_ns = max(task.earliest_ns, other.end_ns)
            if not other.done:
                other.followers.append(task)
                task.waiting += 1
        self._unfinished[task.number] = task
        if not task.waiting:
            self._ready.push(task)
        return task

    def reached(self, tasks: Iterable[Task]) -> bool:
        """Return whether tasks are complete at the time of the host."""
        return all(task.done and task.end_ns <= self._clock.now_ns for task in tasks)

    def catch_up(self) -> None:
        """Run the tasks that are due by now."""
        self._end_holds()
        while self.fault is None and self._ready.is_due(self._clock.now_ns):
            self._run_next()

    def wait(self, tasks: Iterable[Task]) -> None:
        """Run until tasks are complete, and advance the host's time to their end."""
        for task in tasks:
            while not task.done and self.fault is None:
                self._run_next()
            self._clock.reach(task.end_ns)

    def wait_for_all(self) -> None:
        """Run until no task is left."""
        self.wait(list(self._unfinished.values()))
        self._clock.reach(self._end_ns)

    def _run_next(self) -> None:
        if self._held and self._ended_a_hold():
            return
        task = self._next()
        task.begin_ns = self._front_ns = max(task.earliest_ns, self._front_ns)
        try:
            outcome = task.job.run()
        except CudaError as error:
            self.fault = error
            return
        if outcome.hold and not outcome.hold.is_over():
            self._held[task] = outcome.hold, outcome
        else:
            self._finish(task, outcome)

    def _end_holds(self) -> None:
        """End the held tasks whose condition is met, or whose limit has passed."""
        now_ns = max(self._clock.now_ns, self._front_ns)
        for task, (hold, outcome) in [*self._held.items()]:
            if hold.is_over():
                del self._held[task]
                waited_ns = min(now_ns - task.begin_ns, hold.limit_ns)
                self._finish(task, outcome._replace(cost_ns=max(outcome.cost_ns, waited_ns)))
            elif now_ns >= task.begin_ns + hold.limit_ns:
                self._give_up(task)

    def _ended_a_hold(self) -> bool:
        """End held tasks that are due, or the next one if nothing else can run. Return whether one ended."""
        left = len(self._held)
        self._end_holds()
        if self._held and not self._ready:
            self._give_up(
                min(self._held, key=lambda task: task.begin_ns + self._held[task][0].limit_ns)
            )
        return len(self._held) < left

    def _give_up(self, task: Task) -> None:
        hold, outcome = self._held.pop(task)
        hold.give_up()
        self._finish(task, outcome._replace(cost_ns=hold.limit_ns))

    def _next(self) -> Task:
        """Return a task that can run and whose engine is free."""
        while True:
            task = self._ready.pop()
            free_ns = self._engines.get(task.job.engine, 0) if task.job.engine else 0
            if free_ns <= task.earliest_ns:
                return task
            task.earliest_ns = free_ns
            self._ready.push(task)

    def _finish(self, task: Task, outcome: Outcome) -> None:
        task.end_ns = task.begin_ns + outcome.cost_ns
        task.accesses = outcome.accesses
        task.done = True
        self._end_ns = max(self._end_ns, task.end_ns)
        if task.job.engine:
            self._engines[task.job.engine] = task.end_ns
        del self._unfinished[task.number]
        for follower in task.followers:
            follower.earliest_ns = max(follower.earliest_ns, task.end_ns)
            follower.waiting -= 1
            if not follower.waiting:
                self._ready.push(follower)
        task.followers.clear()


class InTime:
    """Runs the task that can begin first; of several, the one of the highest priority."""

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
    """Runs any task at any time; the seed picks the tasks and how fast the device is."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 reproducible, not a secret
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

    def is_due(self, now_ns: int) -> bool:  # noqa: ARG002 tasks run at any time
        return bool(self._tasks) and self._random.random() < self._pace
