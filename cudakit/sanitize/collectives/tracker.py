"""Handle the collectives of NCCL in a trace: each one is an operation of its stream, or of a graph node."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

from cudakit.sanitize.clocks import EXACT, Call
from cudakit.sanitize.collectives.buffers import Buffers, Membership
from cudakit.sanitize.collectives.peers import CollectiveStart, PeerOrder
from cudakit.sanitize.graphs import GraphTracker
from cudakit.sanitize.ordering import StreamOrder
from cudakit.sanitize.races import CollectiveOperation, Coverage
from cudakit.sanitize.record_batch import access_record
from cudakit.sanitize.shadow_memory import Shadow
from cudakit.trace.kinds import ELEMENT_BYTES, CollectiveFunction, NcclDatatype
from cudakit.trace.layout import ADDRESS_END

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
        shadow: Shadow,
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
