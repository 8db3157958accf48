"""What ``memviz`` found: the Result that is also its JSON (``cudakit.memviz/1``).

Sizes are bytes and names say so; an event is an index into the device's trace, -1 means "before the
first recorded event"; times are Unix microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cudakit.core.memory.replay import Replay
from cudakit.core.memory.replay.layout import Layout
from cudakit.core.memory.replay.lifetimes import Contradictions
from cudakit.core.memory.snapshot import DeviceTrace, Snapshot
from cudakit.document import Frame
from cudakit.torch_rules.oom_facts import Fit

SCHEMA = "cudakit.memviz/1"
DIFF_SCHEMA = "cudakit.memviz.diff/1"


@dataclass(frozen=True, slots=True)
class State:
    """How much memory was held at one moment; the meanings are those of torch's memory statistics."""

    allocated_bytes: int  # blocks in use, until their free is requested
    requested_bytes: int  # as asked for, in use and pending free
    active_bytes: int  # blocks in use and pending free
    reserved_bytes: int  # segments, taken from the device
    pending_free_bytes: int  # freed by the program, still used by another stream
    segments: int
    blocks: int  # in use and pending free
    allocated_is_derived: bool  # some block sizes follow from rules of the allocator


@dataclass(frozen=True, slots=True)
class Peak:
    """The first moment at which most was requested, and the highest value of each curve."""

    event: int  # the event that led to it
    time_us: int | None
    requested_bytes: int
    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    allocated_is_derived: bool  # some block sizes follow from rules of the allocator
    highest_allocated_bytes: int  # over the whole trace, as torch.cuda.max_memory_allocated()
    highest_active_bytes: int
    highest_reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment that the tables speak of."""

    name: str  # "peak", "end", "oom" or "event"
    event: int
    time_us: int | None
    state: State


@dataclass(frozen=True, slots=True)
class Health:
    """How far the file can be trusted, and what to record differently."""

    contradictions: Contradictions
    begins_complete: bool  # the trace starts from an empty allocator
    overflowed: bool | None  # old events were dropped; null where it cannot be known
    without_stack: float  # share of allocations that have no stack
    has_times: bool
    warnings: tuple[str, ...]
    advice: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Holder:
    """What one call stack held at the moment."""

    bytes: int  # block sizes, in use and pending free
    requested_bytes: int
    count: int
    share: float  # of all bytes held
    stack: tuple[Frame, ...]  # innermost frame first
    site: int  # index in ``stack`` of the innermost frame outside libraries


@dataclass(frozen=True, slots=True)
class Line:
    """What one line of source held at the moment: the innermost frame outside libraries."""

    bytes: int
    count: int
    share: float
    frame: Frame | None  # null: no stack was recorded


@dataclass(frozen=True, slots=True)
class Group:
    """What one value of a facet (an annotation, a compile context, ...) held at the moment."""

    name: str
    bytes: int
    count: int
    share: float


@dataclass(frozen=True, slots=True)
class Facet:
    """The memory held at the moment, divided by one property of the allocations."""

    name: str  # "annotation", "compile_context", "user_metadata", "category"
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """The segments of one pool, stream and kind at the moment."""

    pool: tuple[int, int]
    stream: int  # number of the stream, by first appearance; 0 is the default stream
    kind: str  # "small", "large", "unknown"
    expandable: bool
    segments: int
    reserved_bytes: int
    used_bytes: int
    free_bytes: int
    largest_hole_bytes: int


@dataclass(frozen=True, slots=True)
class Pin:
    """Blocks of one call stack that keep segments from being given back."""

    blocks: int
    bytes: int  # of the blocks
    segments: int  # that hold at least one of them
    pinned_bytes: int  # free in those segments
    alone_bytes: int  # of that, free in segments that hold nothing else
    stack: tuple[Frame, ...]
    site: int


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Free memory inside reserved segments at the moment, and what keeps it there."""

    free_bytes: int
    free_share: float  # of what is reserved (external fragmentation)
    rounding_bytes: int  # block sizes less requests
    rounding_share: float  # of the blocks (internal fragmentation)
    holes: int
    largest_hole_bytes: int
    stranded_bytes: int  # free in segments that hold at least one block
    releasable_bytes: int  # segments that hold nothing
    pins: tuple[Pin, ...]


@dataclass(frozen=True, slots=True)
class Oom:
    """One allocation that failed, and why."""

    event: int
    time_us: int | None
    size_bytes: int  # rounded request
    device_free_bytes: int
    state: State
    largest_hole_bytes: int
    free_bytes: int  # inside reserved segments
    short_bytes: int  # how much less would have to be in use for it to fit; 0 where it could fit
    fit: Fit
    limited: bool  # the device had room: a limit of the process refused
    verdict: str  # "limit", "cache", "pending", "fragmentation", "pool", "capacity"
    sentence: str
    remedies: tuple[str, ...]  # most promising first
    stack: tuple[Frame, ...]
    site: int


@dataclass(frozen=True, slots=True)
class Churn:
    """What one call stack allocated over the whole trace."""

    bytes: int
    count: int
    share: float  # of all bytes allocated
    mean_size_bytes: int
    mean_lifetime_us: float | None  # null without times; of those that ended
    stack: tuple[Frame, ...]
    site: int


@dataclass(frozen=True, slots=True)
class Leak:
    """A call stack that holds more after each step."""

    bytes_per_step: int  # robust slope
    count_per_step: float
    bytes: int  # held at the last step
    count: int
    growth: tuple[int, ...]  # bytes held at each step
    stack: tuple[Frame, ...]
    site: int


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of the program that leaks are judged by."""

    source: str  # "annotation NAME", "snapshot markers", "repeating allocations", "none"
    count: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The curves in at most a few thousand moments; each keeps the highest value of its span."""

    event: tuple[int, ...]  # first event of the span
    time_us: tuple[int, ...] | None
    requested_bytes: tuple[int, ...]
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device of one file."""

    file: str
    device: int | None  # null: pinned host memory
    events: int
    exact: bool  # trace and final state agree in everything
    inconsistencies: int
    end: State
    peak: Peak
    at: Moment
    health: Health
    ooms: tuple[Oom, ...]
    holders: tuple[Holder, ...]
    lines: tuple[Line, ...]
    facets: tuple[Facet, ...]
    segments: tuple[SegmentGroup, ...]
    fragmentation: Fragmentation
    churn: tuple[Churn, ...]
    steps: Steps
    leaks: tuple[Leak, ...]
    timeline: Timeline
    layout: Layout = field(metadata={"json": None})  # at the end
    snapshot: Snapshot = field(metadata={"json": None})
    trace: DeviceTrace = field(metadata={"json": None})
    replay: Replay = field(metadata={"json": None})


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One snapshot file."""

    name: str
    format: str
    size_bytes: int  # uncompressed
    settings: Mapping[str, Any]  # of the allocator, as recorded


@dataclass(frozen=True, slots=True)
class MemoryResult:
    """What was found in all files."""

    schema: str
    files: tuple[FileFacts, ...]
    devices: tuple[DeviceMemory, ...]


@dataclass(frozen=True, slots=True)
class DiffRow:
    """What one call stack held before and after; line numbers and install paths do not tell stacks apart."""

    change_bytes: int
    before_bytes: int
    after_bytes: int
    before_count: int
    after_count: int
    stack: tuple[Frame, ...]  # of the later snapshot where it has it
    site: int


@dataclass(frozen=True, slots=True)
class MomentDiff:
    """Two snapshots compared at one moment of each, the largest change first."""

    before: Moment
    after: Moment
    growth: float | None  # of requested bytes, 0.05 is 5 % more; null where nothing was held before
    grown: tuple[DiffRow, ...]
    shrunk: tuple[DiffRow, ...]
    appeared: tuple[DiffRow, ...]
    vanished: tuple[DiffRow, ...]


@dataclass(frozen=True, slots=True)
class DeviceDiff:
    """One device compared."""

    device: int | None  # of the later snapshot; null: pinned host memory
    before_device: int | None
    peak: MomentDiff
    end: MomentDiff


@dataclass(frozen=True, slots=True)
class DiffResult:
    """What changed from one snapshot to another."""

    schema: str
    before: FileFacts
    after: FileFacts
    devices: tuple[DeviceDiff, ...]

    def grew_beyond(self, limit: float) -> bool:
        """Say whether any device held more than ``limit`` (0.05 is 5 %) more, at its peak or its end."""
        moments = [moment for device in self.devices for moment in (device.peak, device.end)]
        return any(
            moment.after.state.requested_bytes > moment.before.state.requested_bytes * (1 + limit)
            for moment in moments
        )
