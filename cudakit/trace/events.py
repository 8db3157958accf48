"""The common event format: a fixed set of event kinds, the same for every recorder.

Each class is the body of one kind of event. Addresses are those of the recorded process. Streams, events,
graphs and executable graphs have numbers that are never reused; 0 means "none" or "unknown". A recorder
writes these objects (``trace_file.TraceWriter``) or records of the same fields (``layout``); the race
detector reads records.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    AllocationLayer,
    CollectiveFunction,
    Direction,
    EventKind,
    HostCallPhase,
    HostMemory,
    MemopType,
    MemoryKind,
    NcclDatatype,
    NodeType,
    Precision,
    StreamFlag,
    TemplateCheck,
)

# Field types of records, in numpy's notation.
I16 = Annotated[int, "<i2"]
I32 = Annotated[int, "<i4"]
U32 = Annotated[int, "<u4"]
U64 = Annotated[int, "<u8"]
I64 = Annotated[int, "<i8"]
Dim3: TypeAlias = Annotated[tuple[int, int, int], "3<u4"]
Pointers: TypeAlias = Annotated[tuple[int, int, int, int, int, int, int], "7<u8"]
Text = Annotated[str, "<u4"]  # stored in a record as an index of the string table


class _Body:
    """Base of all bodies. The kind follows from the name of the class."""

    __slots__ = ()
    kind: ClassVar[EventKind]

    def __init_subclass__(cls) -> None:
        cls.kind = EventKind[re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).upper()]


@dataclass(frozen=True, slots=True)
class Alloc(_Body):
    """Memory was allocated; if ``stream`` is not 0, by a stream-ordered allocation in that stream."""

    address: U64
    size_bytes: U64
    allocation_kind: AllocationKind = AllocationKind.SYNC
    stream: U32 = 0
    layer: AllocationLayer = AllocationLayer.DRIVER
    pool: Text = ""  # name of the pool, such as "cupy"; empty for the driver
    requested_bytes: U64 = 0  # bytes that the program requested; 0 if they equal ``size_bytes``


@dataclass(frozen=True, slots=True)
class Free(_Body):
    """Memory was freed; if ``stream`` is not 0, by a stream-ordered free in that stream."""

    address: U64
    size_bytes: U64
    allocation_kind: AllocationKind = AllocationKind.SYNC
    stream: U32 = 0
    layer: AllocationLayer = AllocationLayer.DRIVER
    pool: Text = ""  # name of the pool, such as "cupy"; empty for the driver


@dataclass(frozen=True, slots=True)
class Launch(_Body):
    """A kernel was enqueued. The events of its accesses have the same ``seq``.

    If ``pending`` is true, the recorder writes assumed accesses directly after the launch. The recorder
    writes exact accesses later, then an ``Accessed`` with the same ``seq``.

    If ``template_id`` is not 0, the accesses are those of this ``Template``. If it is relative, the
    template's launch had other pointers, and ``TemplatePointers`` have the pointers of this launch. If
    ``is_checked`` is true, the accesses of the template are contiguous from the pointers on, and a recorded
    launch had the same accesses while work that was not ordered used the same allocations. If
    ``is_unordered`` is true, the launch may not be ordered after earlier work, but could not be recorded.
    """

    stream: U32
    name: Text
    grid: Dim3 = (1, 1, 1)
    block: Dim3 = (1, 1, 1)
    pending: Annotated[bool, "?"] = False
    template_id: U32 = 0
    is_relative: Annotated[bool, "?"] = False
    is_checked: Annotated[bool, "?"] = False
    is_unordered: Annotated[bool, "?"] = False


@dataclass(frozen=True, slots=True)
class Access(_Body):
    """A launch or a graph node accessed the bytes from ``lo`` up to ``hi``.

    A strided access is to ``count`` elements, of which the first begins at ``lo`` and the last ends at
    ``hi``.
    """

    lo: U64
    hi: U64
    mode: AccessMode
    precision: Precision = Precision.EXACT
    stride_bytes: I64 = 0
    count: U64 = 0
    node: U32 = 0  # number of the node in its graph; 0 for a launch outside of graphs


@dataclass(frozen=True, slots=True)
class Copy(_Body):
    """A copy was enqueued: ``rows`` rows of ``size_bytes`` each. A 3D copy has one event per slice."""

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
class Fill(_Body):
    """A fill (memset) was enqueued: ``rows`` rows of ``size_bytes`` each."""

    stream: U32
    address: U64
    size_bytes: U64
    rows: U64 = 1
    pitch_bytes: U64 = 0
    asynchronous: Annotated[bool, "?"] = True


@dataclass(frozen=True, slots=True)
class StreamCreate(_Body):
    """A stream was created, or a default stream was first used."""

    stream: U32
    flag: StreamFlag = StreamFlag.BLOCKING
    priority: I16 = 0


@dataclass(frozen=True, slots=True)
class StreamDestroy(_Body):
    """A stream was destroyed. Work that was already enqueued continues."""

    stream: U32


@dataclass(frozen=True, slots=True)
class EventRecord(_Body):
    """An event was recorded in a stream, after all work that was enqueued in the stream."""

    event: U32
    stream: U32


@dataclass(frozen=True, slots=True)
class StreamWait(_Body):
    """A stream was made to wait for an event: its later work starts after the last record of the event."""

    stream: U32
    event: U32


@dataclass(frozen=True, slots=True)
class EventSync(_Body):
    """The host waited for the last record of an event."""

    event: U32


@dataclass(frozen=True, slots=True)
class EventQueryOk(_Body):
    """The host queried an event, and the event was complete (``cudaEventQuery`` returned success)."""

    event: U32


@dataclass(frozen=True, slots=True)
class StreamSync(_Body):
    """The host waited for a stream."""

    stream: U32


@dataclass(frozen=True, slots=True)
class StreamQueryOk(_Body):
    """The host queried a stream, and its work was complete (``cudaStreamQuery`` returned success)."""

    stream: U32


@dataclass(frozen=True, slots=True)
class ContextSync(_Body):
    """The host waited for every stream of a context."""


@dataclass(frozen=True, slots=True)
class HostCall(_Body):
    """A host function that was enqueued in a stream began or returned.

    ``event`` is the number of an event that the recorder itself recorded in the stream, directly before the
    program enqueued the host function (``EventRecord``). When the function begins, the host is ordered after
    this event, but not after work that was enqueued after the function. The number is 0 in older traces:
    there, the host is ordered after all work that was enqueued in the stream before the function began.
    """

    stream: U32
    phase: HostCallPhase
    event: U32 = 0


@dataclass(frozen=True, slots=True)
class CaptureBegin(_Body):
    """Stream capture began: later work of the stream becomes graph nodes."""

    graph: U32
    stream: U32


@dataclass(frozen=True, slots=True)
class CaptureEnd(_Body):
    """Stream capture ended. If it failed, its graph is never launched."""

    graph: U32
    stream: U32


@dataclass(frozen=True, slots=True)
class GraphNode(_Body):
    """A node was added to a graph; ``node`` is its number in the graph, from 1.

    The accesses of copy and fill nodes have the ``seq`` of this event. The accesses of kernel nodes have the
    ``seq`` of each launch of the graph.
    """

    graph: U32
    node: U32
    node_type: NodeType
    name: Text = ""


@dataclass(frozen=True, slots=True)
class GraphEdge(_Body):
    """The graph node ``after`` depends on the node ``before``."""

    graph: U32
    before: U32
    after: U32


@dataclass(frozen=True, slots=True)
class GraphLaunch(_Body):
    """A graph was launched into a stream."""

    stream: U32
    graph: U32
    executable: U32
    pending: U32 = 0  # number of ``Accessed`` events that follow: one for each kernel node
    template_id: U32 = (
        0  # ``Template`` that has the accesses of the kernel nodes; 0 without a template
    )
    is_checked: Annotated[bool, "?"] = False  # same meaning as in ``Launch``
    is_unordered: Annotated[bool, "?"] = False  # same meaning as in ``Launch``


@dataclass(frozen=True, slots=True)
class GraphDestroy(_Body):
    """No later launch has this graph: its executable graph was destroyed, or updated from another graph.

    Launches that were already enqueued continue. ``executable`` is 0 if the executable graph still exists.
    Traces of earlier versions lack this event.
    """

    graph: U32
    executable: U32 = 0


@dataclass(frozen=True, slots=True)
class Memop(_Body):
    """A stream memory operation was enqueued: a wait for a word in memory, or a write of the word."""

    stream: U32
    address: U64
    flag: MemopType


@dataclass(frozen=True, slots=True)
class RangePush(_Body):
    """A named NVTX range began: a range of the thread or, if ``number`` is not 0, a range of the process."""

    name: Text
    domain: Text = ""  # name of the NVTX domain; empty for the default domain
    # Number of a range of the process, which any thread may end; 0 for a range of the thread.
    number: U64 = 0
    # Whether the range is a copy: autograd's thread gets the ranges of the thread that called ``backward()``.
    is_copy: Annotated[bool, "?"] = False


@dataclass(frozen=True, slots=True)
class RangePop(_Body):
    """An NVTX range ended: the thread's innermost one in a domain, or the process's range ``number``."""

    domain: Text = ""
    number: U64 = 0  # number of a range of the process; 0 for a range of the thread
    is_copy: Annotated[bool, "?"] = False


@dataclass(frozen=True, slots=True)
class Mark(_Body):
    """An NVTX mark: a named point in time."""

    name: Text
    domain: Text = ""


@dataclass(frozen=True, slots=True)
class Gap(_Body):
    """The recorder could not record an operation completely, for a reason that occurred ``count`` times."""

    reason: Text
    count: U64 = 1


@dataclass(frozen=True, slots=True)
class Accessed(_Body):
    """The recorder wrote all accesses of the launch with this ``seq``, or of one node of a graph launch."""

    node: U32 = 0  # number of the graph node; 0 for a kernel launch outside of graphs
    # False if exact accesses were lost; then the assumed accesses of the launch count.
    exact: Annotated[bool, "?"] = True


@dataclass(frozen=True, slots=True)
class Template(_Body):
    """The accesses of the launch with this ``seq`` were compared with those of earlier launches.

    If ``template_id`` is not 0, the accesses become a template: later launches name the template instead
    of their accesses. If no launch has this ``seq``, no later launch names the template, so it can be
    forgotten. If ``template_id`` is 0 and there was no ``check``, all templates so far are forgotten.
    """

    template_id: U32 = 0
    check: TemplateCheck = TemplateCheck.NONE


@dataclass(frozen=True, slots=True)
class TemplatePointers(_Body):
    """Pointers among the arguments of a launch, in the order of the arguments; 0 after the last pointer.

    The launch is one whose accesses become a template, or one that uses a template of a launch with other
    pointers.
    """

    pointers: Pointers


@dataclass(frozen=True, slots=True)
class LaunchDelayed(_Body):
    """The recorder delays a launch, for example because no arena has space for its accesses.

    The launch has the same ``seq``, so it counts as enqueued before the delay: calls of other threads during
    the delay do not order it. If ``pending`` is true, the delay begins, and the launch is recorded later.
    Otherwise the delay ended, and the launch was recorded unless it failed.
    """

    pending: Annotated[bool, "?"] = True


@dataclass(frozen=True, slots=True)
class Arenas(_Body):
    """The recorder's arenas (device memory to which kernels write their accesses) changed in size."""

    size_bytes: U64


@dataclass(frozen=True, slots=True)
class OutOfMemory(_Body):
    """A memory pool could not allocate ``size_bytes``, after it had released its unused memory."""

    size_bytes: U64
    free_bytes: U64  # free memory of the device
    pool: Text = ""  # name of the pool, such as "cupy"


# --- events of a profile, with times on the clock of ``time_ns``


@dataclass(frozen=True, slots=True)
class ApiCall(_Body):
    """The program called a function of the CUDA driver; a call within another one has no event.

    A call of the CUDA runtime is recorded as the driver function that it calls.

    ``correlation`` is the number that the call shares with the work that it started on the GPU. It is unique
    within a process.
    """

    function: Text  # name of the function, such as "cuLaunchKernel"
    correlation: U32
    start_ns: I64
    end_ns: I64
    size_bytes: U64 = 0  # bytes that the call allocates; 0 for other calls


@dataclass(frozen=True, slots=True)
class KernelRun(_Body):
    """A kernel ran on a device."""

    stream: U32
    name: Text
    correlation: U32  # id of the API call that launched the kernel or its graph
    start_ns: I64
    end_ns: I64
    graph_node: U64 = 0  # number of the graph node; 0 for a kernel outside of graphs
    grid: Dim3 = (1, 1, 1)
    block: Annotated[tuple[int, int, int], "3<u2"] = (1, 1, 1)
    registers: Annotated[int, "<u2"] = 0  # registers of each thread
    shared_bytes: U32 = 0  # static and dynamic shared memory of each thread block


@dataclass(frozen=True, slots=True)
class CopyRun(_Body):
    """A copy ran on a device."""

    stream: U32
    start_ns: I64
    end_ns: I64
    size_bytes: U64
    correlation: U32 = 0  # id of the API call that started the copy or launched its graph
    peer_device: I16 = -1  # the other device of a copy between two devices; -1 for other copies
    direction: Direction = Direction.DEVICE_TO_DEVICE
    source_memory: MemoryKind = MemoryKind.UNKNOWN
    destination_memory: MemoryKind = MemoryKind.UNKNOWN
    graph_node: U64 = 0  # number of the graph node; 0 for a copy outside of graphs


@dataclass(frozen=True, slots=True)
class FillRun(_Body):
    """A memset ran on a device."""

    stream: U32
    start_ns: I64
    end_ns: I64
    size_bytes: U64
    correlation: U32 = 0  # id of the API call that started the memset or launched its graph
    graph_node: U64 = 0  # number of the graph node; 0 for a memset outside of graphs


@dataclass(frozen=True, slots=True)
class GraphNodeSite(_Body):
    """A graph node was created; the event has the call stack of the capture of the node."""

    graph_node: U64


@dataclass(frozen=True, slots=True)
class ProfileWindow(_Body):
    """The profile of the process began, or it ended: GPU work outside of these times is not recorded."""

    is_open: Annotated[bool, "?"]
    rank: Annotated[int, "<i4"] = -1  # rank of the process in a job, as of torchrun; -1 if unknown


@dataclass(frozen=True, slots=True)
class DeviceInfo(_Body):
    """The recorder read the name and the properties of the device of this event."""

    name: Text
    multiprocessors: U32 = 0
    memory_bytes: U64 = 0
    threads_per_multiprocessor: U32 = 0  # maximum number of resident threads; 0 if unknown
    blocks_per_multiprocessor: U32 = 0  # maximum number of resident thread blocks; 0 if unknown
    registers_per_multiprocessor: U32 = 0
    shared_bytes_per_multiprocessor: U32 = 0
    reserved_shared_bytes_per_block: U32 = 0  # shared memory that the driver keeps in each block


@dataclass(frozen=True, slots=True)
class Communicator(_Body):
    """The process joined a communicator of NCCL, or its hash and rank in the communicator became known."""

    hash: U64  # number of the communicator that all its ranks share; 0 if unknown
    communicator: U32  # number of the communicator in this process, from 1
    name: Text = ""  # name that the program gave the communicator
    rank: I32 = -1  # rank of the process in the communicator; -1 if unknown
    rank_count: U32 = 0  # number of ranks of the communicator; 0 if unknown
    profiler_version: U32 = 0  # version of NCCL's profiler interface


@dataclass(frozen=True, slots=True)
class Collective(_Body):
    """A kernel of NCCL performs one operation: a collective, or a send or receive between two ranks.

    The launch of the kernel has the same ``seq`` and stream. In a graph, the node of the kernel has the same
    ``seq``, and each launch of the graph repeats the operation. The event has the call stack of the program's
    call.
    """

    stream: U32  # stream of the launch; 0 for a node of a graph
    send: U64  # address of the send buffer; 0 for a receive
    receive: U64  # address of the receive buffer; 0 for a send
    element_count: U64  # number of elements: of one rank, for an all-gather or reduce-scatter
    communicator: U32  # number of the communicator in this process
    sequence: U32 = 0  # number of the call among the calls of the communicator in this process
    group: U32 = (
        0  # number of the group of calls between ncclGroupStart and ncclGroupEnd, in this process
    )
    root: I32 = -1  # root rank; for a send or receive, the other rank
    graph: U32 = 0  # number of the graph; 0 outside of graphs
    node: U32 = 0  # number of the graph node; 0 outside of graphs
    function: CollectiveFunction = CollectiveFunction.UNKNOWN
    datatype: NcclDatatype = NcclDatatype.UNKNOWN
    name: Text = ""  # name of the kernel


EventBody: TypeAlias = (
    Alloc | Free | Launch | Access | Copy | Fill | StreamCreate | StreamDestroy | EventRecord
    | StreamWait | EventSync | EventQueryOk | StreamSync | StreamQueryOk | ContextSync | HostCall
    | CaptureBegin | CaptureEnd | GraphNode | GraphEdge | GraphLaunch | GraphDestroy | Memop | RangePush
    | RangePop | Mark | Gap | Accessed | Template | TemplatePointers | LaunchDelayed | Arenas | OutOfMemory
    | ApiCall | KernelRun | CopyRun | FillRun | GraphNodeSite | ProfileWindow | DeviceInfo
    | Communicator | Collective
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """An event with its body, API call, time, thread, context, device and call stack.

    Events with the same ``program_call`` were recorded while the program's own code executed one instruction,
    such as a call of a library; 0 is unknown. Work of autograd's threads belongs to the call that started the
    backward pass. The event of a graph node has the program call that captured the node.
    """

    body: EventBody
    seq: U64 = 0  # number of the API call; one call may give several events
    time_ns: I64 = 0
    thread: U32 = 0
    program_call: U32 = 0
    context: U32 = 0
    site: U32 = 0  # Python call stack, as an index of the stack table
    device: I16 = 0
