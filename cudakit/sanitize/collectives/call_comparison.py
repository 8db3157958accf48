"""Compare the collectives that the ranks of a communicator call, which must be the same on all ranks.

NCCL waits forever, or returns wrong data, if ranks call different collectives of a communicator, or the same
collective with another number or type of elements, or another root (NCCL User
Guide, "Collective Operations"). The calls of a group are compared in any order, because NCCL may reorder
them. A communicator is no longer compared after a collective in a CUDA graph, because a
graph may run later than it was captured.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from cudakit.sanitize.result import DifferenceKind
from cudakit.trace.kinds import ELEMENT_BYTES, CollectiveFunction, NcclDatatype

_ROOTED_FUNCTIONS: Final = (CollectiveFunction.BROADCAST, CollectiveFunction.REDUCE)
_POINT_TO_POINT_FUNCTIONS: Final = (CollectiveFunction.SEND, CollectiveFunction.RECEIVE)

# PID of a process, and the number of the trace in the process.
TraceId: TypeAlias = tuple[int, int]


class RankCall(NamedTuple):
    """A call of a collective, send or receive by one rank."""

    rank: int
    group_number: int  # number of the group of calls, counted on each rank
    function: CollectiveFunction
    element_count: int
    datatype: NcclDatatype
    root: int  # root rank; for a send or receive, the other rank
    trace: TraceId
    site: int  # index of the call stack in the stack table of the trace

    @property
    def signature(self) -> tuple[int, ...]:
        """The properties that must be equal on all ranks."""
        root = self.root if self.function in _ROOTED_FUNCTIONS else 0
        return self.function, self.element_count, self.datatype, root

    @property
    def size_bytes(self) -> int:
        """The size of the elements."""
        return self.element_count * ELEMENT_BYTES[self.datatype]


class CallPair(NamedTuple):
    """Two calls that should be equal, or a send and its receive, and the property that differs."""

    kind: DifferenceKind
    first_call: RankCall
    second_call: RankCall


@dataclass(slots=True)
class _Reference:
    """The collectives of a group on the first rank that completed the group."""

    calls: Sequence[RankCall]
    rank_count: int = 1  # number of ranks that have completed the group


# Maximum number of groups, and of transfers of two ranks, that wait for the calls of other ranks.
_MAX_WAITING_GROUPS: Final = 1 << 14


class CommunicatorCalls:
    """Compares the calls of the ranks of one communicator, up to the first difference."""

    def __init__(self, rank_count: int, *, compares_transfers: bool = True) -> None:
        self.difference: CallPair | None = None
        self._rank_count = rank_count  # number of ranks, also on other hosts; 0 if unknown
        self._is_stopped = False
        self._compares_transfers = compares_transfers
        # By rank: the calls of its last group, to which further calls may be added.
        self._open_groups: dict[int, list[RankCall]] = {}
        # The calls with which the calls of other ranks are compared, by number of the group.
        self._references: dict[int, _Reference] = {}
        # Sends and receives whose counterpart was not read yet, by sender, receiver and function.
        self._transfers: defaultdict[tuple[int, int, CollectiveFunction], deque[RankCall]] = (
            defaultdict(deque)
        )

    def add(self, call: RankCall) -> None:
        """Compare a call with the calls of other ranks."""
        if self._is_stopped:
            return
        if call.function in _POINT_TO_POINT_FUNCTIONS:
            self._match_transfer(call)
            return
        open_group = self._open_groups.setdefault(call.rank, [])
        if open_group and call.group_number < open_group[-1].group_number:
            self.stop()  # the calls are not in order, so that no group is complete
            return
        if open_group and call.group_number > open_group[-1].group_number:
            self._compare_group(open_group)
            self._open_groups[call.rank] = open_group = []
        open_group.append(call)

    def finish(self) -> None:
        """Compare the last group of each rank, which is incomplete if the process of the rank has died."""
        for calls in self._open_groups.values():
            reference = self._references.get(calls[0].group_number)
            if not self._is_stopped and (reference is None or len(reference.calls) == len(calls)):
                self._compare_group(calls)
        self.stop()

    def stop(self) -> None:
        """Compare no further calls: after a difference, the later calls of the ranks differ as well."""
        self._is_stopped = True
        self._open_groups = {}
        self._references = {}
        self._transfers.clear()

    def stop_transfers(self) -> None:
        """Compare no further sends and receives, because some of them were not recorded."""
        self._compares_transfers = False

    def _compare_group(self, calls: Sequence[RankCall]) -> None:
        group_number = calls[0].group_number
        reference = self._references.get(group_number)
        if reference is None:
            self._references[group_number] = _Reference(calls)
            if len(self._references) > _MAX_WAITING_GROUPS:
                del self._references[next(iter(self._references))]
            return
        if call_pair := _different_calls(reference.calls, calls):
            self.difference = call_pair
            self.stop()
            return
        reference.rank_count += 1
        if reference.rank_count == self._rank_count:
            del self._references[group_number]

    def _match_transfer(self, call: RankCall) -> None:
        """Compare a send with the receive of the other rank, in the order of both ranks' calls."""
        if not self._compares_transfers:
            return
        is_send = call.function is CollectiveFunction.SEND
        sending_rank, receiving_rank = (call.rank, call.root) if is_send else (call.root, call.rank)
        counterpart_function = CollectiveFunction.RECEIVE if is_send else CollectiveFunction.SEND
        counterparts = self._transfers[sending_rank, receiving_rank, counterpart_function]
        if not counterparts:
            waiting_calls = self._transfers[sending_rank, receiving_rank, call.function]
            waiting_calls.append(call)
            if len(waiting_calls) > _MAX_WAITING_GROUPS:
                self.stop_transfers()
            return
        counterpart = counterparts.popleft()
        if counterpart.size_bytes != call.size_bytes:
            send_call, receive_call = (call, counterpart) if is_send else (counterpart, call)
            self.difference = CallPair(DifferenceKind.TRANSFER, send_call, receive_call)
            self.stop()


def _different_calls(
    reference_calls: Sequence[RankCall], calls: Sequence[RankCall]
) -> CallPair | None:
    """Return the first difference between the collectives of a group on two ranks, the lower rank first."""
    reference_signatures = Counter(call.signature for call in reference_calls)
    signatures = Counter(call.signature for call in calls)
    if signatures == reference_signatures:
        return None
    missing_signatures, extra_signatures = (
        reference_signatures - signatures,
        signatures - reference_signatures,
    )
    first_call = next(
        (call for call in reference_calls if call.signature in missing_signatures),
        reference_calls[0],
    )
    second_call = next((call for call in calls if call.signature in extra_signatures), calls[0])
    if first_call.rank > second_call.rank:
        first_call, second_call = second_call, first_call
    return CallPair(_difference_kind(first_call, second_call), first_call, second_call)


def _difference_kind(first_call: RankCall, second_call: RankCall) -> DifferenceKind:
    """Return the most important property in which two calls differ."""
    if first_call.function is not second_call.function:
        return DifferenceKind.FUNCTION
    if first_call.datatype is not second_call.datatype:
        return DifferenceKind.DATATYPE
    if first_call.element_count != second_call.element_count:
        return DifferenceKind.COUNT
    return DifferenceKind.ROOT if first_call.root != second_call.root else DifferenceKind.FUNCTION
