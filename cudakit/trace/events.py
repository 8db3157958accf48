"""What can have happened on a GPU: a closed vocabulary, whoever saw it.

Numbers mean what they mean to the one who wrote them: addresses are the process's, a stream, an event, a
graph and an executable is a number that is never given again, 0 is "none" or "unknown". A producer writes
these as objects (``log.Writer``) or as the records of ``layout``, consumers read records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from cudakit.trace.kinds import (
    Direction,
    Flag,
    HostMemory,
    How,
    Kind,
    Known,
    Layer,
    Mode,
    Phase,
    StreamFlag,
    Work,
)

# How wide a field is in a record: numpy's type, and how many of them.
U8 = Annotated[int, "<u1"]
U16 = Annotated[int, "<u2"]
I16 = Annotated[int, "<i2"]
U32 = Annotated[int, "<u4"]
U64 = Annotated[int, "<u8"]
I64 = Annotated[int, "<i8"]
Dim3: TypeAlias = Annotated[tuple[int, int, int], "3<u4"]
Text = Annotated[str, "<u4"]  # in a record: its number in the table of strings


@dataclass(frozen=True, slots=True)
class Alloc:
    """Memory can be used from here on, with a stream: by what is ordered after it there."""

    kind: ClassVar[Kind] = Kind.ALLOC
    address: U64
    size_bytes: U64
    how: How = How.SYNC
    stream: U32 = 0
    layer: Layer = Layer.DRIVER


@dataclass(frozen=True, slots=True)
class Free:
    """Memory cannot be used from here on, with a stream: by what is ordered after it there."""

    kind: ClassVar[Kind] = Kind.FREE
    address: U64
    size_bytes: U64
    how: How = How.SYNC
    stream: U32 = 0
    layer: Layer = Layer.DRIVER


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel was enqueued. Its accesses have the same ``seq`` and come later, not always at once.

    Where they are ``pending``, what comes at once is assumed, and an ``Accessed`` of the same ``seq`` says
    when all is told.
    """

    kind: ClassVar[Kind] = Kind.LAUNCH
    stream: U32
    name: Text
    grid: Dim3 = (1, 1, 1)
    block: Dim3 = (1, 1, 1)
    pending: Annotated[bool, "?"] = False


@dataclass(frozen=True, slots=True)
class Access:
    """What a launch, or a node of a graph, did to the bytes from ``lo`` up to ``hi``.

    With a stride, to ``count`` elements of which the first begins at ``lo`` and the last ends at ``hi``.
    """

    kind: ClassVar[Kind] = Kind.ACCESS
    lo: U64
    hi: U64
    mode: Mode
    known: Known = Known.EXACT
    stride_bytes: I64 = 0
    count: U64 = 0
    node: U32 = 0  # of a graph: which of its nodes


@dataclass(frozen=True, slots=True)
class Copy:
    """``rows`` of ``size_bytes`` each, one pitch apart, were copied; a box is a copy for each slice."""

    kind: ClassVar[Kind] = Kind.COPY
    stream: U32
    destination: U64
    source: U64
    size_bytes: U64
    rows: U64 = 1
    destination_pitch_bytes: U64 = 0
    source_pitch_bytes: U64 = 0
    direction: Direction = Direction.DEVICE_TO_DEVICE
    host: HostMemory = HostMemory.NONE
    asynchronous: Annotated[bool, "?"] = True


@dataclass(frozen=True, slots=True)
class Fill:
    """Memory was set to one value."""

    kind: ClassVar[Kind] = Kind.FILL
    stream: U32
    address: U64
    size_bytes: U64
    rows: U64 = 1
    pitch_bytes: U64 = 0
    asynchronous: Annotated[bool, "?"] = True


@dataclass(frozen=True, slots=True)
class StreamCreate:
    """A stream is there; the default ones from their first use."""

    kind: ClassVar[Kind] = Kind.STREAM_CREATE
    stream: U32
    flag: StreamFlag = StreamFlag.BLOCKING
    priority: I16 = 0


@dataclass(frozen=True, slots=True)
class StreamDestroy:
    """A stream takes no more work; what it has goes on."""

    kind: ClassVar[Kind] = Kind.STREAM_DESTROY
    stream: U32


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event stands for all that is in the stream by now."""

    kind: ClassVar[Kind] = Kind.EVENT_RECORD
    event: U32
    stream: U32


@dataclass(frozen=True, slots=True)
class StreamWait:
    """What comes next in the stream waits for the last record of the event."""

    kind: ClassVar[Kind] = Kind.STREAM_WAIT
    stream: U32
    event: U32


@dataclass(frozen=True, slots=True)
class EventSync:
    """The host waited for the last record of an event."""

    kind: ClassVar[Kind] = Kind.EVENT_SYNC
    event: U32


@dataclass(frozen=True, slots=True)
class EventQueryOk:
    """The host learnt that the last record of an event is reached."""

    kind: ClassVar[Kind] = Kind.EVENT_QUERY_OK
    event: U32


@dataclass(frozen=True, slots=True)
class StreamSync:
    """The host waited for a stream."""

    kind: ClassVar[Kind] = Kind.STREAM_SYNC
    stream: U32


@dataclass(frozen=True, slots=True)
class StreamQueryOk:
    """The host learnt that a stream has nothing left to do."""

    kind: ClassVar[Kind] = Kind.STREAM_QUERY_OK
    stream: U32


@dataclass(frozen=True, slots=True)
class ContextSync:
    """The host waited for every stream of a context."""

    kind: ClassVar[Kind] = Kind.CONTEXT_SYNC


@dataclass(frozen=True, slots=True)
class HostCall:
    """A stream called a function of the host, which began or returned."""

    kind: ClassVar[Kind] = Kind.HOST_CALL
    stream: U32
    phase: Phase


@dataclass(frozen=True, slots=True)
class CaptureBegin:
    """What comes next in the stream becomes nodes of a graph, and does not run."""

    kind: ClassVar[Kind] = Kind.CAPTURE_BEGIN
    graph: U32
    stream: U32


@dataclass(frozen=True, slots=True)
class CaptureEnd:
    """The graph is complete; one that failed is never launched."""

    kind: ClassVar[Kind] = Kind.CAPTURE_END
    graph: U32
    stream: U32


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of a graph: its number, counted from 1 in each graph, and what it does.

    The accesses of a copy, a fill and the like follow with the same ``seq``; those of a kernel with the
    ``seq`` of each launch of the graph.
    """

    kind: ClassVar[Kind] = Kind.GRAPH_NODE
    graph: U32
    node: U32
    work: Work
    name: Text = ""


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """One node of a graph waits for another."""

    kind: ClassVar[Kind] = Kind.GRAPH_EDGE
    graph: U32
    before: U32
    after: U32


@dataclass(frozen=True, slots=True)
class GraphLaunch:
    """All nodes of a graph were enqueued, as one piece of work of the stream."""

    kind: ClassVar[Kind] = Kind.GRAPH_LAUNCH
    stream: U32
    graph: U32
    executable: U32
    pending: U32 = 0  # how many ``Accessed`` come for it: one for each node that is a kernel


@dataclass(frozen=True, slots=True)
class Memop:
    """A stream waits for a word in memory, or writes it."""

    kind: ClassVar[Kind] = Kind.MEMOP
    stream: U32
    address: U64
    flag: Flag


@dataclass(frozen=True, slots=True)
class RangePush:
    """A named range (NVTX) of the thread begins."""

    kind: ClassVar[Kind] = Kind.RANGE_PUSH
    name: Text
    domain: Text = ""


@dataclass(frozen=True, slots=True)
class RangePop:
    """The innermost range of the thread ends."""

    kind: ClassVar[Kind] = Kind.RANGE_POP
    domain: Text = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A named moment (NVTX)."""

    kind: ClassVar[Kind] = Kind.MARK
    name: Text
    domain: Text = ""


@dataclass(frozen=True, slots=True)
class Gap:
    """Something happened that could not be understood, so many times."""

    kind: ClassVar[Kind] = Kind.GAP
    what: Text
    count: U64 = 1


@dataclass(frozen=True, slots=True)
class Accessed:
    """All that a launch did is told, or all that a node of a graph did in it; of the same ``seq``."""

    kind: ClassVar[Kind] = Kind.ACCESSED
    node: U32 = 0  # of a graph; 0: the launch itself
    exact: Annotated[bool, "?"] = True  # else something was lost, and what was assumed stands


@dataclass(frozen=True, slots=True)
class Arenas:
    """So much memory of its device the recording holds from here on."""

    kind: ClassVar[Kind] = Kind.ARENAS
    size_bytes: U64


Fact: TypeAlias = (
    Alloc | Free | Launch | Access | Copy | Fill | StreamCreate | StreamDestroy | EventRecord
    | StreamWait | EventSync | EventQueryOk | StreamSync | StreamQueryOk | ContextSync | HostCall
    | CaptureBegin | CaptureEnd | GraphNode | GraphEdge | GraphLaunch | Memop | RangePush | RangePop
    | Mark | Gap | Accessed | Arenas
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """One fact, and when, where and by whom it was seen."""

    fact: Fact
    seq: U64 = 0  # order of the API calls; several facts of one call share it
    time_ns: I64 = 0
    thread: U64 = 0
    context: U32 = 0
    site: U32 = 0  # the Python stack, by its number in the table of stacks
    device: I16 = 0
