"""A stand-in for NCCL: loads its profiler plugin, and makes the events of each version in NCCL's order.

The structs are those of NCCL's headers src/include/plugin/profiler/profiler_v1.h to profiler_v6.h. The order
of the events is that of enqueue.cc and group.cc in NCCL 2.28 (https://github.com/NVIDIA/nccl). A program
imports this module, and makes the calls of NCCL through ``Communicator``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    Union,
    byref,
    c_bool,
    c_char_p,
    c_int,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass, field
from typing import Any

GROUP, COLL, P2P, GROUP_API, COLL_API, P2P_API, KERNEL_LAUNCH, COPY_ENGINE = (
    1, 2, 4, 256, 512, 1024, 2048, 4096,
)  # fmt: skip
NEWEST = 6
FIRST_WITH_RANKS, FIRST_WITH_CALLS = 4, 5
FUNCTIONS_OF_VERSION_1 = {
    name: number
    for number, name in enumerate(
        (
            "Broadcast",
            "Reduce",
            "AllGather",
            "ReduceScatter",
            "AllReduce",
            "SendRecv",
            "Send",
            "Recv",
        )
    )
}
DATATYPES = ("ncclInt8", "ncclUint8", "ncclInt32", "ncclUint32", "ncclInt64", "ncclUint64", "ncclFloat16",
             "ncclFloat32", "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2")  # fmt: skip
SIZES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)


def _struct(**members: Any) -> type[Structure]:
    return type("Members", (Structure,), {"_fields_": list(members.items())})


def _event(type_of_kind: Any, **members: type[Structure]) -> type[Structure]:
    union = type("Details", (Union,), {"_fields_": list(members.items())})
    fields = [("type", type_of_kind), ("parent", c_void_p), ("rank", c_int), ("details", union)]
    return type("Event", (Structure,), {"_fields_": fields, "_anonymous_": ("details",)})


_V1_COLL = _struct(
    name=c_char_p, hash=c_uint64, sequence=c_uint64, function=c_uint8, send=c_void_p, receive=c_void_p,
    count=c_size_t, root=c_int, datatype=c_uint8, operation=c_uint32, traffic=c_size_t, channels=c_uint8,
    warps=c_uint8, algorithm=c_uint8, protocol=c_uint8, is_collnet=c_int, is_nvls=c_int,
)  # fmt: skip
_V1_P2P = _struct(
    name=c_char_p,
    hash=c_uint64,
    function=c_uint8,
    buffer=c_void_p,
    datatype=c_uint8,
    count=c_size_t,
    peer=c_int,
)
_V2_COLL = _struct(
    name=c_char_p, hash=c_uint64, sequence=c_uint64, function=c_char_p, send=c_void_p, receive=c_void_p,
    count=c_size_t, root=c_int, datatype=c_char_p, traffic=c_size_t, channels=c_uint8, warps=c_uint8,
    algorithm=c_char_p, protocol=c_char_p,
)  # fmt: skip
_V3_COLL = _struct(
    name=c_char_p, hash=c_uint64, sequence=c_uint64, function=c_char_p, send=c_void_p, receive=c_void_p,
    count=c_size_t, root=c_int, datatype=c_char_p, channels=c_uint8, warps=c_uint8, algorithm=c_char_p,
    protocol=c_char_p,
)  # fmt: skip
_V2_P2P = _struct(
    name=c_char_p,
    hash=c_uint64,
    function=c_char_p,
    buffer=c_void_p,
    datatype=c_char_p,
    count=c_size_t,
    peer=c_int,
)
_V4_COLL = _struct(
    sequence=c_uint64, function=c_char_p, send=c_void_p, receive=c_void_p, count=c_size_t, root=c_int,
    datatype=c_char_p, channels=c_uint8, warps=c_uint8, algorithm=c_char_p, protocol=c_char_p,
)  # fmt: skip
_V4_P2P = _struct(
    function=c_char_p,
    buffer=c_void_p,
    datatype=c_char_p,
    count=c_size_t,
    peer=c_int,
    channels=c_uint8,
)
_V5_COLL = _struct(
    sequence=c_uint64, function=c_char_p, send=c_void_p, receive=c_void_p, count=c_size_t, root=c_int,
    datatype=c_char_p, channels=c_uint8, warps=c_uint8, algorithm=c_char_p, protocol=c_char_p, group=c_void_p,
)  # fmt: skip
_V5_P2P = _struct(
    function=c_char_p, buffer=c_void_p, datatype=c_char_p, count=c_size_t, peer=c_int, channels=c_uint8,
    group=c_void_p,
)  # fmt: skip
_GROUP_API = _struct(is_captured=c_bool, depth=c_int)
_COLL_API = _struct(
    function=c_char_p,
    count=c_size_t,
    datatype=c_char_p,
    root=c_int,
    stream=c_void_p,
    is_captured=c_bool,
)
_P2P_API = _struct(
    function=c_char_p, count=c_size_t, datatype=c_char_p, stream=c_void_p, is_captured=c_bool
)
_KERNEL = _struct(stream=c_void_p)
_V5 = {"group_api": _GROUP_API, "coll_api": _COLL_API, "p2p_api": _P2P_API, "kernel": _KERNEL,
       "coll": _V5_COLL, "p2p": _V5_P2P}  # fmt: skip
EVENTS = {
    1: _event(c_uint8, coll=_V1_COLL, p2p=_V1_P2P),
    2: _event(c_uint8, coll=_V2_COLL, p2p=_V2_P2P),
    3: _event(c_uint8, coll=_V3_COLL, p2p=_V2_P2P),
    4: _event(c_uint8, coll=_V4_COLL, p2p=_V4_P2P),
    5: _event(c_uint64, **_V5),
    6: _event(c_uint64, **_V5),
}

_Start = CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), c_void_p)
_Stop = CFUNCTYPE(c_int, c_void_p)
_Record = CFUNCTYPE(c_int, c_void_p, c_int, c_void_p)
_INITS = {
    1: CFUNCTYPE(c_int, POINTER(c_void_p), POINTER(c_int)),
    4: CFUNCTYPE(c_int, POINTER(c_void_p), POINTER(c_int), c_char_p, c_uint64, c_int, c_int, c_int, c_void_p),
    5: CFUNCTYPE(c_int, POINTER(c_void_p), c_uint64, POINTER(c_int), c_char_p, c_int, c_int, c_int, c_void_p),
}  # fmt: skip
_INIT_OF = {1: 1, 2: 1, 3: 1, 4: 4, 5: 5, 6: 5}


def plugin_path() -> str | None:
    """Return the plugin that NCCL would load: the C library sees variables that Python does not."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = c_char_p
    path = getenv(b"NCCL_PROFILER_PLUGIN")
    return path.decode() if path else None


class Plugin:
    """The plugin, as NCCL with this newest ``version`` of the interface uses it."""

    def __init__(self, version: int = NEWEST) -> None:
        library = ctypes.CDLL(plugin_path())
        for number in range(version, 0, -1):
            fields = [("name", c_char_p), ("init", _INITS[_INIT_OF[number]]), ("start", _Start),
                      ("stop", _Stop), ("record", _Record), ("finalize", _Stop)]  # fmt: skip
            table = type("Profiler", (Structure,), {"_fields_": fields})
            try:
                self.table = table.in_dll(library, f"ncclProfiler_v{number}")
            except ValueError:
                continue
            self.version = number
            return
        raise RuntimeError("the library is no plugin")

    def start(
        self, context: Any, kind: int, parent: Any = None, rank: int = 0, **details: Any
    ) -> Any:
        """Start an event; return its handle."""
        event = EVENTS[self.version]()
        if kind in (GROUP, COLL, P2P) or self.version >= FIRST_WITH_CALLS:
            event.type, event.parent, event.rank = kind, parent, rank
            for name, value in details.items():
                member, _, item = name.partition("__")
                setattr(getattr(event, member), item, value)
            handle = c_void_p()
            assert self.table.start(context, byref(handle), byref(event)) == 0
            return handle.value
        return None

    def stop(self, handle: Any) -> None:
        if handle:
            assert self.table.stop(handle) == 0


@dataclass
class Operation:
    """A call of the program, in the terms of NCCL's functions."""

    function: str
    send: int
    receive: int
    count: int
    datatype: str
    root: int
    stream: Any
    handle: Any = None
    captured: bool = False


@dataclass
class Communicator:
    """One rank of a communicator. ``launch`` launches a kernel, and returns False if that fails."""

    plugin: Plugin
    launch: Callable[[Any], object]
    rank: int = 0
    ranks: int = 2
    hash: int = 77
    name: bytes = b""
    capturing: bool = False
    # How the buffers are reported: "direct" after the launch on its thread, "before" or "after" it on another
    # thread, or "never", as for symmetric kernels.
    report: str = "direct"
    context: Any = field(default_factory=c_void_p)
    mask: c_int = field(default_factory=c_int)
    group: Any = None
    depth: int = 0
    queue: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        arguments: tuple[Any, ...] = (byref(self.context), byref(self.mask))
        details = (1, self.ranks, self.rank, None)
        if self.plugin.version >= FIRST_WITH_CALLS:
            arguments = (byref(self.context), self.hash, byref(self.mask), self.name, *details)
        elif self.plugin.version >= FIRST_WITH_RANKS:
            arguments = (*arguments, self.name, self.hash, *details)
        assert self.plugin.table.init(*arguments) == 0

    def destroy(self) -> None:
        assert self.plugin.table.finalize(self.context) == 0

    def __enter__(self) -> Communicator:
        self.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            self._end_group()

    def all_reduce(
        self, send: int, receive: int, count: int, stream: Any, datatype: str = "ncclFloat32"
    ) -> None:
        self._call(Operation("AllReduce", send, receive, count, datatype, 0, stream))

    def all_gather(
        self, send: int, receive: int, count: int, stream: Any, datatype: str = "ncclFloat32"
    ) -> None:
        self._call(Operation("AllGather", send, receive, count, datatype, 0, stream))

    def reduce_scatter(self, send: int, receive: int, count: int, stream: Any) -> None:
        self._call(Operation("ReduceScatter", send, receive, count, "ncclFloat32", 0, stream))

    def broadcast(self, send: int, receive: int, count: int, root: int, stream: Any) -> None:
        self._call(Operation("Broadcast", send, receive, count, "ncclFloat32", root, stream))

    def send(self, buffer: int, count: int, peer: int, stream: Any) -> None:
        self._call(Operation("Send", buffer, 0, count, "ncclFloat32", peer, stream))

    def recv(self, buffer: int, count: int, peer: int, stream: Any) -> None:
        self._call(Operation("Recv", 0, buffer, count, "ncclFloat32", peer, stream))

    def _call(self, operation: Operation) -> None:
        with self:
            plugin, captured = self.plugin, self.capturing
            if not self.group:
                self.group = plugin.start(
                    self.context,
                    GROUP_API,
                    group_api__is_captured=captured,
                    group_api__depth=self.depth,
                )
            prefix, kind = ("p2p_api", P2P_API) if _is_p2p(operation) else ("coll_api", COLL_API)
            details = {"function": operation.function.encode(), "count": operation.count,
                       "datatype": operation.datatype.encode(), "stream": operation.stream,
                       "is_captured": captured}  # fmt: skip
            if kind == COLL_API:
                details["root"] = operation.root
            named = {f"{prefix}__{name}": value for name, value in details.items()}
            operation.handle = plugin.start(self.context, kind, self.group, **named)
            operation.captured = captured
            self.queue.append(operation)
            plugin.stop(operation.handle)

    def _end_group(self) -> None:
        """Launch one kernel for all operations of the group, and report their buffers."""
        operations, self.queue = self.queue, []
        has_failed = False
        if self.report == "before":
            self._on_thread(operations)
        if self.report == "never":  # symmetric kernels make no event
            self.launch(operations[0].stream)
        else:
            launched = self.plugin.start(
                self.context, KERNEL_LAUNCH, self.group, kernel__stream=operations[0].stream
            )
            has_failed = self.launch(operations[0].stream) is False
            self.plugin.stop(launched)
        if has_failed:
            pass  # NCCL then returns an error
        elif self.report == "direct":
            self.report_buffers(operations)
        elif self.report == "after":
            self._on_thread(operations)
        self.plugin.stop(self.group)
        self.group = None

    def _on_thread(self, operations: Sequence[Operation]) -> None:
        thread = threading.Thread(target=self.report_buffers, args=(operations,))
        thread.start()
        thread.join()

    def report_buffers(self, operations: Sequence[Operation]) -> None:
        """Make the events of one plan: a group around its operations."""
        group = self.plugin.start(self.context, GROUP)
        handles = [self._report(operation, group) for operation in operations]
        for handle in handles:
            self.plugin.stop(handle)
        self.plugin.stop(group)

    def _report(self, operation: Operation, group: Any) -> Any:
        version, count, datatype = self.plugin.version, operation.count, operation.datatype
        if operation.function in ("AllGather", "Broadcast"):  # reported in bytes
            count, datatype = count * SIZES[DATATYPES.index(datatype)], "ncclInt8"
        is_p2p = _is_p2p(operation)
        details: dict[str, Any] = {"count": count, "function": operation.function.encode(),
                                   "datatype": datatype.encode()}  # fmt: skip
        if version == 1:
            details |= {"function": FUNCTIONS_OF_VERSION_1[operation.function],
                        "datatype": DATATYPES.index(datatype)}  # fmt: skip
        if is_p2p:
            details |= {"buffer": operation.send or operation.receive, "peer": operation.root}
        else:
            details |= {"send": operation.send, "receive": operation.receive, "root": operation.root,
                        "sequence": 5}  # fmt: skip
        if version < FIRST_WITH_RANKS:
            details["hash"] = self.hash
        if version >= FIRST_WITH_CALLS:
            details["group"] = group
        parent = operation.handle if version >= FIRST_WITH_CALLS else group
        prefix, kind = ("p2p", P2P) if is_p2p else ("coll", COLL)
        named = {f"{prefix}__{name}": value for name, value in details.items()}
        return self.plugin.start(self.context, kind, parent, self.rank, **named)


def _is_p2p(operation: Operation) -> bool:
    return operation.function in ("Send", "Recv")
