"""The result of ``run --sanitize``, which is also its JSON document (``cudakit.sanitize/1``).

Sizes are in bytes. A call stack has the innermost Python frame first; ``site`` is the index of its call site,
the innermost frame outside libraries. A call stack that was not recorded is empty. ``seq`` numbers the CUDA
calls of one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cudakit.core.sanitize.races import Confidence, Coverage, NamedRange, RaceKind, SyncKind
from cudakit.document import Frame
from cudakit.trace.kinds import AllocationKind, Precision


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two operations of a race."""

    stream: str  # name of the stream, as in the report
    operation: str  # as in the report: kernel NAME, copy, fill, allocation or free
    stack: tuple[Frame, ...]  # call stack that enqueued the operation
    site: int  # index of the call site in `stack`
    stream_number: int  # number of the stream, unique within the process; 0 is the host
    device: int  # CUDA index of the device
    context: int  # number of the CUDA context
    thread: int  # host thread that enqueued the operation
    seq: int  # number of the call; 0 if unknown
    kernel: str | None  # demangled name of the kernel; null for other operations
    mangled: str | None  # mangled name of the kernel
    reads: bool  # whether the operation reads the bytes below
    writes: bool  # whether the operation writes the bytes below
    atomic: bool  # whether its accesses are atomic
    known: Precision  # precision: exact, merged (ranges), summary (tensor), assumed or uncertain (arguments)
    address: int  # address of the first accessed byte
    size_bytes: int  # size of the access; an upper bound unless it is exact
    graph: int  # number of the CUDA graph that contains the operation; 0 if none does
    node: int  # number of the graph node, from 1
    ranges: tuple[NamedRange, ...] = ()  # open NVTX ranges at the call, outermost first


@dataclass(frozen=True, slots=True)
class Memory:
    """The allocation that contains the bytes of a race."""

    address: int  # address of its first byte
    size_bytes: int  # size of the whole allocation
    how: AllocationKind  # kind of allocation
    seq: int  # number of the call that allocated it
    stack: tuple[Frame, ...]  # call stack that allocated it
    site: int  # index of the call site in `stack`


@dataclass(frozen=True, slots=True)
class LastSync:
    """The last synchronization of the two streams, which came too early to prevent the race."""

    kind: SyncKind  # by an event, by the host, or by the rules of the default stream
    sentence: str  # why it does not cover the earlier operation
    recorded_seq: int  # number of the event record or of the host's wait: earlier work is covered
    recorded_stack: tuple[Frame, ...]  # call stack of that call
    recorded_site: int  # index of the call site in `recorded_stack`
    waited_seq: int  # number of the call that waited
    waited_stack: tuple[Frame, ...]  # call stack of the wait
    waited_site: int  # index of the call site in `waited_stack`


@dataclass(frozen=True, slots=True)
class FoundRace:
    """A race; races between the same two call sites are counted as one."""

    kind: RaceKind  # kind of the race
    confidence: Confidence  # how certain it is that the operations race
    sentence: str  # description of the race
    address: int  # address of the first byte that both operations access
    size_bytes: int  # number of bytes that both operations access
    offset_bytes: int | None  # offset of the first byte in the allocation; null if that is unknown
    count: int  # number of occurrences; the other fields describe the first one
    current: Side  # the operation that was enqueued later
    previous: Side  # the operation that was enqueued earlier
    hint: str  # the smallest fix, in terms of CUDA
    remedies: tuple[str, ...]  # the fix in terms of each framework involved
    memory: Memory | None  # the allocation; null if it was not recorded
    last_sync: (
        LastSync | None
    )  # the last synchronization of the two streams; null if there was none
    approximate: bool  # whether the bytes are an upper bound: ranges were merged
    process: int  # process of the first occurrence


@dataclass(frozen=True, slots=True)
class Suppressed:
    """A suppression and the races it hid."""

    pattern: str  # the pattern as written
    origin: str  # --suppress, or the file and line of the pattern
    races: int  # number of races hidden
    count: int  # number of their occurrences


@dataclass(frozen=True, slots=True)
class Process:
    """One process that used CUDA."""

    process: int  # its PID
    launches: int  # number of kernel launches
    count: int  # number of occurrences of races


@dataclass(frozen=True, slots=True)
class SanitizeResult:
    """The races of a program, and how much of its work was checked."""

    schema: ClassVar[str] = "cudakit.sanitize/1"
    exit_status: (
        int | None
    )  # exit status of the program, as in a shell; null if no program was started
    simulated: bool  # whether a simulated device did the work
    stopped: bool  # whether --stop-on-first stopped the program
    races: tuple[FoundRace, ...]  # in order of decreasing confidence
    coverage: Coverage  # how much of the work was recorded and analyzed
    gaps: Mapping[str, int]  # events that were not analyzed, with their counts
    suppressed: tuple[Suppressed, ...]  # every suppression, including unused ones
    processes: tuple[Process, ...]  # the processes that used CUDA
    notes: tuple[str, ...]  # further limits of the result
    incomplete: tuple[str, ...]  # why recorded events are missing; any reason fails the run
    no_gpu_work: str | None  # why no GPU work was recorded; null if some was
