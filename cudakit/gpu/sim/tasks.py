"""What the device is given to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from cudakit.trace.events import Access
from cudakit.trace.kinds import Work


class Engine(Enum):
    """What does one thing at a time. Kernels, and copies within the device, run side by side."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    TO_PEER = 3
    FROM_PEER = 4


class Hold(NamedTuple):
    """What a job that runs waits for, something that the host does; and how it ends where that comes late."""

    is_over: Callable[[], bool]
    limit_ns: int
    give_up: Callable[[], None]


class Outcome(NamedTuple):
    """How long a job took, and what of memory it turned out to touch."""

    cost_ns: int = 0
    accesses: tuple[Access, ...] = ()
    hold: Hold | None = None  # it goes on until then, and took no less than its cost


@dataclass(frozen=True, slots=True)
class Job:
    """Something for the device to do, now or each time that a graph is launched."""

    work: Work
    run: Callable[[], Outcome] = Outcome
    name: str = ""
    engine: Engine | None = None
    accesses: tuple[Access, ...] = ()  # that are known beforehand


class Task:
    """A job that was enqueued."""

    __slots__ = (
        "accesses",
        "begin_ns",
        "done",
        "earliest_ns",
        "end_ns",
        "followers",
        "job",
        "number",
        "priority",
        "waiting",
    )

    def __init__(self, number: int, job: Job, earliest_ns: int, priority: int) -> None:
        self.number = number
        self.job = job
        self.earliest_ns = earliest_ns
        self.priority = priority
        self.waiting = 0
        self.followers: list[Task] = []
        self.accesses: tuple[Access, ...] = ()
        self.begin_ns = self.end_ns = 0
        self.done = False
