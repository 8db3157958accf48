"""History: a ring of the latest allocator events, with the call stacks that caused the events.

A stack is gathered as code objects and offsets, before the guard is acquired; lines are looked up when a
snapshot is taken. Source of levels and actions: PyTorch's c10/cuda/CUDACachingAllocator.h (RecordContext,
TraceEntry) and torch/cuda/memory.py (_record_memory_history).
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import IntEnum
from time import perf_counter_ns, time_ns
from types import CodeType, FrameType
from typing import Literal, TypeAlias, cast

from cudakit.allocator.blocks import Block, RawStack
from cudakit.errors import UsageError
from cudakit.torch_rules.oom import DEFAULT_POOL, Frames, PoolId

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

Recorded: TypeAlias = Literal["all", "state"]
Context: TypeAlias = Literal["state", "alloc", "all"]
Stage: TypeAlias = Literal["START", "END"]
# The start or end of a named range: name, stage, time in ns of time.perf_counter_ns.
Annotation: TypeAlias = tuple[str, Stage, int]
# The text that the user set, which is attached to the events that follow; or a tuple of that text and the
# reason why the allocator itself acts.
Metadata: TypeAlias = "str | tuple[str, str]"
# One event: action, address (for an OOM event: free bytes of the device), size, stream, time in ns of
# time.perf_counter_ns, stack, pool, metadata. Creating a plain tuple takes a third of the time of a named
# tuple.
TraceEvent: TypeAlias = "tuple[str, int, int, int, int, RawStack | None, PoolId, Metadata]"


class Level(IntEnum):
    """The events for which call stacks are gathered; each level includes the events of lower levels."""

    NONE = 0
    STATE = 1  # Stacks of the allocations of live blocks.
    ALLOC = 2  # The stacks of ``STATE``, and the stacks of allocations in the trace.
    ALL = 3  # The stacks of ``ALLOC``, and the stacks of frees.


_LEVELS: dict[str | None, Level] = {
    None: Level.NONE,
    "state": Level.STATE,
    "alloc": Level.ALLOC,
    "all": Level.ALL,
}
_TRACE_LEVEL = Level.ALLOC  # A global variable is read faster than an enum member.


def gather_stack(depth: int = 1) -> RawStack:
    """Return the call stack of the caller's caller, without its ``depth - 1`` innermost frames."""
    frame: FrameType | None = sys._getframe(depth + 1)
    stack: list[CodeType | int] = []
    while frame is not None:
        stack += (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return tuple(stack)


class Events:
    """The last ``maxlen`` of ``count`` events; events that are appended later contain ``metadata``."""

    __slots__ = ("count", "maxlen", "metadata", "ring")

    def __init__(self, maxlen: int, metadata: Metadata) -> None:
        self.maxlen = maxlen
        self.metadata = metadata
        self.count = 0
        self.ring: list[TraceEvent] = []  # If full, the next event replaces item count % maxlen.

    def append(self, event: TraceEvent) -> None:
        if len(self.ring) < self.maxlen:
            self.ring.append(event)
        else:
            self.ring[self.count % self.maxlen] = event
        self.count += 1

    def __iter__(self) -> Iterator[TraceEvent]:
        """Iterate over the current events, oldest first; events appended meanwhile are not included."""
        oldest_index = self.count % self.maxlen if len(self.ring) == self.maxlen else 0
        return iter(self.ring[oldest_index:] + self.ring[:oldest_index])


class History:
    """The recorded events and the settings of the recording. Nothing is recorded before ``configure``."""

    __slots__ = (
        "_epoch_ns",
        "_lost_old_events",
        "annotations",
        "events",
        "is_enabled",
        "level",
        "skipped_actions",
    )

    def __init__(self, events_type: type[Events] = Events) -> None:
        self.is_enabled = False
        self.level = Level.NONE
        self.skipped_actions: frozenset[str] = frozenset()
        self.events = events_type(1, "")
        self.annotations: deque[Annotation] = deque(maxlen=1)
        self._lost_old_events = False  # Whether events were dropped from earlier rings.
        self._epoch_ns = time_ns() - perf_counter_ns()

    @property
    def metadata(self) -> Metadata:
        """The text that later events contain."""
        return self.events.metadata

    @metadata.setter
    def metadata(self, text: Metadata) -> None:
        self.events.metadata = text

    @property
    def overflowed(self) -> bool:
        return self._lost_old_events or self.events.count > self.events.maxlen

    def configure(
        self,
        recorded_events: Recorded | None,
        *,
        context: Context | None,
        max_entries: int,
        skip_actions: Collection[str],
        clear: bool,
    ) -> None:
        """Start or stop recording events. Raises UsageError for an invalid setting."""
        if recorded_events is None:
            self.is_enabled, self.level = False, Level.NONE
            return
        if recorded_events not in ("all", "state"):
            raise UsageError(f"cannot record {recorded_events!r}", hint="record 'all' or 'state'")
        if context not in _LEVELS:
            raise UsageError(
                f"{context!r} is no context of stacks", hint="one of 'state', 'alloc', 'all', None"
            )
        if max_entries < 1:
            raise UsageError(f"a trace of {max_entries} entries records nothing", hint="at least 1")
        if unknown_actions := sorted(set(skip_actions) - set(SKIPPABLE)):
            choices = ", ".join(SKIPPABLE)
            raise UsageError(
                f"there is no action {unknown_actions[0]!r} to skip", hint=f"actions: {choices}"
            )
        self.is_enabled, self.level = True, _LEVELS[context]
        self.skipped_actions = frozenset(skip_actions)
        ring_length = max_entries if recorded_events == "all" else 1
        self._lost_old_events = not clear and self.overflowed
        events = type(self.events)(ring_length, self.metadata)
        for trace_event in () if clear else self.events:
            events.append(trace_event)
        self.events = events
        self.annotations = deque(() if clear else self.annotations, maxlen=ring_length)

    def record(
        self,
        action: str,
        address: int,
        size: int,
        stream: int,
        stack: RawStack | None,
        pool: PoolId = DEFAULT_POOL,
    ) -> None:
        if action in self.skipped_actions:
            return
        event_stack = stack if self.level >= _TRACE_LEVEL else None
        self.events.append(
            (action, address, size, stream, perf_counter_ns(), event_stack, pool, self.metadata)
        )

    def record_block(self, action: str, block: Block, stack: RawStack | None) -> None:
        """Append an event of a block; if ``stack`` is None, with the stack of the block."""
        free_blocks = block.free_blocks
        self.record(
            action,
            block.ptr,
            block.requested,
            free_blocks.stream,
            stack or block.stack,
            free_blocks.pool_id,
        )

    @contextmanager
    def tag_events(self, tag: str) -> Iterator[None]:
        """Mark the events in a ``with`` block as caused by the allocator itself, with the reason."""
        text = self.metadata
        self.metadata = (text if isinstance(text, str) else text[0], tag)
        try:
            yield
        finally:
            self.metadata = text

    def annotate(self, block: Block, stack: RawStack | None, text: str) -> None:
        event_stack = stack if self.level >= _TRACE_LEVEL else None
        place = block.ptr, block.requested, block.stream, perf_counter_ns()
        self.events.append((ANNOTATE, *place, event_stack, block.pool.id, text))

    def mark(self, name: str, stage: Stage) -> None:
        """Record that a named range of the program begins or ends."""
        self.annotations.append((name, stage, perf_counter_ns()))

    def unix_us(self, moment_ns: int) -> int:
        """Convert the time of an event to Unix microseconds."""
        return (moment_ns + self._epoch_ns) // 1000


class Stacks:
    """Looks up the frames of raw stacks. Equal stacks give the same object."""

    def __init__(self) -> None:
        self._stacks: dict[RawStack, Frames] = {}
        self._frames: dict[tuple[CodeType, int], dict[str, str | int]] = {}
        self._lines: dict[CodeType, tuple[list[int], list[int]]] = {}

    def frames(self, stack: RawStack | None) -> Frames:
        """Return the frames of a stack in PyTorch's format, innermost first."""
        if not stack:
            return []
        frames = self._stacks.get(stack)
        if frames is None:
            pairs = cast(
                "Iterator[tuple[CodeType, int]]", zip(stack[::2], stack[1::2], strict=True)
            )
            frames = self._stacks[stack] = [self._frame(code, offset) for code, offset in pairs]
        return frames

    def _frame(self, code: CodeType, offset: int) -> dict[str, str | int]:
        frame = self._frames.get((code, offset))
        if frame is None:
            if code not in self._lines:
                starts = [(start, line or 0) for start, _, line in code.co_lines()]
                self._lines[code] = [start for start, _ in starts], [line for _, line in starts]
            starts_of_lines, lines = self._lines[code]
            index = bisect_right(starts_of_lines, offset) - 1
            line = lines[index] if offset >= 0 else code.co_firstlineno
            frame = {"name": code.co_name, "filename": code.co_filename, "line": line}
            self._frames[code, offset] = frame
        return frame
