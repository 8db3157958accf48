"""The collectives of NCCL in a trace: the bytes that they access, and the order of ranks in one process.

Source of the rules: NCCL User Guide, "Collective Communication Functions".
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from cudakit.sanitize.graphs import GraphTracker
from cudakit.sanitize.ordering import EXACT, READ, WRITE, Call, Release, Stream, StreamOrder
from cudakit.sanitize.races import CollectiveOperation, Coverage
from cudakit.sanitize.records import access_record
from cudakit.sanitize.templates import CheckedShadow
from cudakit.trace.kinds import ELEMENT_BYTES, CollectiveFunction, EventKind, NcclDatatype
from cudakit.trace.trace_file import ADDRESS_END


class Membership(NamedTuple):
    """The membership of the process in a communicator."""

    rank: int = -1  # rank of the process; -1 if unknown
    rank_count: int = 0  # number of ranks; 0 if unknown
    communicator_hash: int = 0  # hash of the communicator, the same on all ranks; 0 if unknown


class AccessedRange(NamedTuple):
    """Bytes from ``lo`` up to ``hi`` that a collective reads or writes, or both."""

    lo: int
    hi: int
    mode: int  # READ, WRITE or both


class Buffers(NamedTuple):
    """The buffers of a collective, as one rank passes them."""

    send_address: int  # address of the send buffer; 0 if there is none
    receive_address: int  # address of the receive buffer; 0 if there is none
    size_bytes: int  # size in bytes of one rank's part of the data
    membership: Membership
    root: int = 0  # root rank; for a send or receive, the other rank

    def accessed_ranges(self, function: CollectiveFunction) -> Iterator[AccessedRange]:
        """Yield the bytes that the rank accesses. Bytes that the rank only sends are only read."""
        rank, rank_count, _ = self.membership
        send, receive, size = self.send_address, self.receive_address, self.size_bytes
        sent = AccessedRange(send, send + size, READ)
        received = AccessedRange(receive, receive + size, WRITE)
        is_in_place, is_root = send == receive, rank == self.root
        match function:
            case CollectiveFunction.REDUCE if not is_root:
                yield sent
            case CollectiveFunction.ALL_REDUCE | CollectiveFunction.REDUCE:
                if is_in_place:
                    yield sent._replace(mode=READ | WRITE)
                else:
                    yield from (sent, received)
            case CollectiveFunction.BROADCAST:
                if is_root:
                    yield sent
                if not (is_root and is_in_place):
                    yield received
            case CollectiveFunction.ALL_GATHER:
                yield sent
                receive_end = receive + size * rank_count
                if send == receive + size * rank:
                    yield AccessedRange(receive, send, WRITE)
                    yield AccessedRange(sent.hi, receive_end, WRITE)
                else:
                    yield AccessedRange(receive, receive_end, WRITE)
            case CollectiveFunction.REDUCE_SCATTER:
                send_end = send + size * rank_count
                if receive == send + size * rank:
                    yield AccessedRange(send, receive, READ)
                    yield received._replace(mode=READ | WRITE)
                    yield AccessedRange(received.hi, send_end, READ)
                else:
                    yield AccessedRange(send, send_end, READ)
                    yield received
            case CollectiveFunction.SEND:
                yield sent
            case CollectiveFunction.RECEIVE:
                yield received


# --- Order the work of several ranks in one process, which wait for each other in collectives ------


class CollectiveStart(NamedTuple):
    """The start of a collective on one rank, which earlier work of the stream precedes."""

    stream: Stream
    release: Release  # release of the earlier work of the stream
    membership: Membership


# Collectives that end on a rank only after they have started on all ranks.
_FUNCTIONS_OF_ALL_RANKS: Final = (
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
        # The ranks in this process, by communicator hash.
        self._ranks: defaultdict[int, set[int]] = defaultdict(set)
        # The starts of a group's collectives, by communicator hash, number of the group and function.
        self._starts: dict[tuple[int, int, CollectiveFunction], list[CollectiveStart]] = {}
        # Sends and receives whose counterpart has not started yet, by communicator hash, sender, receiver,
        # and whether they are sends.
        self._transfers: defaultdict[tuple[int, int, int, bool], deque[CollectiveStart]] = (
            defaultdict(deque)
        )

    def add_membership(self, membership: Membership) -> None:
        """Add a rank of this process."""
        if membership.communicator_hash and membership.rank >= 0:
            self._ranks[membership.communicator_hash].add(membership.rank)

    def has_peers(self, membership: Membership) -> bool:
        """Return whether other ranks of the communicator are in this process."""
        return len(self._ranks[membership.communicator_hash]) > 1

    def order_collective(
        self, start: CollectiveStart, function: CollectiveFunction, root: int, group: int
    ) -> None:
        """Order later work of a rank after the collective's start on its peers, and vice versa.

        ``root`` is the root rank, or the other rank of a send or receive.
        """
        if function in (CollectiveFunction.SEND, CollectiveFunction.RECEIVE):
            self._order_transfer(start, root, is_send=function is CollectiveFunction.SEND)
            return
        group_key = start.membership.communicator_hash, group, function
        group_starts = self._starts.setdefault(group_key, [])
        for peer in group_starts:
            if _receives_data(function, peer.membership.rank, start.membership.rank, root):
                peer.stream.acquire(start.release, None)
            if _receives_data(function, start.membership.rank, peer.membership.rank, root):
                start.stream.acquire(peer.release, None)
        group_starts.append(start)
        if len(self._starts) > _MAX_WAITING_GROUPS:
            del self._starts[next(iter(self._starts))]

    def _order_transfer(self, start: CollectiveStart, other_rank: int, *, is_send: bool) -> None:
        """Order later work of the receiver after the start of the send, when both ranks have called NCCL."""
        communicator_hash, rank = start.membership.communicator_hash, start.membership.rank
        sender, receiver = (rank, other_rank) if is_send else (other_rank, rank)
        if not {sender, receiver} <= self._ranks[communicator_hash]:
            return
        counterparts = self._transfers[communicator_hash, sender, receiver, not is_send]
        if not counterparts:
            self._transfers[communicator_hash, sender, receiver, is_send].append(start)
            return
        counterpart = counterparts.popleft()
        send, receive = (start, counterpart) if is_send else (counterpart, start)
        receive.stream.acquire(send.release, None)


def _receives_data(
    function: CollectiveFunction, rank: int, source_rank: int, root_rank: int
) -> bool:
    """Return whether a collective on a rank cannot end before it has data from ``source_rank``."""
    if function in _FUNCTIONS_OF_ALL_RANKS:
        return True
    return (
        source_rank == root_rank if function is CollectiveFunction.BROADCAST else rank == root_rank
    )


PEER_KERNELS: Final = (
    "conflict of XLA's collective kernels on two devices, which wait for each other"
)

# Kernels that XLA compiles from collectives wait for their peers by flags in memory, which are not recorded.
# XLA names a kernel after its first operation: an all-reduce of JAX on two H200s was all_reduce_1_fusion_1.
_XLA_COLLECTIVE: Final = re.compile(
    r"(?:all_reduce|all_gather|reduce_scatter|all_to_all|ragged_all_to_all|collective_permute)\w*$"
)


def are_peer_kernels(first_call: Call, second_call: Call, strings: Sequence[str]) -> bool:
    """Return whether two calls launched the same collective kernel of XLA on two devices."""
    return (
        first_call.kind == second_call.kind == EventKind.LAUNCH
        and first_call.device != second_call.device
        and first_call.name == second_call.name
        and bool(_XLA_COLLECTIVE.match(strings[first_call.name]))
    )


# --- the collectives of a trace: each one is an operation of its stream, or of a graph node ---

UNKNOWN_RANKS: Final = "collective of a communicator with an unknown number of ranks"
UNKNOWN_FUNCTION: Final = "collective of an unknown function"

# The functions whose accesses depend on the rank or on the number of ranks.
_FUNCTIONS_NEEDING_RANK_COUNT: Final = (
    CollectiveFunction.ALL_GATHER,
    CollectiveFunction.REDUCE_SCATTER,
)
_FUNCTIONS_NEEDING_RANK: Final = (
    *_FUNCTIONS_NEEDING_RANK_COUNT,
    CollectiveFunction.BROADCAST,
    CollectiveFunction.REDUCE,
)


class CollectiveTracker:
    """Handles the communicators and collectives of a trace."""

    def __init__(
        self,
        stream_order: StreamOrder,
        shadow: CheckedShadow,
        graphs: GraphTracker,
        coverage: Coverage,
        gap_counts: Counter[str],
    ) -> None:
        self._stream_order = stream_order
        self._shadow = shadow
        self._graphs = graphs
        self._coverage = coverage
        self._gap_counts = gap_counts
        self._memberships: dict[int, Membership] = {}  # memberships by communicator number
        self._peers = PeerOrder()

    def add_communicator(
        self, _: Call, communicator_number: int, rank: int, rank_count: int, communicator_hash: int
    ) -> None:
        self._memberships[communicator_number] = Membership(rank, rank_count, communicator_hash)
        self._peers.add_membership(self._memberships[communicator_number])

    def add_collective(
        self,
        call: Call,
        send_address: int,
        receive_address: int,
        element_count: int,
        communicator_number: int,
        root: int,
        graph: int,
        node: int,
        function_number: int,
        datatype: int,
        group: int,
    ) -> None:
        """Add a collective to its stream, or to a node of a graph, which repeats it in each launch."""
        function = CollectiveFunction(function_number)
        membership = self._memberships.get(communicator_number, Membership())
        call.collective = CollectiveOperation(
            function, membership.rank, membership.rank_count, root
        )
        self._coverage.collectives += 1
        has_unknown_accesses = (function in _FUNCTIONS_NEEDING_RANK and membership.rank < 0) or (
            function in _FUNCTIONS_NEEDING_RANK_COUNT and not membership.rank_count
        )
        if has_unknown_accesses or not function:
            self._gap_counts[UNKNOWN_RANKS if function else UNKNOWN_FUNCTION] += 1
            return
        size_bytes = element_count * ELEMENT_BYTES[NcclDatatype(datatype)]
        buffers = Buffers(send_address, receive_address, size_bytes, membership, root)
        access_records = b"".join(
            access_record(lo, hi, mode, EXACT, node)
            for lo, hi, mode in buffers.accessed_ranges(function)
            if lo < hi <= ADDRESS_END
        )
        if graph:
            self._graphs.add_collective(replace(call, graph=graph, node=node), access_records)
        elif stream := self._stream_order.enqueue(call):
            has_peers = self._peers.has_peers(membership)
            start = CollectiveStart(stream, stream.release(), membership) if has_peers else None
            self._stream_order.enqueue(call)
            self._shadow.add_all(memoryview(access_records), call, stream)
            if start:
                self._peers.order_collective(start, function, root, group)
