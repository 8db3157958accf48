"""Races: two operations on overlapping bytes, one of them a write, without happens-before between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum

from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    CollectiveFunction,
    EventKind,
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

    CERTAIN = (
        "certain"  # both accesses are exact, or an exact access covers the ranges of a merged one
    )
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

    EVENT = (
        "event"  # an event was recorded on the earlier stream, and the later stream waited for it
    )
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
    collectives: int = (
        0  # number of collectives, sends and receives of NCCL; a graph node counts once
    )
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
