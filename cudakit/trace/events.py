"""The common event format: a fixed set of event kinds, the same for every recorder.

Addresses are those of the recorded process. Streams, events, graphs and executables have numbers that are
never reused; 0 is "none" or "unknown". Producers write these objects (``log.Writer``) or records
(``layout``); consumers read records.
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

# Field types of records, in numpy's notation.
I16 = Annotated[int, "<i2"]
U32 = Annotated[int, "<u4"]
U64 = Annotated[int, "<u8"]
I64 = Annotated[int, "<i8"]
Dim3: TypeAlias = Annotated[tuple[int, int, int], "3<u4"]
Text = Annotated[str, "<u4"]  # in a record: an index of the string table


@dataclass(frozen=True, slots=True)
class Alloc:
    """Memory was allocated; with a stream, for work ordered after this point of the stream."""

    kind: ClassVar[Kind] = Kind.ALLOC
    address: U64
    size_bytes: U64
    how: How = How.SYNC
    stream: U32 = 0
    layer: Layer = Layer.DRIVER


@dataclass(frozen=True, slots=True)
class Free:
    """Memory was freed; with a stream, for work ordered after this point of the stream."""

    kind: ClassVar[Kind] = Kind.FREE
    address: U64
    size_bytes: U64
    how: How = How.SYNC
    stream: U32 = 0
    layer: Layer = Layer.DRIVER


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel was enqueued. Its accesses have the same ``seq``, and follow now or later.

    If ``pending``, the accesses that follow at once are assumed; the exact ones come later, and end with an
    ``Accessed`` of the same ``seq``.
    """

    kind: ClassVar[Kind] = Kind.LAUNCH
    stream: U32
    name: Text
    grid: Dim3 = (1, 1, 1)
    block: Dim3 = (1, 1, 1)
    pending: Annotated[bool, "?"] = False


@dataclass(frozen=True, slots=True)
class Access:
    """A launch or a graph node accessed the bytes from ``lo`` up to ``hi``.

    With a stride, it accessed ``count`` elements; the first begins at ``lo``, the last ends at ``hi``.
    """

    kind: ClassVar[Kind] = Kind.ACCESS
    lo: U64
    hi: U64
    mode: Mode
    known: Known = Known.EXACT
    stride_bytes: I64 = 0
    count: U64 = 0
    node: U32 = 0  # the node's number in its graph


@dataclass(frozen=True, slots=True)
class Copy:
    """``rows`` of ``size_bytes`` each, one pitch apart, were copied. A 3D copy has one event per slice."""

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
    """Memory was filled with one value."""

    kind: ClassVar[Kind] = Kind.FILL
    stream: U32
    address: U64
    size_bytes: U64
    rows: U64 = 1
    pitch_bytes: U64 = 0
    asynchronous: Annotated[bool, "?"] = True


@dataclass(frozen=True, slots=True)
class StreamCreate:
    """A stream was created, or a default stream was first used."""

    kind: ClassVar[Kind] = Kind.STREAM_CREATE
    stream: U32
    flag: StreamFlag = StreamFlag.BLOCKING
    priority: I16 = 0


@dataclass(frozen=True, slots=True)
class StreamDestroy:
    """A stream was destroyed; work already enqueued continues."""

    kind: ClassVar[Kind] = Kind.STREAM_DESTROY
    stream: U32


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event was recorded after all work enqueued so far in the stream."""

    kind: ClassVar[Kind] = Kind.EVENT_RECORD
    event: U32
    stream: U32


@dataclass(frozen=True, slots=True)
class StreamWait:
    """Later work of the stream waits for the last record of the event."""

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
    """A query showed the host that the last record of an event was reached."""

    kind: ClassVar[Kind] = Kind.EVENT_QUERY_OK
    event: U32


@dataclass(frozen=True, slots=True)
class StreamSync:
    """The host waited for a stream."""

    kind: ClassVar[Kind] = Kind.STREAM_SYNC
    stream: U32


@dataclass(frozen=True, slots=True)
class StreamQueryOk:
    """A query showed the host that a stream was idle."""

    kind: ClassVar[Kind] = Kind.STREAM_QUERY_OK
    stream: U32


@dataclass(frozen=True, slots=True)
class ContextSync:
    """The host waited for every stream of a context."""

    kind: ClassVar[Kind] = Kind.CONTEXT_SYNC


@dataclass(frozen=True, slots=True)
class HostCall:
    """A stream called a host function, which began or returned."""

    kind: ClassVar[Kind] = Kind.HOST_CALL
    stream: U32
    phase: Phase


@dataclass(frozen=True, slots=True)
class CaptureBegin:
    """Stream capture began: later work of the stream becomes graph nodes."""

    kind: ClassVar[Kind] = Kind.CAPTURE_BEGIN
    graph: U32
    stream: U32


@dataclass(frozen=True, slots=True)
class CaptureEnd:
    """Stream capture ended; a failed capture is never launched."""

    kind: ClassVar[Kind] = Kind.CAPTURE_END
    graph: U32
    stream: U32


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node was added to a graph; ``node`` is its number in the graph, from 1.

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
    """One graph node depends on another."""

    kind: ClassVar[Kind] = Kind.GRAPH_EDGE
    graph: U32
    before: U32
    after: U32


@dataclass(frozen=True, slots=True)
class GraphLaunch:
    """A graph was launched into a stream."""

    kind: ClassVar[Kind] = Kind.GRAPH_LAUNCH
    stream: U32
    graph: U32
    executable: U32
    pending: U32 = 0  # the number of ``Accessed`` to follow: one for each kernel node


@dataclass(frozen=True, slots=True)
class Memop:
    """A stream memory operation waits for a word in memory, or writes it."""

    kind: ClassVar[Kind] = Kind.MEMOP
    stream: U32
    address: U64
    flag: Flag


@dataclass(frozen=True, slots=True)
class RangePush:
    """A named range of NVTX begins: one of the thread, or with a number one of the whole process."""

    kind: ClassVar[Kind] = Kind.RANGE_PUSH
    name: Text
    domain: Text = ""  # empty: NVTX's default domain
    number: U64 = 0  # of a range that any thread may end; 0: a range of the thread


@dataclass(frozen=True, slots=True)
class RangePop:
    """The innermost range of the thread in a domain ends, or with a number that range of the process."""

    kind: ClassVar[Kind] = Kind.RANGE_POP
    domain: Text = ""
    number: U64 = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """A named instant of NVTX."""

    kind: ClassVar[Kind] = Kind.MARK
    name: Text
    domain: Text = ""


@dataclass(frozen=True, slots=True)
class Gap:
    """The recorder could not record an operation in full, ``count`` times; ``what`` names it."""

    kind: ClassVar[Kind] = Kind.GAP
    what: Text
    count: U64 = 1


@dataclass(frozen=True, slots=True)
class Accessed:
    """All accesses of the launch with this ``seq`` are recorded, or those of one node of a graph launch."""

    kind: ClassVar[Kind] = Kind.ACCESSED
    node: U32 = 0  # 0: a kernel launch
    exact: Annotated[bool, "?"] = (
        True  # False: accesses were lost, and the assumed ones remain valid
    )


@dataclass(frozen=True, slots=True)
class Arenas:
    """The device memory that the recorder uses for arenas from now on."""

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
    """One fact with its time, device, context, thread and call stack."""

    fact: Fact
    seq: U64 = 0  # number of the API call; several facts may belong to one call
    time_ns: I64 = 0
    thread: U64 = 0
    context: U32 = 0
    site: U32 = 0  # the Python call stack: an index of the stack table
    device: I16 = 0
