"""Races: two unordered operations that access the same bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum

from cudakit.trace.kinds import How, Kind, Known, Mode


class RaceKind(StrEnum):
    """The kind of a race, by what each side does."""

    READ_AFTER_WRITE = "read-after-write"  # the later one reads what may not be written yet
    WRITE_AFTER_READ = "write-after-read"  # the later one overwrites what may still be read
    WRITE_AFTER_WRITE = "write-after-write"
    USE_BEFORE_ALLOCATION = "use-before-allocation"  # of stream-ordered memory
    USE_AFTER_FREE = "use-after-free"
    REUSE = "reuse"  # of a caching allocator's block, while its last owner's work may still run
    HOST = "host"  # the host's side of a call against a copy in flight


class Confidence(StrEnum):
    """The confidence in a race: that of the side that is known less well."""

    CERTAIN = "certain"  # both sides are exact
    LIKELY = (
        "likely"  # one side is exact, the other a kernel that was given a pointer into its bytes
    )
    POSSIBLE = (
        "possible"  # two kernels that were given the same memory, or one given memory near it
    )

    @property
    def is_finding(self) -> bool:
        """Whether such a race fails a run, a test or a ``with`` block."""
        return self is not Confidence.POSSIBLE


@dataclass(frozen=True, slots=True)
class Operation:
    """One side of a race. Numbers are those of the trace; ``site`` is the number of a stack."""

    seq: int  # of the call; 0 where it is not known
    kind: Kind  # LAUNCH, COPY, FILL, ALLOC, FREE
    name: str  # of the kernel as the driver has it (mangled), else ""
    stream: int  # 0: the host
    context: int
    device: int
    thread: int
    site: int
    mode: Mode
    known: Known
    lo: int  # the bytes that it touches: from ``lo`` up to ``hi``
    hi: int
    graph: int = 0  # the graph that it is a node of
    node: int = 0


class SyncKind(StrEnum):
    """The kind of call that ordered one stream after part of another."""

    EVENT = "event"  # recorded in the one, waited for by the other
    HOST = "host"  # the host waited, then enqueued
    DEFAULT_STREAM = "default-stream"  # by the rules of the legacy default stream


@dataclass(frozen=True, slots=True)
class Sync:
    """The last synchronisation that ordered the stream of ``current`` after that of ``previous``.

    It does not cover the access, which was enqueued after what it waited for.
    """

    kind: SyncKind
    recorded_seq: int  # of the event's record, or of the host's wait
    recorded_site: int
    waited_seq: int  # of the wait; equal to ``recorded_seq`` for the host's
    waited_site: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """The memory that a race is about."""

    address: int
    size_bytes: int
    how: How
    site: int
    seq: int


@dataclass(frozen=True, slots=True)
class Race:
    """Two operations in conflict; ``current`` was enqueued later."""

    kind: RaceKind
    confidence: Confidence
    lo: int  # the bytes that both touch, as far as known
    hi: int
    current: Operation
    previous: Operation
    allocation: Allocation | None = None
    last_sync: Sync | None = None
    approximate: bool = False  # the map of this allocation was coarsened: the bytes may be fewer


class Grade(IntEnum):
    """How well the accesses of a launch are known: as well as the least known one."""

    UNKNOWN = 0  # no access was recorded
    EXACT = 1  # all accesses were recorded
    ASSUMED = 2


@dataclass(slots=True)
class Coverage:
    """How much of what happened was understood. Counts, and bytes where the name says so."""

    launches: int = 0  # of kernels, nodes of graphs not counted
    launches_unknown: int = 0  # without any access: their arguments were not seen
    launches_exact: int = (
        0  # nodes of graphs counted in each launch: all that they touched is known
    )
    launches_assumed: int = (
        0  # likewise: what they touched is known from their arguments, or in part
    )
    copies: int = 0  # exact, and not counted among the accesses
    fills: int = 0  # likewise
    accesses_exact: int = 0  # of kernels and of nodes of graphs
    accesses_summary: int = 0  # seen, in pieces that were too many and have been joined
    accesses_assumed: int = 0  # from a pointer among the arguments of a kernel
    accesses_uncertain: int = 0  # from a large table among them, which may hold old pointers
    graph_launches: int = 0
    suspected: int = 0  # races that are only possible, and were not reported
    arenas_bytes: int = (
        0  # the most memory of devices that recording held, of all processes together
    )

    def count(self, grade: int, launches: int = 1) -> None:
        """Add launches of a grade."""
        match grade:
            case Grade.UNKNOWN:
                self.launches_unknown += launches
            case Grade.EXACT:
                self.launches_exact += launches
            case Grade.ASSUMED:
                self.launches_assumed += launches

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(Coverage))
        )
