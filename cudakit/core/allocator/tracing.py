"""The trace: what the allocator did, the latest events, with the stacks of who asked.

Stacks are gathered as code objects and offsets before the allocator is entered; lines are found when
somebody looks. Source of levels and actions: PyTorch's c10/cuda/CUDACachingAllocator.h (RecordContext,
TraceEntry) and torch/cuda/memory.py (_record_memory_history).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import IntEnum
from time import perf_counter_ns, time_ns
from types import CodeType, FrameType
from typing import Literal, TypeAlias

from cudakit.core.allocator.block import Block, Trail
from cudakit.core.allocator.pools import DEFAULT_POOL, PoolId
from cudakit.errors import UsageError

ALLOC = "alloc"
FREE_REQUESTED = "free_requested"
FREE_COMPLETED = "free_completed"
SEGMENT_ALLOC = "segment_alloc"
SEGMENT_FREE = "segment_free"
SEGMENT_MAP = "segment_map"
SEGMENT_UNMAP = "segment_unmap"
ANNOTATE = "annotate"
SNAPSHOT = "snapshot"
OOM = "oom"
SKIPPABLE = (ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, OOM, SNAPSHOT)

History: TypeAlias = Literal["all", "state"]
Context: TypeAlias = Literal["state", "alloc", "all"]
Stage: TypeAlias = Literal["START", "END"]
# One end of a named range: its name, which end, time in ns of time.perf_counter_ns.
Mark: TypeAlias = tuple[str, Stage, int]


class Level(IntEnum):
    """Whose stacks are gathered; each has what those before it have."""

    NONE = 0
    STATE = 1  # of live blocks
    ALLOC = 2  # of allocations in the trace
    ALL = 3  # of frees


_LEVELS: dict[str | None, Level] = {
    None: Level.NONE,
    "state": Level.STATE,
    "alloc": Level.ALLOC,
    "all": Level.ALL,
}
_IN_TRACE = Level.ALLOC  # found faster than a member of its class


# What the user wrote; or that, and why the allocator itself did something.
Metadata: TypeAlias = "str | tuple[str, str]"
# One entry of the trace: action, address (of an OOM: bytes free on the device), size, stream, time in ns of
# time.perf_counter_ns, stack, pool, metadata. A tuple without names is made in a third of the time.
TraceEvent: TypeAlias = "tuple[str, int, int, int, int, Trail | None, PoolId, Metadata]"


def gather(depth: int = 1) -> Trail:
    """Return where the caller's caller was called from, ``depth`` frames left out."""
    frame: FrameType | None = sys._getframe(depth + 1)
    found: list[CodeType | int] = []
    while frame is not None:
        found += (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return tuple(found)


class Recorder:
    """What is recorded, and how. Nothing is, until ``begin``."""

    __slots__ = ("_epoch_ns", "count", "events", "level", "marks", "metadata", "skipped")

    def __init__(self) -> None:
        self.level = Level.NONE
        self.skipped: frozenset[str] = frozenset()
        self.metadata: Metadata = ""
        self.events: deque[TraceEvent] = deque(maxlen=1)
        self.marks: deque[Mark] = deque(maxlen=1)
        self.count = 0  # of events, those that were dropped included
        self._epoch_ns = time_ns() - perf_counter_ns()

    @property
    def overflowed(self) -> bool:
        """Whether old events were dropped."""
        return self.count > len(self.events)

    def begin(
        self,
        history: History,
        *,
        context: Context | None,
        max_entries: int,
        skip_actions: Collection[str] = (),
        clear: bool = False,
    ) -> None:
        """Record from now on. Raises UsageError for a setting that cannot be."""
        _check(history, context, max_entries, skip_actions)
        self.level = _LEVELS[context]
        self.skipped = frozenset(skip_actions)
        kept = () if clear else self.events
        self.count = 0 if clear else self.count
        most = max_entries if history == "all" else 1
        self.events = deque(kept, maxlen=most)
        self.marks = deque(() if clear else self.marks, maxlen=most)

    def end(self) -> None:
        """Record no stacks any more."""
        self.level = Level.NONE

    def record(
        self,
        action: str,
        address: int,
        size: int,
        stream: int,
        stack: Trail | None,
        pool: PoolId = DEFAULT_POOL,
    ) -> None:
        """Append an event."""
        if action in self.skipped:
            return
        self.count += 1
        seen = stack if self.level >= _IN_TRACE else None
        self.events.append(
            (action, address, size, stream, perf_counter_ns(), seen, pool, self.metadata)
        )

    @contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """Say in the entries of what is done within that the allocator itself does it, and why."""
        text = self.metadata
        self.metadata = (text if isinstance(text, str) else text[0], tag)
        try:
            yield
        finally:
            self.metadata = text

    def annotate(self, block: Block, stack: Trail | None, text: str) -> None:
        """Append a text on a live block."""
        seen = stack if self.level >= _IN_TRACE else None
        now = perf_counter_ns()
        self.count += 1
        self.events.append(
            (ANNOTATE, block.ptr, block.requested, block.stream, now, seen, block.pool.id, text)
        )

    def mark(self, name: str, stage: Stage) -> None:
        """Note that a named range of the program begins or ends."""
        self.marks.append((name, stage, perf_counter_ns()))

    def unix_us(self, moment_ns: int) -> int:
        """Return when an event was, in Unix microseconds."""
        return (moment_ns + self._epoch_ns) // 1000


def _check(
    history: str, context: str | None, max_entries: int, skip_actions: Collection[str]
) -> None:
    if history not in ("all", "state"):
        raise UsageError(f"cannot record {history!r}", hint="record 'all' or 'state'")
    if context not in _LEVELS:
        raise UsageError(
            f"{context!r} is no context of stacks", hint="one of 'state', 'alloc', 'all', None"
        )
    if max_entries < 1:
        raise UsageError(f"a trace of {max_entries} entries records nothing", hint="at least 1")
    if unknown := sorted(set(skip_actions) - set(SKIPPABLE)):
        known = ", ".join(SKIPPABLE)
        raise UsageError(f"there is no action {unknown[0]!r} to skip", hint=f"actions: {known}")
