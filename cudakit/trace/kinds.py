"""The words of the vocabulary: the closed sets that the facts are made of.

Numbers are part of the format of records, and never change.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag


class Kind(IntEnum):
    """What a record is of."""

    ALLOC = 1
    FREE = 2
    LAUNCH = 3
    ACCESS = 4
    COPY = 5
    FILL = 6
    STREAM_CREATE = 7
    STREAM_DESTROY = 8
    EVENT_RECORD = 9
    STREAM_WAIT = 10
    EVENT_SYNC = 11
    EVENT_QUERY_OK = 12
    STREAM_SYNC = 13
    STREAM_QUERY_OK = 14
    CONTEXT_SYNC = 15
    HOST_CALL = 16
    CAPTURE_BEGIN = 17
    CAPTURE_END = 18
    GRAPH_NODE = 19
    GRAPH_EDGE = 20
    GRAPH_LAUNCH = 21
    MEMOP = 22
    RANGE_PUSH = 23
    RANGE_POP = 24
    MARK = 25
    GAP = 26
    ACCESSED = 27
    ARENAS = 28


class Layer(IntEnum):
    """Who handed out memory."""

    DRIVER = 1
    POOL = 2  # an allocator above the driver: torch, CuPy, RMM


class How(IntEnum):
    """By which means memory came and went."""

    SYNC = 1
    STREAM_ORDERED = 2
    VIRTUAL = 3  # mapped into a reserved range
    PINNED = 4
    MANAGED = 5
    GRAPH = 6  # by a node of a graph


class Mode(IntFlag):
    """What an access does."""

    READ = 1
    WRITE = 2
    ATOMIC = 4


class Known(IntEnum):
    """How well an access is known."""

    EXACT = 1
    SUMMARY = (
        2  # what the kernel did, and the bytes between: the pieces were too many to tell apart
    )
    ASSUMED = 3  # from its arguments
    UNCERTAIN = 4  # from a table among its arguments, which may hold what earlier calls left there


class StreamFlag(IntEnum):
    """How a stream relates to the legacy default stream."""

    BLOCKING = 1
    NON_BLOCKING = 2
    PER_THREAD = 3  # the default stream of one thread, a blocking one
    LEGACY = 4


class Direction(IntEnum):
    """Between which memories a copy goes."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3
    HOST_TO_HOST = 4


class HostMemory(IntEnum):
    """What the host's side of a copy is."""

    NONE = 0
    PINNED = 1
    PAGEABLE = 2


class Phase(IntEnum):
    """Which end of something that lasts."""

    BEGIN = 1
    END = 2


class Work(IntEnum):
    """What the node of a graph does."""

    EMPTY = 0
    LAUNCH = 1
    COPY = 2
    FILL = 3
    ALLOC = 4
    FREE = 5
    HOST_CALL = 6
    MEMOP = 7
    GRAPH = 8


class Flag(IntEnum):
    """What a stream memory operation does with its word."""

    WAIT = 1
    WRITE = 2
