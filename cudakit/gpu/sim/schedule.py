"""The task scheduler of a simulated device, in virtual time.

Stream ordering is applied when work is enqueued: it determines the dependencies of each task. A real device
may execute tasks in any order that respects the dependencies; the scheduler picks one such order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import NamedTuple

from cudakit.errors import CudaError
from cudakit.trace.events import Access, CopyRun, FillRun, KernelRun
from cudakit.trace.kinds import NodeType

# Probabilities that one more task runs before the next driver call. All are above 0, because a host that
# polls an event would otherwise wait forever.
_RUN_PROBABILITIES = (0.02, 0.2, 0.5, 0.9)


@dataclass(slots=True)
class Clock:
    """The virtual time of the host, in nanoseconds since the device was opened; only calls advance it."""

    now_ns: int = 0

    def advance(self, nanoseconds: int) -> None:
        self.now_ns += max(nanoseconds, 0)

    def advance_to(self, time_ns: int) -> None:
        """Advance to a time, unless it has passed."""
        self.now_ns = max(self.now_ns, time_ns)


class Engine(Enum):
    """A copy engine, which runs one task at a time. Kernels and copies within the device run concurrently."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    TO_PEER = 3
    FROM_PEER = 4


class Poll(NamedTuple):
    """The condition that a running kernel waits for, with a timeout and the function called after it."""

    is_done: Callable[[], bool]
    timeout_ns: int
    on_timeout: Callable[[], None]


class Outcome(NamedTuple):
    """The duration of a job, and the memory that it accessed."""

    duration_ns: int = 0
    accesses: tuple[Access, ...] = ()
    poll: Poll | None = None  # condition until which the job runs; None: it only takes its duration


@dataclass(frozen=True, slots=True)
class Job:
    """Device work: executed once, or at each launch of a graph."""

    node_type: NodeType
    run: Callable[[], Outcome] = Outcome
    name: str = ""
    engine: Engine | None = None
    accesses: tuple[Access, ...] = ()  # accesses that are known before the job runs
    # The event that a profile shows for this job. Its times and its stream are set when the job ends. None if
    # profiles do not show the job.
    activity: KernelRun | CopyRun | FillRun | None = None


@dataclass(slots=True, eq=False)
class Task:
    """An enqueued job."""

    number: int
    job: Job
    earliest_ns: int
    priority: int
    unfinished_dependencies: int = 0  # number of dependencies that have not finished
    dependents: list[Task] = field(default_factory=list)
    accesses: tuple[Access, ...] = ()
    begin_ns: int = 0
    end_ns: int = 0
    is_done: bool = False


class Schedule:
    """The tasks of one device. After the first failure, stored as ``fault``, no task runs.

    Without a seed, ready tasks run in order of their earliest begin. With a seed, both the order of ready
    tasks and the number of tasks between two calls are random; correctly synchronized programs give the same
    results for every seed.
    """

    def __init__(self, clock: Clock, *, seed: int | None) -> None:
        self.fault: CudaError | None = None
        self._clock = clock
        self._ready_tasks: EarliestFirst | RandomOrder = (
            EarliestFirst() if seed is None else RandomOrder(seed)
        )
        self._task_count = 0
        self._last_begin_ns = 0  # tasks begin in the order in which they run
        self._end_ns = 0  # the latest end of the tasks that ran
        self._engine_free_ns: dict[Engine, int] = {}  # time at which each copy engine becomes free
        self._unfinished_tasks: dict[int, Task] = {}
        # Tasks that run until a condition holds (see Poll): the condition and the outcome of each.
        self._polling_tasks: dict[Task, tuple[Poll, Outcome]] = {}

    @property
    def begin_ns(self) -> int:
        """The time at which the running task began."""
        return self._last_begin_ns

    def add(
        self, job: Job, dependencies: Iterable[Task], *, delay_ns: int = 0, priority: int = 0
    ) -> Task:
        """Enqueue a job that begins after the dependencies have finished and ``delay_ns`` has passed."""
        self._task_count += 1
        task = Task(self._task_count, job, self._clock.now_ns + delay_ns, priority)
        for dependency in dependencies:
            task.earliest_ns = max(task.earliest_ns, dependency.end_ns)
            if not dependency.is_done:
                dependency.dependents.append(task)
                task.unfinished_dependencies += 1
        self._unfinished_tasks[task.number] = task
        if not task.unfinished_dependencies:
            self._ready_tasks.push(task)
        return task

    def are_complete(self, tasks: Iterable[Task]) -> bool:
        """Return whether tasks have completed at the current host time."""
        return all(task.is_done and task.end_ns <= self._clock.now_ns for task in tasks)

    def run_due(self) -> None:
        """Run the tasks that begin no later than the current host time."""
        self._finish_polls()
        while self.fault is None and self._ready_tasks.is_due(self._clock.now_ns):
            self._run_next()

    def wait(self, tasks: Iterable[Task]) -> None:
        """Run until tasks are complete, and advance the host time to their end."""
        for task in tasks:
            while not task.is_done and self.fault is None:
                self._run_next()
            self._clock.advance_to(task.end_ns)

    def wait_for_all(self) -> None:
        """Run all tasks, and advance the host time to their end."""
        self.wait(list(self._unfinished_tasks.values()))
        self._clock.advance_to(self._end_ns)

    def _run_next(self) -> None:
        if self._finish_polls():
            return
        if self._polling_tasks and not self._ready_tasks:
            # No other task can run: the polling task with the earliest timeout ends.
            self._time_out(
                min(
                    self._polling_tasks,
                    key=lambda task: task.begin_ns + self._polling_tasks[task][0].timeout_ns,
                )
            )
            return
        task = self._ready_tasks.pop()
        # A task waits until its copy engine is free.
        while task.job.engine and self._engine_free_ns.get(task.job.engine, 0) > task.earliest_ns:
            task.earliest_ns = self._engine_free_ns[task.job.engine]
            self._ready_tasks.push(task)
            task = self._ready_tasks.pop()
        task.begin_ns = self._last_begin_ns = max(task.earliest_ns, self._last_begin_ns)
        try:
            outcome = task.job.run()
        except CudaError as error:
            self.fault = error
            return
        if outcome.poll and not outcome.poll.is_done():
            self._polling_tasks[task] = outcome.poll, outcome
        else:
            self._finish_task(task, outcome)

    def _finish_polls(self) -> bool:
        """Finish the polling tasks that are done or timed out; return whether any finished."""
        now_ns = max(self._clock.now_ns, self._last_begin_ns)
        polling_count = len(self._polling_tasks)
        for task, (poll, outcome) in [*self._polling_tasks.items()]:
            if poll.is_done():
                del self._polling_tasks[task]
                polled_ns = min(now_ns - task.begin_ns, poll.timeout_ns)
                duration_ns = max(outcome.duration_ns, polled_ns)
                self._finish_task(task, outcome._replace(duration_ns=duration_ns))
            elif now_ns >= task.begin_ns + poll.timeout_ns:
                self._time_out(task)
        return len(self._polling_tasks) < polling_count

    def _time_out(self, task: Task) -> None:
        poll, outcome = self._polling_tasks.pop(task)
        poll.on_timeout()
        self._finish_task(task, outcome._replace(duration_ns=poll.timeout_ns))

    def _finish_task(self, task: Task, outcome: Outcome) -> None:
        task.end_ns = task.begin_ns + outcome.duration_ns
        task.accesses = outcome.accesses
        task.is_done = True
        self._end_ns = max(self._end_ns, task.end_ns)
        if task.job.engine:
            self._engine_free_ns[task.job.engine] = task.end_ns
        del self._unfinished_tasks[task.number]
        for dependent in task.dependents:
            dependent.earliest_ns = max(dependent.earliest_ns, task.end_ns)
            dependent.unfinished_dependencies -= 1
            if not dependent.unfinished_dependencies:
                self._ready_tasks.push(dependent)
        task.dependents.clear()


class EarliestFirst:
    """Orders ready tasks by earliest begin, then priority."""

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


class RandomOrder:
    """Picks ready tasks at random; the seed also determines how many run between two calls."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 reproducible, not a secret
        self._run_probability = self._random.choice(_RUN_PROBABILITIES)
        self._tasks: list[Task] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def push(self, task: Task) -> None:
        self._tasks.append(task)

    def pop(self) -> Task:
        index = self._random.randrange(len(self._tasks))
        self._tasks[index], self._tasks[-1] = self._tasks[-1], self._tasks[index]
        return self._tasks.pop()

    def is_due(self, now_ns: int) -> bool:  # noqa: ARG002 tasks run at any time
        return bool(self._tasks) and self._random.random() < self._run_probability
