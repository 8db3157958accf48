"""The enumerations of the common event format. Their numbers are stored in traces and never change."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final


class EventKind(IntEnum):
    """The kind of an event."""

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
    RANGE_PUSH = 23  # begin of an NVTX range
    RANGE_POP = 24  # end of an NVTX range
    MARK = 25  # NVTX mark
    GAP = 26
    ACCESSED = 27
    ARENAS = 28
    OUT_OF_MEMORY = 29
    API_CALL = 30
    KERNEL_RUN = 31
    COPY_RUN = 32
    FILL_RUN = 33
    GRAPH_NODE_SITE = 35
    PROFILE_WINDOW = 36
    DEVICE_INFO = 37
    COMMUNICATOR = 38
    COLLECTIVE = 39
    TEMPLATE = 42
    TEMPLATE_POINTERS = 43
    LAUNCH_DELAYED = 44
    GRAPH_DESTROY = 45


class AllocationLayer(IntEnum):
    """The layer that allocated memory."""

    DRIVER = 1
    POOL = 2  # a caching allocator, such as the allocators of torch, CuPy and RMM


class AllocationKind(IntEnum):
    """The kind of allocation."""

    SYNC = 1
    STREAM_ORDERED = 2
    VIRTUAL = 3  # device memory mapped into a reserved address range
    PINNED = 4
    MANAGED = 5
    GRAPH = 6  # memory of an allocation node in a graph


class AccessMode(IntFlag):
    """The mode of an access."""

    READ = 1
    WRITE = 2
    ATOMIC = 4


class Precision(IntEnum):
    """The precision of a recorded access."""

    MERGED = 0  # several exact ranges were merged into one, which also has the bytes between them
    EXACT = 1  # the kernel accessed exactly these bytes
    SUMMARY = 2  # a whole tensor: a store through a tensor map wrote a part of it
    ASSUMED = 3  # the access was assumed from a pointer argument of the kernel
    UNCERTAIN = (
        4  # the access was assumed from a pointer table among the arguments, which may be stale
    )


class TemplateCheck(IntEnum):
    """The result of comparing the accesses of a recorded launch with the template of its signature."""

    NONE = 0  # the signature had no template yet
    EQUAL = 1
    DIFFERENT = 2  # the template is no longer used


class StreamFlag(IntEnum):
    """The relation of a stream to the legacy default stream."""

    BLOCKING = 1
    NON_BLOCKING = 2
    PER_THREAD = 3  # default stream of a thread, which is a blocking stream
    LEGACY = 4


class Direction(IntEnum):
    """The direction of a copy."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3
    HOST_TO_HOST = 4


class HostMemory(IntEnum):
    """The kind of the host memory that a copy reads or writes."""

    NONE = 0  # the copy is between devices
    PINNED = 1
    PAGEABLE = 2


class HostCallPhase(IntEnum):
    """Whether a host function begins or has returned."""

    BEGIN = 1
    END = 2


class NodeType(IntEnum):
    """The type of a graph node."""

    EMPTY = 0
    LAUNCH = 1
    COPY = 2
    FILL = 3
    ALLOC = 4
    FREE = 5
    HOST_CALL = 6
    MEMOP = 7
    GRAPH = 8


class MemopType(IntEnum):
    """The type of a stream memory operation."""

    WAIT = 1
    WRITE = 2


class CollectiveFunction(IntEnum):
    """The function of a collective or point-to-point operation of NCCL."""

    UNKNOWN = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BROADCAST = 4
    REDUCE = 5
    SEND = 6
    RECEIVE = 7


class NcclDatatype(IntEnum):
    """The type of the elements of a collective: the number in ncclDataType_t of NCCL plus 1."""

    UNKNOWN = 0  # a type without a name in NCCL's events, such as ncclUint8
    INT8 = 1
    UINT8 = 2
    INT32 = 3
    UINT32 = 4
    INT64 = 5
    UINT64 = 6
    FLOAT16 = 7
    FLOAT32 = 8
    FLOAT64 = 9
    BFLOAT16 = 10
    FLOAT8_E4M3 = 11
    FLOAT8_E5M2 = 12


# The bytes of one element of each type. The type without a name in NCCL's events is ncclUint8.
ELEMENT_BYTES: Final = {
    NcclDatatype.UNKNOWN: 1,
    NcclDatatype.INT8: 1,
    NcclDatatype.UINT8: 1,
    NcclDatatype.INT32: 4,
    NcclDatatype.UINT32: 4,
    NcclDatatype.INT64: 8,
    NcclDatatype.UINT64: 8,
    NcclDatatype.FLOAT16: 2,
    NcclDatatype.FLOAT32: 4,
    NcclDatatype.FLOAT64: 8,
    NcclDatatype.BFLOAT16: 2,
    NcclDatatype.FLOAT8_E4M3: 1,
    NcclDatatype.FLOAT8_E5M2: 1,
}


class MemoryKind(IntEnum):
    """The kind of the memory at one end of a copy, as in CUpti_ActivityMemoryKind of CUPTI."""

    UNKNOWN = 0
    PAGEABLE = 1
    PINNED = 2
    DEVICE = 3
    ARRAY = 4
    MANAGED = 5
    DEVICE_STATIC = 6
    MANAGED_STATIC = 7


# The NVTX domains of libraries that record a range for each of their calls: CUB and Thrust (CCCL), NCCL, and
# XLA (TSL). Reports leave them out, because these ranges are not parts of the program.
LIBRARY_DOMAINS = frozenset({"CCCL", "NCCL", "TSL"})
