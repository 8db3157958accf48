"""The results of ``memviz``, which are also its JSON documents.

Sizes are in bytes, times in Unix microseconds. An event is an index into the trace of the device; -1 is
before the first recorded event. JSON fields with "hole" in their names are free blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cudakit.memory.history import History, Layout, State
from cudakit.memory.lifetimes import Contradictions
from cudakit.memory.snapshot import DeviceTrace, Snapshot
from cudakit.stacks import Frame
from cudakit.torch_rules.oom import Fit

SCHEMA = "cudakit.memviz/1"
DIFF_SCHEMA = "cudakit.memviz.diff/1"


@dataclass(frozen=True, slots=True)
class Peak:
    """The first moment with the most requested memory, and the maximum of each curve."""

    event: int  # index of the last event before the moment
    time_us: int | None  # time of ``event``; null: not recorded
    requested_bytes: int  # requested bytes at the peak
    allocated_bytes: int  # allocated bytes at the peak
    active_bytes: int  # allocated and pending bytes at the peak
    reserved_bytes: int  # reserved bytes at the peak
    allocated_is_derived: bool  # whether some block sizes are computed by the allocator's rules
    highest_allocated_bytes: int  # the value of torch.cuda.max_memory_allocated()
    highest_active_bytes: int  # highest allocated and pending bytes in the trace
    highest_reserved_bytes: int  # highest reserved bytes in the trace
    ranges: tuple[str, ...] = ()  # names of the ranges that were open at the peak, outermost first
    last_mark: str = ""  # name of the last NVTX mark before the peak; empty: none


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment that the tables show."""

    name: str  # "peak", "end", "oom" or "event"
    event: int  # index of the last event before the moment
    time_us: int | None  # time of ``event``; null: not recorded
    state: State  # memory totals at this moment


@dataclass(frozen=True, slots=True)
class Health:
    """The reliability of the file, and advice on recording."""

    contradictions: Contradictions  # disagreements of trace and final state, by kind
    begins_complete: bool  # whether the trace starts with no memory reserved
    overflowed: bool | None  # whether old events of the trace were dropped; null: unknown
    without_stack: float  # share of allocations without a call stack
    has_times: bool  # whether the events have times
    warnings: tuple[str, ...]  # sentences on what makes the figures less reliable
    advice: tuple[str, ...]  # sentences on how to record a better file


@dataclass(frozen=True, slots=True)
class Holder:
    """The memory of one call stack at the chosen moment."""

    bytes: int  # total size of the blocks in use (allocated or pending free)
    requested_bytes: int  # requested bytes
    count: int  # number of blocks
    share: float  # share of all bytes in use
    stack: tuple[Frame, ...]  # call stack, innermost frame first
    site: int  # index of the call site in ``stack``


@dataclass(frozen=True, slots=True)
class Line:
    """The memory of one call site at the chosen moment."""

    bytes: int  # total size of the blocks in use (allocated or pending free)
    count: int  # number of blocks
    share: float  # share of all bytes in use
    frame: Frame | None  # frame of the call site; null: no stack was recorded


@dataclass(frozen=True, slots=True)
class Group:
    """The memory of one value of a facet, such as one annotation, at the chosen moment."""

    name: str  # value, such as the name of an annotation; empty: none
    bytes: int  # total size of the blocks in use (allocated or pending free)
    count: int  # number of blocks
    share: float  # share of all bytes in use


@dataclass(frozen=True, slots=True)
class Facet:
    """The memory at the chosen moment, divided by one property of the allocations."""

    name: str  # property: "annotation", "compile_context", "user_metadata", "category"
    groups: tuple[Group, ...]  # values with their memory, largest first


@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """The segments of one pool, stream and kind at the chosen moment."""

    pool: tuple[int, int]  # the two numbers of the pool; 0, 0 is the default pool
    stream: int  # stream number in order of appearance; 0 is the default stream
    kind: str  # size class: "small", "large", "unknown"
    expandable: bool  # whether the segments are expandable
    segments: int  # number of segments
    reserved_bytes: int  # total size of the segments
    used_bytes: int  # bytes of blocks in use (allocated or pending free)
    free_bytes: int  # free bytes in the segments
    largest_hole_bytes: int  # size of the largest free block


@dataclass(frozen=True, slots=True)
class Pin:
    """Blocks of one call stack that keep segments in use, so that they cannot be released."""

    blocks: int  # number of blocks
    bytes: int  # bytes of the blocks
    segments: int  # segments with at least one of these blocks
    pinned_bytes: int  # free memory in these segments
    alone_bytes: int  # the part of ``pinned_bytes`` in segments without blocks of other call stacks
    stack: tuple[Frame, ...]  # call stack that allocated the blocks, innermost frame first
    site: int  # index of the call site in ``stack``


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Free memory in segments at the chosen moment, and the blocks that keep the segments in use."""

    free_bytes: int  # free memory in all segments
    free_share: float  # free memory as a share of reserved memory
    rounding_bytes: int  # block sizes minus requested bytes
    rounding_share: float  # rounding as a share of the block sizes
    holes: int  # number of free blocks
    largest_hole_bytes: int  # size of the largest free block
    stranded_bytes: int  # free memory in segments with at least one block in use
    releasable_bytes: int  # free memory in empty segments
    pins: tuple[Pin, ...]  # blocks that keep segments in use, by call stack, most free memory first


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of a failed allocation."""

    id: str  # an id of docs/explanation/memviz.md, such as "growth"
    bytes: int  # memory that the cause accounts for
    sufficient: bool  # whether the request would have succeeded without this cause
    sentence: str  # description of the cause
    remedy: str  # the action that removes the cause
    stack: tuple[Frame, ...] = ()  # the call stack with most of ``bytes``; empty: no single one
    site: int = 0  # index of the call site in ``stack``


@dataclass(frozen=True, slots=True)
class ReplayedRemedy:
    """A change of settings, program or memory limit, and the failed request in a replay with it."""

    change: str  # description of the change
    cause: str  # id of the cause that the change removes
    settings: str | None  # value for PYTORCH_CUDA_ALLOC_CONF; null: not a setting
    helps: bool  # whether the request succeeded
    recommended: bool  # whether the report recommends this change
    peak_reserved_bytes: int  # highest reserved memory in the replay


@dataclass(frozen=True, slots=True)
class Oom:
    """A failed allocation, and its causes."""

    event: int  # the event of the failure
    time_us: int | None  # time of the failure; null: not recorded
    size_bytes: int  # size of the request after rounding
    device_free_bytes: int  # free memory of the device
    state: State  # memory totals at the failure
    largest_hole_bytes: int  # size of the largest free block
    free_bytes: int  # free memory in all segments
    short_bytes: int  # bytes that the request lacks even if it could use all free memory
    fit: Fit  # free memory that the request could use, by kind
    limited: bool  # whether a limit of the process, not the device, rejected the request
    verdict: str  # reason: "limit", "cache", "pending", "fragmentation", "pool", "capacity"
    sentence: str  # description of the failure and its first cause
    remedies: tuple[str, ...]  # remedies; those of the first cause come first
    stack: tuple[Frame, ...]  # call stack of the request, innermost frame first
    site: int  # index of the call site in ``stack``
    stream: int = 0  # stream number of the request
    pool: tuple[int, int] = (0, 0)  # pool of the request
    device_total_bytes: int | None = None  # memory of the device; null: not recorded
    causes: tuple[Cause, ...] = ()  # causes; a cause comes before its consequences
    # Result of a replay for each change; empty if the failure is not the last one, or does not recur in a
    # replay.
    replays: tuple[ReplayedRemedy, ...] = ()
    # names of the ranges that were open at the failure, outermost first
    ranges: tuple[str, ...] = ()
    last_mark: str = ""  # name of the last NVTX mark before the failure; empty: none


@dataclass(frozen=True, slots=True)
class Churn:
    """The allocations of one call stack over the whole trace."""

    bytes: int  # bytes of all allocations
    count: int  # number of allocations
    share: float  # share of all bytes allocated
    mean_size_bytes: int  # mean size of an allocation
    mean_lifetime_us: float | None  # mean over freed allocations; null: none was freed, or no times
    stack: tuple[Frame, ...]  # call stack, innermost frame first
    site: int  # index of the call site in ``stack``


@dataclass(frozen=True, slots=True)
class Leak:
    """A call stack that holds more memory after each step."""

    bytes_per_step: int  # median slope over all pairs of steps (Theil-Sen)
    count_per_step: float  # median growth of the number of blocks per step
    bytes: int  # bytes at the last compared boundary between steps
    count: int  # number of blocks at the last compared boundary between steps
    growth: tuple[int, ...]  # bytes at each compared moment
    stack: tuple[Frame, ...]  # call stack, innermost frame first
    site: int  # index of the call site in ``stack``


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The peak of one step."""

    step: int  # number of the step, from 0
    first_event: int  # first event of the step
    last_event: int  # last event of the step
    peak_event: int  # index of the last event before the peak
    time_us: int | None  # time of the first event
    requested_bytes: int  # requested bytes at the peak
    start_bytes: int  # requested bytes when the step starts
    reserved_bytes: int  # the most reserved memory in the step


@dataclass(frozen=True, slots=True)
class DiffRow:
    """The memory of one call stack at two moments: of two steps, or of two snapshots.

    Stacks of two snapshots are matched without line numbers and installation paths.
    """

    change_bytes: int  # bytes after minus bytes before
    before_bytes: int  # bytes at the earlier moment
    after_bytes: int  # bytes at the later moment
    before_count: int  # number of blocks at the earlier moment
    after_count: int  # number of blocks at the later moment
    stack: tuple[Frame, ...]  # call stack at the later moment, else at the earlier one
    site: int  # index of the call site in ``stack``


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of the program, between which growth is checked."""

    # Source of the steps: "annotation NAME", "snapshot markers", "loop at FILE:LINE FUNCTION", "repeating
    # allocations", "none"
    source: str
    count: int  # number of moments between steps
    peaks: tuple[StepPeak, ...] = ()  # peaks of at most 1,000 evenly spaced steps
    rising: bool = False  # whether the peaks keep rising from step to step
    growth_bytes_per_step: int = 0  # median slope of the peaks over all pairs of steps (Theil-Sen)
    # Requested bytes by call stack at the peaks of the first and of the last step, largest growth first.
    site_growth: tuple[DiffRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """The memory over time, as the maxima of at most 2,000 spans of events."""

    event: tuple[int, ...]  # first event of the span
    time_us: tuple[int, ...] | None  # time of ``event``; null: not recorded
    requested_bytes: tuple[int, ...]  # highest requested bytes in the span
    allocated_bytes: tuple[int, ...]  # highest allocated bytes in the span
    reserved_bytes: tuple[int, ...]  # highest reserved bytes in the span


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device in one file."""

    file: str  # name of the file
    device: int | None  # device index; null: pinned host memory
    events: int  # number of events in the trace
    exact: bool  # whether trace and final state agree
    inconsistencies: int  # number of disagreements of trace and final state
    end: State  # memory totals at the end of the trace
    peak: Peak  # the moment with the most requested memory
    at: Moment  # the moment of --at, which the fields below describe
    health: Health  # reliability of the file
    ooms: tuple[Oom, ...]  # failed allocations
    holders: tuple[Holder, ...]  # memory by call stack, largest first
    lines: tuple[Line, ...]  # memory by call site, largest first
    facets: tuple[Facet, ...]  # memory by annotation and other properties
    segments: tuple[SegmentGroup, ...]  # segments by pool, stream and kind
    fragmentation: Fragmentation  # free memory in segments
    churn: tuple[Churn, ...]  # allocations over the whole trace, by call stack
    steps: Steps  # steps of the program and their peaks
    leaks: tuple[Leak, ...]  # call stacks that hold more memory after each step
    timeline: Timeline  # curves of the memory over the trace
    layout: Layout = field(metadata={"json": None})  # layout at the end of the trace
    snapshot: Snapshot = field(metadata={"json": None})
    trace: DeviceTrace = field(metadata={"json": None})
    history: History = field(metadata={"json": None})


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The name, the format, the size and the settings of one snapshot file."""

    name: str  # name of the file, as in the command line
    format: str  # format of the file
    size_bytes: int  # size of the uncompressed file
    settings: Mapping[str, Any]  # recorded settings of the allocator


def file_facts(snapshot: Snapshot) -> FileFacts:
    """Return the name, format, size and settings of a snapshot's file."""
    return FileFacts(snapshot.source, snapshot.format, snapshot.size_bytes, snapshot.settings)


@dataclass(frozen=True, slots=True)
class MemoryResult:
    """The result of ``memviz`` for all files."""

    schema: str  # name and version of this document
    files: tuple[FileFacts, ...]  # the files that were read
    devices: tuple[DeviceMemory, ...]  # each device of each file


@dataclass(frozen=True, slots=True)
class MomentDiff:
    """Two snapshots compared at one moment of each, the largest change first."""

    before: Moment  # the moment in the earlier snapshot
    after: Moment  # the moment in the later snapshot
    growth: float | None  # growth of requested bytes: 0.05 is 5%; null: no memory was in use before
    grown: tuple[DiffRow, ...]  # call stacks with more memory than before
    shrunk: tuple[DiffRow, ...]  # call stacks with less memory than before
    appeared: tuple[DiffRow, ...]  # call stacks with memory only in the later snapshot
    vanished: tuple[DiffRow, ...]  # call stacks with memory only in the earlier snapshot


@dataclass(frozen=True, slots=True)
class DeviceDiff:
    """The comparison of one device."""

    device: int | None  # device of the later snapshot; null: pinned host memory
    before_device: int | None  # device of the earlier snapshot
    peak: MomentDiff  # comparison of the peaks
    end: MomentDiff  # comparison of the final states


@dataclass(frozen=True, slots=True)
class DiffResult:
    """The changes from one snapshot to another."""

    schema: str  # name and version of this document
    before: FileFacts  # the earlier snapshot
    after: FileFacts  # the later snapshot
    devices: tuple[DeviceDiff, ...]  # each device that both snapshots have

    def grew_beyond(self, limit: float) -> bool:
        """Return whether requested memory grew by more than ``limit``, at the peak or end of any device.

        A limit of 0.05 is 5%.
        """
        moments = [moment for device in self.devices for moment in (device.peak, device.end)]
        return any(
            moment.after.state.requested_bytes > moment.before.state.requested_bytes * (1 + limit)
            for moment in moments
        )


# --- The results of ``memviz --what-if``, which are also its JSON document -------------------------
#
# Sizes and events as above.

WHAT_IF_SCHEMA = "cudakit.memviz.whatif/1"
DEFAULTS = "defaults"  # the name of settings without text
LIMITED_BASELINE = (
    "recorded settings"  # the name of the replay with a limit that the recording lacks
)


@dataclass(frozen=True, slots=True)
class MemoryTotals:
    """The four totals of memory, as defined by ``torch.cuda.memory_stats``."""

    reserved_bytes: int  # reserved bytes
    allocated_bytes: int  # allocated bytes
    requested_bytes: int  # requested bytes
    active_bytes: int  # allocated and pending bytes


@dataclass(frozen=True, slots=True)
class Shortage:
    """A request that succeeded in the recording and failed in the replay."""

    event: int  # the event of the request
    size_bytes: int  # size of the request


@dataclass(frozen=True, slots=True)
class Outcome:
    """The memory and the driver calls, as recorded or of one replay."""

    name: str  # "recorded", "replayed, as recorded", "recorded settings", or the settings as text
    settings: str  # settings in the format of PYTORCH_CUDA_ALLOC_CONF; empty: defaults
    limit_bytes: int | None  # maximum reserved memory; null: no limit
    peak: MemoryTotals  # the maximum of each total until the end, or until the shortage
    end: MemoryTotals  # totals at the end, or at the shortage
    fragmentation_bytes: int  # free memory in segments at the peak of the recording
    fragmentation: float  # fragmentation_bytes / reserved bytes at the same peak
    device_allocations: int  # number of segment allocations and mappings
    device_frees: int  # number of segment frees and unmappings
    retries: int | None  # driver allocations repeated after emptying the cache; null: unknown
    ooms: int  # number of requests that failed
    shortage: Shortage | None  # the request that ended the replay; null: none


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure that differs between the recording and its replay."""

    figure: str  # name of the figure, such as "peak reserved"
    recorded: int  # value in the recording
    replayed: int  # value in the replay


@dataclass(frozen=True, slots=True)
class Limit:
    """The most memory that replays may reserve, and the source of this limit."""

    bytes: int  # maximum reserved memory
    source: Literal[
        "given", "device full", "reserved"
    ]  # source of the limit: the caller ("given"), or the recording


@dataclass(frozen=True, slots=True)
class DeviceWhatIf:
    """All replays of one device of one file."""

    file: str  # name of the file
    device: int  # device index
    events: int  # number of events in the trace
    limit: Limit | None  # memory limit of the replays; null: none
    recorded: Outcome  # figures of the recording
    replayed: (
        Outcome  # outcome of a replay with the recorded settings, which should equal ``recorded``
    )
    differences: tuple[Difference, ...]  # figures of the replay that differ from the recording
    reasons: tuple[str, ...]  # reasons for differences
    baseline: Outcome  # the outcome that ``tried`` is compared with
    tried: tuple[Outcome, ...]  # figures of the replay with each of the given settings
    best: int | None  # index in ``tried`` of the settings that help most; null: none helps
    headline: str  # the result in one sentence


@dataclass(frozen=True, slots=True)
class WhatIfResult:
    """The result for all files."""

    schema: str  # name and version of this document
    files: tuple[FileFacts, ...]  # the files that were read
    devices: tuple[DeviceWhatIf, ...]  # each device of each file
