"""Compare the collectives that the ranks of a communicator call, which must be the same on all ranks.

NCCL waits forever, or returns wrong data, if ranks call different collectives of a communicator, or the same
one with another number or type of elements, or another root (NCCL User Guide, "Collective Operations").
The calls of a group are compared in any order, because NCCL may reorder them. A communicator is no longer
compared after a collective in a CUDA graph, because a graph may run later than it was captured.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from cudakit.core.sanitize.collectives.buffers import ELEMENT_BYTES, Membership
from cudakit.core.sanitize.names import call_site_index, function_name
from cudakit.core.sanitize.result import CollectiveCall, DifferenceKind, DifferentCalls
from cudakit.document import Frame
from cudakit.trace.kinds import CollectiveFunction, EventKind, NcclDatatype
from cudakit.trace.layout import Records, view
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import Stack

_ROOTED: Final = (CollectiveFunction.BROADCAST, CollectiveFunction.REDUCE)
_TRANSFERS: Final = (CollectiveFunction.SEND, CollectiveFunction.RECEIVE)

# The process and the number of the trace in it.
_Trace: TypeAlias = tuple[int, int]


class _Call(NamedTuple):
    """A call of one rank, with its trace and the index of its call stack there."""

    function: CollectiveFunction
    element_count: int
    datatype: NcclDatatype
    root: int
    trace: _Trace
    site: int

    @property
    def signature(self) -> tuple[int, ...]:
        """The properties that must be equal on all ranks."""
        root = self.root if self.function in _ROOTED else 0
        return self.function, self.element_count, self.datatype, root

    @property
    def size_bytes(self) -> int:
        return self.element_count * ELEMENT_BYTES[self.datatype]


@dataclass(slots=True)
class _Rank:
    """The calls of one rank that wait for the calls of the other ranks."""

    steps: dict[int, list[_Call]] = field(
        default_factory=dict
    )  # collectives by number of the group
    last_group: int = 0  # group of the last call; earlier groups are complete

    def complete_steps(self) -> set[int]:
        """Return the groups to which no further call can belong."""
        return {group for group in self.steps if group < self.last_group}


# For each pair of ranks, the sends and receives that wait for their counterpart.
_Transfers: TypeAlias = defaultdict[tuple[int, int, CollectiveFunction], deque[_Call]]


@dataclass(slots=True)
class _Communicator:
    """A communicator, with the ranks of this run."""

    ranks: defaultdict[int, _Rank] = field(default_factory=lambda: defaultdict(_Rank))
    transfers: _Transfers = field(default_factory=lambda: defaultdict(deque))
    is_compared: bool = True  # False after the first difference, and after a capture

    def stop(self) -> None:
        """Compare no further calls: after a difference, the order of the calls is undefined."""
        self.is_compared = False
        self.ranks.clear()
        self.transfers.clear()


class _Difference(NamedTuple):
    """Two calls of different ranks that must be the same, or a send and a receive of different size."""

    kind: DifferenceKind
    communicator: int  # hash of the communicator
    first_rank: int
    first: _Call
    second_rank: int
    second: _Call


# Maximum number of groups of a rank, and of transfers of two ranks, that wait for the other rank.
_MAX_WAITING: Final = 1 << 14


class CallComparison:
    """Compares the calls of all ranks whose traces are read."""

    def __init__(self) -> None:
        self._communicators: dict[int, _Communicator] = {}  # by hash
        # The membership of each trace in its communicators, by number of the communicator.
        self._memberships: dict[tuple[_Trace, int], Membership] = {}
        self._differences: list[_Difference] = []
        self._stacks: dict[_Trace, Sequence[Stack]] = {}

    def feed(self, batch: Batch) -> None:
        """Compare the calls of a batch with those of the other ranks."""
        trace = batch.process, batch.chain
        kinds = batch.records["kind"]
        if (kinds == EventKind.COMMUNICATOR).any():
            self._add_members(
                trace, view(batch.records[kinds == EventKind.COMMUNICATOR], EventKind.COMMUNICATOR)
            )
        if (kinds == EventKind.COLLECTIVE).any():
            self._stacks[trace] = batch.stacks
            self._add_calls(
                trace, view(batch.records[kinds == EventKind.COLLECTIVE], EventKind.COLLECTIVE)
            )
            for key, communicator in self._communicators.items():
                self._compare_steps(key, communicator)

    def finish(self) -> None:
        """Compare the last groups of all ranks, which have ended."""
        for key, communicator in self._communicators.items():
            self._compare_last_steps(key, communicator)

    def results(self) -> Iterator[DifferentCalls]:
        """Yield the differences that were found, each with both calls."""
        for difference in self._differences:
            first = self._described(difference.first_rank, difference.first)
            second = self._described(difference.second_rank, difference.second)
            yield DifferentCalls(
                kind=difference.kind,
                sentence=_sentence(difference.kind, first, second),
                communicator=difference.communicator,
                first=first,
                second=second,
                hint=_HINTS[difference.kind],
            )

    def ranks(self) -> dict[int, int]:
        """Return the rank of each process in its largest communicator, unless it has several ranks there."""
        ranks: dict[int, int] = {}
        for process in {process for (process, _), _ in self._memberships}:
            members = [
                membership
                for (trace, _), membership in self._memberships.items()
                if trace[0] == process
            ]
            largest = max(membership.rank_count for membership in members)
            in_largest = {
                membership.rank for membership in members if membership.rank_count == largest
            }
            if len(in_largest) == 1 and (rank := in_largest.pop()) >= 0:
                ranks[process] = rank
        return ranks

    def _add_members(self, trace: _Trace, records: Records) -> None:
        names = ("communicator", "rank", "rank_count", "hash")
        for number, *fields in zip(*(records[name].tolist() for name in names), strict=True):
            self._memberships[trace, number] = Membership(*fields)

    def _add_calls(self, trace: _Trace, records: Records) -> None:
        names = ("communicator", "group", "graph", *_CALL_FIELDS, "site")
        for number, group, graph, function, count, datatype, root, site in zip(
            *(records[name].tolist() for name in names), strict=True
        ):
            membership = self._memberships.get((trace, number), Membership())
            if membership.rank < 0 or not membership.hash:
                continue
            communicator = self._communicators.setdefault(membership.hash, _Communicator())
            if graph:
                communicator.stop()
            if communicator.is_compared:
                call = _Call(
                    CollectiveFunction(function), count, NcclDatatype(datatype), root, trace, site
                )
                self._add_call(membership, communicator, group, call)

    def _add_call(
        self, membership: Membership, communicator: _Communicator, group: int, call: _Call
    ) -> None:
        rank = communicator.ranks[membership.rank]
        rank.last_group = max(group, rank.last_group)
        if call.function in _TRANSFERS:
            self._match_transfer(membership, communicator, call)
        else:
            rank.steps.setdefault(group, []).append(call)
            if len(rank.steps) > _MAX_WAITING:
                del rank.steps[next(iter(rank.steps))]

    def _compare_steps(self, key: int, communicator: _Communicator) -> None:
        """Compare the groups that all ranks of this run have called completely, in order."""
        ranks = communicator.ranks
        if len(ranks) < 2 or not communicator.is_compared:
            return
        complete = set.intersection(*(rank.complete_steps() for rank in ranks.values()))
        for group in sorted(complete):
            steps = {rank: state.steps.pop(group) for rank, state in ranks.items()}
            if difference := _difference(key, steps):
                self._differences.append(difference)
                communicator.stop()
                return

    def _compare_last_steps(self, key: int, communicator: _Communicator) -> None:
        """Compare the groups that may be incomplete, because a rank has ended.

        Groups with different numbers of calls are not compared: the rank with fewer calls may have died.
        """
        groups = {group for rank in communicator.ranks.values() for group in rank.steps}
        for group in sorted(groups):
            steps = {
                rank: state.steps[group]
                for rank, state in communicator.ranks.items()
                if group in state.steps
            }
            if len({len(calls) for calls in steps.values()}) == 1 and (
                difference := _difference(key, steps)
            ):
                self._differences.append(difference)
                break
        communicator.stop()

    def _match_transfer(
        self, membership: Membership, communicator: _Communicator, call: _Call
    ) -> None:
        """Compare a send with the receive of the other rank, in the order of both ranks' calls."""
        is_send = call.function is CollectiveFunction.SEND
        pair = (membership.rank, call.root) if is_send else (call.root, membership.rank)
        counterpart_function = CollectiveFunction.RECEIVE if is_send else CollectiveFunction.SEND
        counterparts = communicator.transfers[*pair, counterpart_function]
        if not counterparts:
            waiting = communicator.transfers[*pair, call.function]
            waiting.append(call)
            if len(waiting) > _MAX_WAITING:
                communicator.stop()
            return
        counterpart = counterparts.popleft()
        if counterpart.size_bytes != call.size_bytes:
            send, receive = (call, counterpart) if is_send else (counterpart, call)
            self._differences.append(
                _Difference(
                    DifferenceKind.TRANSFER, membership.hash, pair[0], send, pair[1], receive
                )
            )
            communicator.stop()

    def _described(self, rank: int, call: _Call) -> CollectiveCall:
        stacks = self._stacks[call.trace]
        stack = stacks[call.site] if call.site < len(stacks) else ()
        frames = tuple(Frame(frame.function, frame.file, frame.line) for frame in stack)
        return CollectiveCall(
            rank=rank,
            process=call.trace[0],
            operation=function_name(call.function, call.root),
            element_count=call.element_count,
            datatype=call.datatype,
            root=call.root,
            stack=frames,
            site=call_site_index(frames),
        )


_CALL_FIELDS: Final = ("function", "element_count", "datatype", "root")


def _difference(key: int, steps: Mapping[int, Sequence[_Call]]) -> _Difference | None:
    """Return the first difference between the calls of a group by the first rank and by another one."""
    (first_rank, first_calls), *others = sorted(steps.items())
    expected = Counter(call.signature for call in first_calls)
    for rank, calls in others:
        signatures = Counter(call.signature for call in calls)
        if signatures == expected:
            continue
        missing, extra = expected - signatures, signatures - expected
        first = next((call for call in first_calls if call.signature in missing), first_calls[0])
        second = next((call for call in calls if call.signature in extra), calls[0])
        return _Difference(_kind(first, second), key, first_rank, first, rank, second)
    return None


def _kind(first: _Call, second: _Call) -> DifferenceKind:
    """Return the most important property in which two calls differ."""
    if first.function is not second.function:
        return DifferenceKind.FUNCTION
    if first.datatype is not second.datatype:
        return DifferenceKind.DATATYPE
    if first.element_count != second.element_count:
        return DifferenceKind.COUNT
    return DifferenceKind.ROOT if first.root != second.root else DifferenceKind.FUNCTION


_HINTS: Final = {
    DifferenceKind.FUNCTION: "call the same collectives in the same order on all ranks of the communicator",
    DifferenceKind.COUNT: "pass the same number of elements on all ranks",
    DifferenceKind.DATATYPE: "pass elements of the same type on all ranks",
    DifferenceKind.ROOT: "pass the same root on all ranks",
    DifferenceKind.TRANSFER: "receive as many bytes as the other rank sends",
}


def _sentence(kind: DifferenceKind, first: CollectiveCall, second: CollectiveCall) -> str:
    """Return both calls in one sentence."""
    if kind is DifferenceKind.TRANSFER:
        return (
            f"rank {first.rank} sends {_elements(first)} to rank {second.rank}, "
            f"which receives {_elements(second)}"
        )
    return f"rank {first.rank} calls {_call(kind, first)}, rank {second.rank} {_call(kind, second)}"


def _call(kind: DifferenceKind, call: CollectiveCall) -> str:
    if kind is DifferenceKind.FUNCTION:
        return f"{call.operation} of {_elements(call)}"
    detail = f"with root {call.root}" if kind is DifferenceKind.ROOT else f"of {_elements(call)}"
    return f"{call.operation} {detail}"


def _elements(call: CollectiveCall) -> str:
    plural = "" if call.element_count == 1 else "s"
    type_name = call.datatype.name.lower().replace("float8_e", "float8 e")
    return f"{call.element_count:,} {'byte' if call.datatype in _BYTES else type_name + ' element'}{plural}"


_BYTES: Final = (NcclDatatype.INT8, NcclDatatype.UINT8, NcclDatatype.UNKNOWN)
