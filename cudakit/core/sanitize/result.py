"""What ``run --sanitize`` found: the Result that is also its JSON (``cudakit.sanitize/1``).

Sizes are bytes and names say so. A stack is of Python, innermost frame first, and its ``site`` the index
of the innermost frame outside libraries; a stack that was not seen is empty. ``seq`` counts the calls of
one process to CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cudakit.core.sanitize.races import Confidence, Coverage, RaceKind, SyncKind
from cudakit.document import Frame
from cudakit.trace.kinds import How, Known


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two operations of a race."""

    stream: str  # as the report calls it
    operation: str  # as the report calls it: kernel NAME, copy, fill, allocation, free
    stack: tuple[Frame, ...]  # that enqueued it
    site: int  # index of the frame of ``stack`` to see first
    stream_number: int  # never given again within the process; 0 is the host
    device: int  # as CUDA counts
    context: int  # the number of the CUDA context
    thread: int  # of the host, that enqueued it
    seq: int  # of the call; 0 where it is not known
    kernel: str | None  # its whole readable name; null where it is no kernel
    mangled: str | None  # the name as the driver has it
    reads: bool  # the bytes below
    writes: bool  # the bytes below
    atomic: bool  # its accesses are
    known: Known  # how: seen, seen in pieces that were joined, or from the arguments only
    address: int  # of the first byte that it touches
    size_bytes: int  # that it touches, or may touch where that is not known exactly
    graph: int  # the CUDA graph that it is a node of; 0 where it is none
    node: int  # its number there, from 1


@dataclass(frozen=True, slots=True)
class Memory:
    """The allocation that a race is about."""

    address: int  # of its first byte
    size_bytes: int  # in all
    how: How  # it was allocated
    seq: int  # of the call that allocated it
    stack: tuple[Frame, ...]  # that allocated it
    site: int  # index of the frame of ``stack`` to see first


@dataclass(frozen=True, slots=True)
class Synchronisation:
    """The last one that ordered the stream of ``current`` after that of ``previous``, too early."""

    kind: SyncKind  # by an event, by the host, or by the rules of the default stream
    sentence: str  # why it does not cover the access
    recorded_seq: int  # what was enqueued until this call is covered
    recorded_stack: tuple[Frame, ...]  # of this call
    recorded_site: int  # index of the frame to see first
    waited_seq: int  # of the wait
    waited_stack: tuple[Frame, ...]  # of the wait
    waited_site: int  # index of the frame to see first


@dataclass(frozen=True, slots=True)
class FoundRace:
    """A race; what was enqueued at the same two places of the program is one."""

    kind: RaceKind  # what went wrong
    confidence: Confidence  # that it is one
    sentence: str  # what happened
    address: int  # of the first byte that both touch
    size_bytes: int  # that both touch
    offset_bytes: int | None  # of the first byte in the allocation; null where that is not known
    count: int  # of times that it was found; the rest speaks of the first
    current: Side  # what was enqueued later
    previous: Side  # what was enqueued earlier
    hint: str  # the smallest fix
    remedies: tuple[str, ...]  # the same in the terms of the frameworks that took part
    memory: Memory | None  # null where it was allocated before the program was watched
    last_sync: Synchronisation | None  # null where nothing ordered the two streams before
    approximate: bool  # the bytes may be fewer: the map of this allocation became too fine
    process: int  # in which it was found first


@dataclass(frozen=True, slots=True)
class Suppressed:
    """A suppression, and what it hid."""

    pattern: str  # as written
    origin: str  # --suppress, or the file and the line where it stands
    races: int  # that it hid
    count: int  # of times that they were found


@dataclass(frozen=True, slots=True)
class Process:
    """One process that used CUDA."""

    process: int  # its number
    launches: int  # of kernels
    count: int  # of times that a race was found in it


@dataclass(frozen=True, slots=True)
class SanitizeResult:
    """The races of a program, and how much of it was seen."""

    schema: ClassVar[str] = "cudakit.sanitize/1"
    exit_status: int | None  # of the program, as a shell has it; null where it was none of its own
    simulated: bool  # whether a simulated device did the work
    stopped: bool  # whether the program was stopped at its first race
    races: tuple[FoundRace, ...]  # the surest first
    coverage: Coverage  # how much of what happened was understood
    gaps: Mapping[str, int]  # what could not be understood, and how often
    suppressed: tuple[Suppressed, ...]  # every suppression, also one that hid nothing
    processes: tuple[Process, ...]  # that used CUDA
    notes: tuple[str, ...]  # what else the reader must know
