"""Order the work of several ranks in one process, which wait for each other in collectives."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from cudakit.sanitize.clocks import Call, Release
from cudakit.sanitize.collectives.buffers import Membership
from cudakit.sanitize.ordering import Stream
from cudakit.trace.kinds import CollectiveFunction, EventKind


class CollectiveStart(NamedTuple):
    """The start of a collective on one rank, which earlier work of the stream precedes."""

    stream: Stream
    release: Release  # release of the earlier work of the stream
    membership: Membership


# The hash of a communicator, the sending rank and the receiving rank.
_Transfer: TypeAlias = tuple[int, int, int]
_WaitingTransfers: TypeAlias = defaultdict[_Transfer, deque[CollectiveStart]]

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
        # The starts of a group's collectives, by communicator hash, number of the group and
        # function.
        self._starts: dict[tuple[int, int, CollectiveFunction], list[CollectiveStart]] = {}
        # Sends and receives whose counterpart has not started yet, by communicator hash, sender and
        # receiver.
        self._sends: _WaitingTransfers = defaultdict(deque)
        self._receives: _WaitingTransfers = defaultdict(deque)

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
        communicator_hash, rank = start.membership.communicator_hash, start.membership.rank
        if function is CollectiveFunction.SEND:
            self._order_transfer(
                (communicator_hash, rank, root), start, self._sends, self._receives
            )
        elif function is CollectiveFunction.RECEIVE:
            self._order_transfer(
                (communicator_hash, root, rank), start, self._receives, self._sends
            )
        else:
            self._order_all_ranks(start, function, root, group)

    def _order_all_ranks(
        self, start: CollectiveStart, function: CollectiveFunction, root: int, group: int
    ) -> None:
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

    def _order_transfer(
        self,
        transfer: _Transfer,
        start: CollectiveStart,
        waiting_starts: _WaitingTransfers,
        waiting_counterparts: _WaitingTransfers,
    ) -> None:
        """Order later work of the receiver after the start of the send, when both ranks have called NCCL."""
        communicator_hash, sending_rank, receiving_rank = transfer
        if not {sending_rank, receiving_rank} <= self._ranks[communicator_hash]:
            return
        if not waiting_counterparts[transfer]:
            waiting_starts[transfer].append(start)
            return
        counterpart = waiting_counterparts[transfer].popleft()
        send_start, receive_start = (
            (start, counterpart) if waiting_starts is self._sends else (counterpart, start)
        )
        receive_start.stream.acquire(send_start.release, None)


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
