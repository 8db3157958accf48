"""Collectives of NCCL: the bytes that they access, and the operations that they are in the engine.

Sources of the rules: NCCL User Guide, "Collective Communication Functions", and NCCL's profiler plugin
interface, which reports an all-gather and a broadcast in bytes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from cudakit.core.sanitize.clocks import EXACT, READ, WRITE, Call, Release
from cudakit.core.sanitize.graphs import GraphTracker
from cudakit.core.sanitize.ordering import Stream, StreamOrder
from cudakit.core.sanitize.races import CollectiveOperation, Coverage
from cudakit.core.sanitize.record_batch import access_record
from cudakit.core.sanitize.shadow_memory import Shadow
from cudakit.trace.kinds import CollectiveFunction, EventKind, NcclDatatype
from cudakit.trace.layout import ADDRESS_END

# Bytes of one element. A type without a name in NCCL's events is ncclUint8.
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

UNKNOWN_RANKS: Final = "collective of a communicator with an unknown number of ranks"
UNKNOWN_FUNCTION: Final = "collective of an unknown function"


class Member(NamedTuple):
    """The membership of the process in a communicator."""

    rank: int = -1  # rank of the process; -1 if unknown
    rank_count: int = 0  # number of ranks; 0 if unknown
    hash: int = 0  # number that all ranks of the communicator share; 0 if unknown


class Range(NamedTuple):
    """Bytes from ``lo`` up to ``hi`` that a collective reads, writes or both."""

    lo: int
    hi: int
    mode: int


class Buffers(NamedTuple):
    """The buffers of a collective, as one rank passes them."""

    send: int  # address of the send buffer; 0 if there is none
    receive: int  # address of the receive buffer; 0 if there is none
    size_bytes: int  # size of one rank's part
    member: Member
    root: int = 0  # root rank; for a send or receive, the other rank

    def accessed_ranges(self, function: CollectiveFunction) -> Iterator[Range]:
        """Yield the bytes that the rank accesses. Bytes that it only contributes are not written."""
        return _RANGES[function](self)

    @property
    def is_root(self) -> bool:
        return self.member.rank == self.root

    @property
    def is_in_place(self) -> bool:
        """Whether the two buffers are the same."""
        return self.send == self.receive

    @property
    def all_bytes(self) -> int:
        """The size of the parts of all ranks."""
        return self.size_bytes * self.member.rank_count

    @property
    def part_offset(self) -> int:
        """The offset of this rank's part in the buffer with the parts of all ranks."""
        return self.size_bytes * self.member.rank

    def sent(self, mode: int = READ) -> Range:
        return Range(self.send, self.send + self.size_bytes, mode)

    def received(self) -> Range:
        return Range(self.receive, self.receive + self.size_bytes, WRITE)


def _all_reduce(buffers: Buffers) -> Iterator[Range]:
    if buffers.is_in_place:
        yield buffers.sent(READ | WRITE)
    else:
        yield buffers.sent()
        yield buffers.received()


def _all_gather(buffers: Buffers) -> Iterator[Range]:
    part, end = buffers.sent(), buffers.receive + buffers.all_bytes
    yield part
    if part.lo == buffers.receive + buffers.part_offset:
        yield Range(buffers.receive, part.lo, WRITE)
        yield Range(part.hi, end, WRITE)
    else:
        yield Range(buffers.receive, end, WRITE)


def _reduce_scatter(buffers: Buffers) -> Iterator[Range]:
    part, end = buffers.received(), buffers.send + buffers.all_bytes
    if part.lo == buffers.send + buffers.part_offset:
        yield Range(buffers.send, part.lo, READ)
        yield Range(part.lo, part.hi, READ | WRITE)
        yield Range(part.hi, end, READ)
    else:
        yield Range(buffers.send, end, READ)
        yield part


def _broadcast(buffers: Buffers) -> Iterator[Range]:
    if buffers.is_root:
        yield buffers.sent()
    if not (buffers.is_root and buffers.is_in_place):
        yield buffers.received()


def _reduce(buffers: Buffers) -> Iterator[Range]:
    if buffers.is_root:
        yield from _all_reduce(buffers)
    else:
        yield buffers.sent()


def _send(buffers: Buffers) -> Iterator[Range]:
    yield buffers.sent()


def _receive(buffers: Buffers) -> Iterator[Range]:
    yield buffers.received()


_RANGES: Final[Mapping[CollectiveFunction, Callable[[Buffers], Iterator[Range]]]] = {
    CollectiveFunction.ALL_REDUCE: _all_reduce,
    CollectiveFunction.ALL_GATHER: _all_gather,
    CollectiveFunction.REDUCE_SCATTER: _reduce_scatter,
    CollectiveFunction.BROADCAST: _broadcast,
    CollectiveFunction.REDUCE: _reduce,
    CollectiveFunction.SEND: _send,
    CollectiveFunction.RECEIVE: _receive,
}

# The functions whose accesses depend on the rank or on the number of ranks.
_NEED_RANK_COUNT: Final = (CollectiveFunction.ALL_GATHER, CollectiveFunction.REDUCE_SCATTER)
_NEED_RANK: Final = (*_NEED_RANK_COUNT, CollectiveFunction.BROADCAST, CollectiveFunction.REDUCE)


class Start(NamedTuple):
    """The start of a collective on one rank, which earlier work of the stream precedes."""

    stream: Stream
    release: Release  # release of the earlier work
    member: Member


# Functions that end on a rank after they have started on all ranks.
_WAITS_FOR_ALL: Final = (
    CollectiveFunction.ALL_REDUCE,
    CollectiveFunction.ALL_GATHER,
    CollectiveFunction.REDUCE_SCATTER,
)
_MAX_WAITING_GROUPS: Final = 1024


class PeerOrder:
    """Orders the streams of several ranks in one process by their collectives.

    A collective ends on a rank after it has started on the ranks whose data this rank receives. So later work
    on one device happens after work that precedes the collective on another device.
    """

    def __init__(self) -> None:
        self._ranks: defaultdict[int, set[int]] = defaultdict(set)  # ranks in this process, by hash
        # The starts of a group's collectives, by hash, number of the group and function.
        self._starts: dict[tuple[int, int, CollectiveFunction], list[Start]] = {}
        # Sends and receives that wait for their counterpart, by hash, sender and receiver.
        self._sends: defaultdict[tuple[int, int, int], deque[Start]] = defaultdict(deque)
        self._receives: defaultdict[tuple[int, int, int], deque[Start]] = defaultdict(deque)

    def add(self, member: Member) -> None:
        """Add a rank of this process."""
        if member.hash and member.rank >= 0:
            self._ranks[member.hash].add(member.rank)

    def has_peers(self, member: Member) -> bool:
        """Return whether other ranks of the communicator are in this process."""
        return len(self._ranks[member.hash]) > 1

    def order(self, start: Start, function: CollectiveFunction, root: int, group: int) -> None:
        """Order the later work of a rank after the starts of its peers, and the peers after its start.

        ``root`` is the root rank, or the other rank of a send or receive.
        """
        key, rank = start.member.hash, start.member.rank
        if function is CollectiveFunction.SEND:
            self._match((key, rank, root), start, self._sends, self._receives)
        elif function is CollectiveFunction.RECEIVE:
            self._match((key, root, rank), start, self._receives, self._sends)
        else:
            self._order_all(start, function, root, group)

    def _order_all(self, start: Start, function: CollectiveFunction, root: int, group: int) -> None:
        key = start.member.hash, group, function
        starts = self._starts.setdefault(key, [])
        for peer in starts:
            if _receives_data(function, peer.member.rank, start.member.rank, root):
                peer.stream.acquire(start.release, None)
            if _receives_data(function, start.member.rank, peer.member.rank, root):
                start.stream.acquire(peer.release, None)
        starts.append(start)
        if len(self._starts) > _MAX_WAITING_GROUPS:
            del self._starts[next(iter(self._starts))]

    def _match(
        self,
        pair: tuple[int, int, int],
        start: Start,
        own_side: defaultdict[tuple[int, int, int], deque[Start]],
        other_side: defaultdict[tuple[int, int, int], deque[Start]],
    ) -> None:
        """Order the receiver of a transfer after the start of the send, once both ranks have called."""
        if pair[1] not in self._ranks[pair[0]] or pair[2] not in self._ranks[pair[0]]:
            return
        if not other_side[pair]:
            own_side[pair].append(start)
            return
        counterpart = other_side[pair].popleft()
        send, receive = (start, counterpart) if own_side is self._sends else (counterpart, start)
        receive.stream.acquire(send.release, None)


def _receives_data(function: CollectiveFunction, rank: int, source: int, root: int) -> bool:
    """Return whether a rank receives data of another rank, without which it cannot end."""
    if function in _WAITS_FOR_ALL:
        return True
    return source == root if function is CollectiveFunction.BROADCAST else rank == root


PEER_KERNELS: Final = (
    "accesses of XLA's collective kernels to another device, which wait for each other"
)

# Kernels that XLA compiles from collectives wait for their peers by flags in memory, which are not recorded.
# XLA names a kernel after its first operation: an all-reduce of JAX on two H200s was all_reduce_1_fusion_1.
_XLA_COLLECTIVE: Final = re.compile(
    r"(?:all_reduce|all_gather|reduce_scatter|all_to_all|ragged_all_to_all|collective_permute)\w*$"
)


def are_peer_kernels(first: Call, second: Call, strings: Sequence[str]) -> bool:
    """Return whether two calls launched the same collective kernel of XLA on two devices."""
    return (
        first.kind == second.kind == EventKind.LAUNCH
        and first.device != second.device
        and first.name == second.name
        and bool(_XLA_COLLECTIVE.match(strings[first.name]))
    )


class CollectiveTracker:
    """Handles communicators and collectives."""

    def __init__(
        self,
        stream_order: StreamOrder,
        shadow: Shadow,
        graphs: GraphTracker,
        coverage: Coverage,
        gaps: Counter[str],
    ) -> None:
        self._stream_order = stream_order
        self._shadow = shadow
        self._graphs = graphs
        self._coverage = coverage
        self._gaps = gaps
        self._members: dict[int, Member] = {}  # by number of the communicator
        self._peers = PeerOrder()

    def add_communicator(self, _: Call, number: int, rank: int, rank_count: int, key: int) -> None:
        self._members[number] = Member(rank, rank_count, key)
        self._peers.add(self._members[number])

    def add_collective(
        self,
        call: Call,
        send: int,
        receive: int,
        element_count: int,
        communicator: int,
        root: int,
        graph: int,
        node: int,
        function_number: int,
        datatype: int,
        group: int,
    ) -> None:
        """Add a collective to its stream, or to a node of a graph, which repeats it in each launch."""
        function = CollectiveFunction(function_number)
        member = self._members.get(communicator, Member())
        call.collective = CollectiveOperation(function, member.rank, member.rank_count, root)
        self._coverage.collectives += 1
        is_unknown = (function in _NEED_RANK and member.rank < 0) or (
            function in _NEED_RANK_COUNT and not member.rank_count
        )
        if is_unknown or not function:
            self._gaps[UNKNOWN_RANKS if function else UNKNOWN_FUNCTION] += 1
            return
        size_bytes = element_count * ELEMENT_BYTES[NcclDatatype(datatype)]
        buffers = Buffers(send, receive, size_bytes, member, root)
        rows = b"".join(
            access_record(lo, hi, mode, EXACT, node)
            for lo, hi, mode in buffers.accessed_ranges(function)
            if lo < hi <= ADDRESS_END
        )
        if graph:
            self._graphs.add_collective(replace(call, graph=graph, node=node), rows)
        elif stream := self._stream_order.enqueue(call):
            has_peers = self._peers.has_peers(member)
            start = Start(stream, stream.release(), member) if has_peers else None
            self._stream_order.enqueue(call)
            self._shadow.add_all(memoryview(rows), call, stream)
            if start:
                self._peers.order(start, function, root, group)
