"""Races: two operations on overlapping bytes, one of them a write, without happens-before between them.

A ``Race`` has the numbers of a trace; a ``FoundRace`` has names, call stacks and sentences in their place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum
from typing import ClassVar, Final

from cudakit.stacks import Stack
from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    CollectiveFunction,
    EventKind,
    NcclDatatype,
    Precision,
)


class RaceKind(StrEnum):
    """The kind of a race, by the accesses of both sides in the order they were enqueued."""

    READ_AFTER_WRITE = "read-after-write"
    WRITE_AFTER_READ = "write-after-read"
    WRITE_AFTER_WRITE = "write-after-write"
    USE_BEFORE_ALLOCATION = "use-before-allocation"  # unordered use of stream-ordered memory
    USE_AFTER_FREE = "use-after-free"
    REUSE = "reuse"  # a caching allocator reuses a block that earlier work may still use
    HOST = "host"  # the host reads or writes memory while a copy may still use it


class RaceOwner(StrEnum):
    """The owner of a race: the program or a library (rule: ``sanitize.owners``)."""

    PROGRAM = "program"
    LIBRARY = "library"


class Confidence(StrEnum):
    """The confidence in a race, which the less certain of its two accesses determines."""

    # Both accesses are exact, or an exact access covers the ranges of a merged one.
    CERTAIN = "certain"
    LIKELY = (
        "likely"  # one access is exact, the other is to a whole tensor or assumed from a pointer
    )
    # Both accesses are assumed, an access is assumed from a pointer to a lower address, or ranges were
    # merged.
    POSSIBLE = "possible"

    @property
    def is_finding(self) -> bool:
        """Whether a race of this confidence fails a run, a test or a ``with`` block."""
        return self is not Confidence.POSSIBLE


@dataclass(frozen=True, slots=True)
class NamedRange:
    """A range of NVTX, which a program or a library opened around an operation."""

    name: str  # name that the program gave the range; may be empty
    domain: str  # the NVTX domain; empty for the default domain


@dataclass(frozen=True, slots=True)
class CollectiveOperation:
    """A collective of NCCL, or a send or receive, as one rank performs it."""

    function: CollectiveFunction  # operation that the rank performs
    rank: int  # rank of the process in the communicator; -1 if unknown
    rank_count: int  # number of ranks of the communicator; 0 if unknown
    root: int  # root rank; for a send or receive, the other rank


@dataclass(frozen=True, slots=True)
class Operation:
    """One of the two operations of a race, which accesses the bytes from ``lo`` up to ``hi``."""

    seq: int  # number of the call that enqueued the operation; 0 if unknown
    kind: EventKind  # LAUNCH, COPY, FILL, ALLOC, FREE or COLLECTIVE
    name: str  # mangled name of the kernel; empty for other operations
    stream: int  # number of the stream; 0 is the host
    context: int
    device: int
    thread: int
    site: int  # index of the call stack in the stack table
    mode: AccessMode
    precision: Precision
    lo: int
    hi: int
    graph: int = 0  # number of the graph; 0 outside of graphs
    node: int = 0  # number of the graph node; 0 outside of graphs
    ranges: tuple[NamedRange, ...] = ()  # NVTX ranges that were open at the call, outermost first
    collective: CollectiveOperation | None = None  # the collective of the operation, or None
    program_call: int = 0  # number of the program call (``sanitize.owners``); 0 if unknown
    capturing_call: int = 0  # number of the program call that captured the graph node; 0 if unknown
    # Whether the accesses are those of a template: earlier launches of the same kernel had them.
    from_template: bool = False
    accessed_bytes: int = 0  # number of accessed bytes of a strided access; 0 for other accesses
    launch_site: int = 0  # call stack of the graph launch; 0 outside of graphs


class SyncKind(StrEnum):
    """The kind of synchronization that ordered one stream after earlier work of another stream."""

    # An event was recorded on the earlier stream, and the later stream waited for it.
    EVENT = "event"
    HOST = "host"  # the host waited for the earlier stream, then enqueued work on the later stream
    DEFAULT_STREAM = "default-stream"  # the legacy default stream synchronized implicitly


@dataclass(frozen=True, slots=True)
class Sync:
    """The last synchronization that ordered the stream of the later operation after the earlier stream.

    This synchronization does not prevent the race: the earlier operation was enqueued after the
    event record or the host's wait.
    """

    kind: SyncKind
    # Number of the call that recorded the event, of the call that enqueued the host function, or of the
    # host's wait.
    recorded_seq: int
    recorded_site: int  # call stack of the call with the number ``recorded_seq``
    # Number of the call that waited, or of the beginning of the host function. For another wait of the host
    # equal to ``recorded_seq``.
    waited_seq: int
    waited_site: int  # call stack of the wait, or of the call that enqueued the host function


@dataclass(frozen=True, slots=True)
class Allocation:
    """The allocation that contains the bytes of a race."""

    address: int
    size_bytes: int
    kind: AllocationKind
    site: int  # call stack of the allocation
    seq: int  # number of the call that allocated the memory


@dataclass(frozen=True, slots=True)
class Race:
    """Two operations that race on the bytes from ``lo`` up to ``hi``."""

    kind: RaceKind
    confidence: Confidence
    lo: int
    hi: int
    current: Operation  # the operation that was enqueued later
    previous: Operation  # the operation that was enqueued earlier
    # The allocation with the bytes; None if it was not recorded.
    allocation: Allocation | None = None
    last_sync: Sync | None = None  # the last synchronization of the streams; None if there was none
    is_approximate: bool = False  # whether the bytes are an upper bound, because ranges were merged


class LaunchPrecision(IntEnum):
    """The precision of a launch, which its least precise access determines."""

    UNKNOWN = 0  # no access was recorded
    EXACT = 1  # all accesses are exact
    # All accesses are exact, except stores through tensor maps, which count as stores to the whole tensor.
    WHOLE_TENSOR = 2
    ASSUMED = 3  # some accesses are assumed


@dataclass(slots=True)
class Coverage:
    """The coverage of a run. All fields are counts, except ``arenas_bytes``."""

    launches: int = 0  # number of kernel launches, without graph nodes
    launches_unknown: int = 0  # number of launches without recorded accesses, with graph nodes
    # Number of launches with exact accesses, graph nodes and whole-tensor stores included.
    launches_exact: int = 0
    # Number of exact launches that store through a tensor map to an unrecorded part of a tensor: these stores
    # count as accesses to the whole tensor.
    launches_whole_tensor: int = 0
    launches_assumed: int = 0  # number of launches with assumed accesses, with graph nodes
    # Launches with exact accesses that are known from a template, without being recorded. A graph launch
    # counts once.
    launches_from_template: int = 0
    template_checks: int = 0  # number of recorded launches compared with their template
    template_differences: int = 0  # number of recorded launches unlike their template
    copies: int = 0  # number of copies, whose accesses are always exact
    fills: int = 0  # number of memsets, whose accesses are always exact
    accesses_exact: int = 0  # number of exact accesses of kernels
    # Stores of kernels through a tensor map, to an unknown part of the tensor.
    accesses_summary: int = 0
    # Accesses of kernels in ranges that were merged, since there were too many.
    accesses_merged: int = 0
    accesses_assumed: int = 0  # number of accesses assumed from a pointer argument
    accesses_uncertain: int = 0  # number of accesses assumed from a pointer table
    graph_launches: int = 0  # number of launches of CUDA graphs
    # number of collectives, sends and receives of NCCL; a graph node counts once
    collectives: int = 0
    suspected: int = 0  # number of possible races that are not reported
    arenas_bytes: int = 0  # peak device memory used for recording, summed over processes
    launches_without_call_site: int = 0  # number of kernel launches without a Python stack

    @property
    def has_work(self) -> bool:
        """Whether any GPU work was recorded."""
        return bool(self.launches or self.copies or self.fills or self.graph_launches)

    def count(self, launch_precision: int, launches: int = 1) -> None:
        """Add launches of one precision."""
        match launch_precision:
            case LaunchPrecision.UNKNOWN:
                self.launches_unknown += launches
            case LaunchPrecision.EXACT:
                self.launches_exact += launches
            case LaunchPrecision.WHOLE_TENSOR:
                self.launches_exact += launches
                self.launches_whole_tensor += launches
            case LaunchPrecision.ASSUMED:
                self.launches_assumed += launches

    def count_accesses(self, precision_counts: Sequence[int]) -> None:
        """Add accesses of kernels; ``precision_counts`` has the number of accesses of each precision."""
        merged, exact, summary, assumed, uncertain = precision_counts  # in the order of Precision
        self.accesses_merged += merged
        self.accesses_exact += exact
        self.accesses_summary += summary
        self.accesses_assumed += assumed
        self.accesses_uncertain += uncertain

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(Coverage))
        )


# --- The result of ``run --sanitize``, which is also its JSON document (``cudakit.sanitize/1``) ----
#
# Sizes are in bytes. A call stack has the innermost Python frame first; ``site`` is the index of its call
# site, the innermost frame outside libraries. A call stack that was not recorded is empty. ``seq`` is the
# number of a CUDA call in its process.

CALLING_RANK: Final = " (called by rank "  # text before the rank that calls a collective


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two operations of a race."""

    stream: str  # name of the stream, as in the report
    operation: str  # operation: kernel NAME, copy, fill (a memset), allocation, free or all-reduce
    stack: Stack  # call stack that enqueued the operation
    site: int  # index of the call site in `stack`
    stream_number: int  # number of the stream, unique within the process; 0 is the host
    device: int  # CUDA index of the device
    context: int  # number of the CUDA context
    thread: int  # host thread that enqueued the operation
    seq: int  # number of the call; 0 if unknown
    kernel: str | None  # demangled name of the kernel; null for other operations
    mangled: str | None  # mangled name of the kernel
    reads: bool  # whether the operation reads the accessed bytes
    writes: bool  # whether the operation writes the accessed bytes
    atomic: bool  # whether the operation accesses the bytes atomically
    known: Precision  # precision of the access: exact, merged, summary (of a tensor), assumed or uncertain
    address: int  # address of the first accessed byte
    size_bytes: int  # size from the first to the last accessed byte; an upper bound unless exact
    graph: int  # number of the CUDA graph that contains the operation; 0 if none does
    node: int  # number of the graph node, from 1
    ranges: tuple[NamedRange, ...] = ()  # open NVTX ranges at the call, outermost first
    collective: CollectiveOperation | None = None  # collective of NCCL; null for other operations
    # whether the accesses are known from earlier launches of the kernel
    from_template: bool = False
    # number of accessed bytes of a strided access, whose `size_bytes` has gaps; 0 for other accesses
    accessed_bytes: int = 0
    launch_stack: Stack = ()  # call stack that launched the graph; empty outside graphs
    launch_site: int = 0  # index of the call site in `launch_stack`

    @property
    def operation_name(self) -> str:
        """The operation as reports name it.

        A fill is a memset, as in CUDA and in profiles. ``operation`` itself never changes, because baselines
        have it.
        """
        name = re.sub(r"^fill\b", "memset", self.operation)
        return name.replace(" (rank ", CALLING_RANK) if self.collective else name


@dataclass(frozen=True, slots=True)
class Memory:
    """The allocation that contains the bytes of a race."""

    address: int  # address of the first byte of the allocation
    size_bytes: int  # size of the whole allocation
    how: AllocationKind  # kind of allocation
    seq: int  # number of the call that allocated the memory
    stack: Stack  # call stack that allocated the memory
    site: int  # index of the call site in `stack`


@dataclass(frozen=True, slots=True)
class LastSync:
    """The last synchronization of the two streams, which came too early to prevent the race."""

    kind: SyncKind  # kind of synchronization: by an event, by the host, or by the rules of the default stream
    sentence: str  # reason why the synchronization does not cover the earlier operation
    # number of the call that recorded the event, enqueued the host function, or made the host wait
    recorded_seq: int
    recorded_stack: Stack  # call stack of the call `recorded_seq`
    recorded_site: int  # index of the call site in `recorded_stack`
    waited_seq: int  # number of the call that waited, or of the execution of the host function
    waited_stack: Stack  # call stack of the wait, or of the call that enqueued the host function
    waited_site: int  # index of the call site in `waited_stack`


@dataclass(frozen=True, slots=True)
class KnownIssue:
    """A race in a library that its developers know."""

    title: str  # description of the race
    reference: str  # address of the issue, or the function of the library that races
    advice: str  # way to avoid the race until the library is fixed


@dataclass(frozen=True, slots=True)
class FoundRace:
    """A race. Races between the same two call sites are counted as one race."""

    kind: RaceKind  # kind of the race
    confidence: Confidence  # confidence that the operations race
    sentence: str  # description of the race
    address: int  # address of the first byte that both operations access
    size_bytes: int  # number of bytes that both operations access
    offset_bytes: int | None  # offset of the first byte in the allocation; null if that is unknown
    count: int  # number of occurrences of the race; the other fields describe one occurrence
    current: Side  # the operation that was enqueued later
    previous: Side  # the operation that was enqueued earlier
    hint: str  # the smallest fix, in terms of CUDA
    remedies: tuple[str, ...]  # the fix in terms of each framework involved
    memory: Memory | None  # allocation that contains the bytes; null if it was not recorded
    # the last synchronization of the two streams; null if there was none
    last_sync: LastSync | None
    approximate: bool  # whether the bytes are an upper bound, because ranges were merged
    process: int  # PID of the process of the described occurrence
    known_issue: KnownIssue | None = None  # known issue of a library that matches the race
    processes: tuple[int, ...] = ()  # PIDs of all processes with the race
    # Whether the wait of the hint removes the race without changing other work; false if the hint is not a
    # wait.
    hint_checked: bool = False
    owner: RaceOwner = RaceOwner.PROGRAM  # whose code lacks the synchronization
    library: str | None = None  # the library that has the race; null for a race of the program


@dataclass(frozen=True, slots=True)
class UnverifiedPair:
    """Two unordered operations that race if one of them accessed bytes outside of its template.

    That operation is a launch whose accesses were not recorded; the sentence says which of the two it is.
    """

    sentence: str  # description of the pair
    current: Side  # the operation that was enqueued later
    previous: Side  # the operation that was enqueued earlier
    process: int  # PID of the process
    hint: str  # advice on how to decide whether the operations race


class DifferenceKind(StrEnum):
    """The property in which the calls of two ranks differ."""

    FUNCTION = "function"  # the ranks call different collectives, or in different order
    COUNT = "count"  # number of elements
    DATATYPE = "datatype"  # type of the elements
    ROOT = "root"  # root rank
    TRANSFER = "transfer"  # a send and its receive have different sizes


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A call of a collective, send or receive by one rank."""

    rank: int  # rank in the communicator
    process: int  # PID of the process
    operation: str  # operation, as in the report: all-reduce, send to rank 1
    element_count: int  # number of elements
    datatype: NcclDatatype  # type of the elements
    root: int  # root rank; for a send or receive, the other rank
    stack: Stack  # call stack of the call
    site: int  # index of the call site in `stack`


@dataclass(frozen=True, slots=True)
class DifferentCalls:
    """Two ranks that call different collectives of a communicator at the same step.

    Later calls of the communicator are not compared.
    """

    kind: DifferenceKind  # property in which the calls differ
    sentence: str  # description of both calls
    communicator: int  # hash of the communicator, the same on all ranks
    first: CollectiveCall  # call of the lower rank; the send of a transfer
    second: CollectiveCall  # call of the other rank; the receive of a transfer
    hint: str  # change to the program after which both calls are equal


@dataclass(frozen=True, slots=True)
class Suppressed:
    """A suppression and the number of races that it suppressed."""

    pattern: str  # pattern, as the user wrote it
    origin: str  # origin of the pattern: --suppress, or a file and line
    races: int  # number of suppressed races
    count: int  # number of occurrences of the suppressed races


@dataclass(frozen=True, slots=True)
class KnownSide:
    """One side of a race in a baseline."""

    operation: str  # operation, as in the report
    is_backward: bool  # whether a thread of autograd enqueued the operation for a backward pass
    calls: tuple[str, ...]  # functions of the program as FILE:FUNCTION, innermost first


@dataclass(frozen=True, slots=True)
class KnownRace:
    """A race in a baseline."""

    kind: RaceKind  # kind of the race
    current: KnownSide  # the operation that was enqueued later
    previous: KnownSide  # the operation that was enqueued earlier


@dataclass(frozen=True, slots=True)
class BaselineUse:
    """The baseline of --baseline, and the races of the run that are in the baseline."""

    path: str  # path of the baseline
    races: tuple[KnownRace, ...]  # races of the baseline that occurred; they are not reported
    count: int  # number of occurrences of these known races
    absent: int  # number of races of the baseline that did not occur


@dataclass(frozen=True, slots=True)
class Process:
    """One process that used CUDA."""

    process: int  # PID of the process
    launches: int  # number of kernel launches
    count: int  # number of occurrences of races in the process
    # rank in the process's largest communicator; null without one, or with several ranks
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class SanitizeResult:
    """The races of a program, and the coverage of its work."""

    schema: ClassVar[str] = "cudakit.sanitize/1"
    # exit status of the program, as in a shell; null if it is unknown or none was started
    exit_status: int | None
    simulated: bool  # whether a simulated device did the work
    stopped: bool  # whether --stop-on-first stopped the program
    # races of the program, then of libraries; the most certain ones first
    races: tuple[FoundRace, ...]
    coverage: Coverage  # counts of the recorded operations and accesses
    gaps: Mapping[str, int]  # events that were not analyzed, with their counts
    suppressed: tuple[Suppressed, ...]  # all suppressions, including unused ones
    processes: tuple[Process, ...]  # processes that used CUDA
    notes: tuple[str, ...]  # further limits of the result
    incomplete: tuple[str, ...]  # reasons why recorded events are missing; any reason fails the run
    no_gpu_work: str | None  # reason why no GPU work was recorded; null if GPU work was recorded
    baseline: BaselineUse | None = None  # the baseline; null without --baseline
    different_calls: tuple[DifferentCalls, ...] = ()  # collectives that ranks call differently
    internal: bool = False  # whether races inside libraries count, too (--internal)
    # pairs of operations that race if a launch accessed other bytes than its template; each fails the run
    unverified: tuple[UnverifiedPair, ...] = ()

    def is_counted(self, race: FoundRace) -> bool:
        """Return whether a race of this result counts: a race of a library only with --internal."""
        return self.internal or race.owner is RaceOwner.PROGRAM
