"""Races: two operations on overlapping bytes, one of them a write, that no happens-before orders."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum

from cudakit.trace.kinds import AccessMode, AllocationKind, EventKind, Precision


class RaceKind(StrEnum):
    """The kind of a race, by the accesses of both sides in the order they were enqueued."""

    READ_AFTER_WRITE = "read-after-write"
    WRITE_AFTER_READ = "write-after-read"
    WRITE_AFTER_WRITE = "write-after-write"
    USE_BEFORE_ALLOCATION = "use-before-allocation"  # of stream-ordered memory
    USE_AFTER_FREE = "use-after-free"
    REUSE = "reuse"  # of a caching allocator's block, which work of its last owner may still use
    HOST = "host"  # the host reads or writes memory that a copy in flight uses


class Confidence(StrEnum):
    """The confidence in a race, which the less certain of its two accesses determines."""

    CERTAIN = "certain"  # both accesses are exact, or the merged ranges of one lie within the other
    LIKELY = "likely"  # one access is exact, the other to a whole tensor or assumed from a pointer
    POSSIBLE = "possible"  # both are assumed, the assumed pointer is lower, or ranges were merged

    @property
    def is_finding(self) -> bool:
        """Whether such a race fails a run, a test or a ``with`` block."""
        return self is not Confidence.POSSIBLE


@dataclass(frozen=True, slots=True)
class NamedRange:
    """A range of NVTX, which a program or a library opened around an operation."""

    name: str  # as the program named it; may be empty
    domain: str  # the NVTX domain; empty for the default domain


@dataclass(frozen=True, slots=True)
class Operation:
    """One side of a race: an access to the bytes from ``lo`` up to ``hi``. Numbers are those of the trace."""

    seq: int  # number of the call; 0 if unknown
    kind: EventKind  # LAUNCH, COPY, FILL, ALLOC, FREE
    name: str  # mangled name of a kernel, else ""
    stream: int  # 0: the host
    context: int
    device: int
    thread: int
    site: int  # number of the call stack
    mode: AccessMode
    known: Precision
    lo: int
    hi: int
    graph: int = 0  # 0: not a graph node
    node: int = 0
    ranges: tuple[NamedRange, ...] = ()  # open NVTX ranges at the call, outermost first


class SyncKind(StrEnum):
    """How one stream was ordered after earlier work of another."""

    EVENT = "event"  # recorded on one stream, waited for by the other
    HOST = "host"  # the host waited for one stream, then enqueued work on the other
    DEFAULT_STREAM = "default-stream"  # implicit synchronization of the legacy default stream


@dataclass(frozen=True, slots=True)
class Sync:
    """The last synchronization that ordered the later side's stream after the earlier side's.

    It does not prevent the race: the earlier side was enqueued after the event record or the host's wait.
    """

    kind: SyncKind
    recorded_seq: int  # of the event record, or of the host's wait
    recorded_site: int
    waited_seq: int  # of the wait; for a wait of the host equal to ``recorded_seq``
    waited_site: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """The allocation that contains the bytes of a race."""

    address: int
    size_bytes: int
    how: AllocationKind
    site: int
    seq: int


@dataclass(frozen=True, slots=True)
class Race:
    """Two operations that race on the bytes from ``lo`` up to ``hi``; ``current`` was enqueued later."""

    kind: RaceKind
    confidence: Confidence
    lo: int
    hi: int
    current: Operation
    previous: Operation
    allocation: Allocation | None = None
    last_sync: Sync | None = None
    approximate: bool = False  # the bytes are an upper bound: segments were merged


class Grade(IntEnum):
    """The precision of a launch: that of its least precise access."""

    UNKNOWN = 0  # no access was recorded
    EXACT = 1  # all accesses are exact
    WHOLE_TENSOR = (
        2  # the same, except for stores through tensor maps: they count for the whole tensor
    )
    ASSUMED = 3  # some access is assumed


@dataclass(slots=True)
class Coverage:
    """How much of the work was recorded. All fields are counts, except ``arenas_bytes``."""

    launches: int = 0  # kernel launches, without graph nodes
    launches_unknown: int = 0  # launches without any recorded access, graph nodes included
    launches_exact: int = 0  # launches with exact accesses, graph nodes and the next field included
    launches_whole_tensor: int = 0  # exact except for stores to an unknown part of a tensor
    launches_assumed: int = 0  # launches with assumed accesses, graph nodes included
    copies: int = 0  # copies, whose accesses are always exact
    fills: int = 0  # fills, whose accesses are always exact
    accesses_exact: int = 0  # exact accesses of kernels
    accesses_summary: int = (
        0  # accesses of kernels to a whole tensor, stored to through a tensor map
    )
    accesses_merged: int = 0  # accesses of kernels in merged ranges: there were too many ranges
    accesses_assumed: int = 0  # accesses assumed from a pointer argument of a kernel
    accesses_uncertain: int = 0  # accesses assumed from a pointer table, which may be stale
    graph_launches: int = 0  # launches of CUDA graphs
    suspected: int = 0  # possible races that are not reported
    arenas_bytes: int = 0  # peak device memory used for recording, summed over processes
    launches_without_call_site: int = 0  # of ``launches``, those without a Python call stack

    @property
    def has_work(self) -> bool:
        """Whether any GPU work was recorded."""
        return bool(self.launches or self.copies or self.fills or self.graph_launches)

    def count(self, grade: int, launches: int = 1) -> None:
        """Add launches of one precision."""
        match grade:
            case Grade.UNKNOWN:
                self.launches_unknown += launches
            case Grade.EXACT:
                self.launches_exact += launches
            case Grade.WHOLE_TENSOR:
                self.launches_exact += launches
                self.launches_whole_tensor += launches
            case Grade.ASSUMED:
                self.launches_assumed += launches

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(Coverage))
        )
