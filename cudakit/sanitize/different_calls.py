"""Find the collectives that ranks call differently in the traces of all ranks, and describe them."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from cudakit.sanitize.collectives import Membership
from cudakit.sanitize.hints import function_name
from cudakit.sanitize.races import CollectiveCall, DifferenceKind, DifferentCalls
from cudakit.stacks import Stack, call_site_index
from cudakit.trace.kinds import ELEMENT_BYTES, CollectiveFunction, EventKind, NcclDatatype
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import Records, view

# Prefix of the reason in a GAP record if an operation of NCCL was not recorded; collectives.c of the recorder
# writes the same prefix.
_UNKNOWN_BUFFERS: Final = "collective whose buffers are unknown"


class RankComparison:
    """Compares the calls of all ranks whose traces are read, and stores the ranks of processes."""

    def __init__(self) -> None:
        self._communicators: dict[int, CommunicatorCalls] = {}  # calls by communicator hash
        # The membership of each trace in its communicators, by communicator number.
        self._memberships: dict[tuple[TraceId, int], Membership] = {}
        self._stacks: dict[TraceId, Sequence[Stack]] = {}
        self._compares_transfers = True

    def feed(self, batch: Batch) -> None:
        """Compare the calls of a batch with the calls of the other ranks."""
        trace_id = batch.process, batch.trace_number
        records = {
            kind: view(kind_records, kind)
            for kind in (EventKind.COMMUNICATOR, EventKind.COLLECTIVE, EventKind.GAP)
            if len(kind_records := batch.records[batch.records["kind"] == kind])
        }
        if (communicators := records.get(EventKind.COMMUNICATOR)) is not None:
            for number, *fields in _rows(
                communicators, "communicator", "rank", "rank_count", "hash"
            ):
                self._memberships[trace_id, number] = Membership(*fields)
        if EventKind.COLLECTIVE in records:
            self._stacks[trace_id] = batch.stacks
            self._add_calls(trace_id, records[EventKind.COLLECTIVE])
        if EventKind.GAP in records:
            reasons = (batch.strings[index] for index in records[EventKind.GAP]["reason"].tolist())
            if any(reason.startswith(_UNKNOWN_BUFFERS) for reason in reasons):
                self._compares_transfers = False
                for communicator in self._communicators.values():
                    communicator.compares_transfers = False

    def finish(self) -> None:
        """Compare the last calls of all ranks, which have ended."""
        for communicator in self._communicators.values():
            communicator.finish()

    def differences(self) -> Iterator[DifferentCalls]:
        """Yield the first difference of each communicator."""
        for communicator_hash, communicator in self._communicators.items():
            if communicator.difference:
                kind, *calls = communicator.difference
                first, second = map(self._describe, calls)
                sentence = _difference_sentence(kind, first, second)
                hint = _FIX_HINTS[kind]
                yield DifferentCalls(kind, sentence, communicator_hash, first, second, hint)

    def rank_by_process(self) -> dict[int, int]:
        """Return the rank of each process that has exactly one rank in its largest communicator."""
        memberships: defaultdict[int, list[Membership]] = defaultdict(list)
        for ((process, _), _), membership in self._memberships.items():
            memberships[process].append(membership)
        rank_by_process: dict[int, int] = {}
        for process, of_process in memberships.items():
            largest = max(membership.rank_count for membership in of_process)
            ranks = {
                membership.rank for membership in of_process if membership.rank_count == largest
            }
            if len(ranks) == 1 and (rank := ranks.pop()) >= 0:
                rank_by_process[process] = rank
        return rank_by_process

    def _add_calls(self, trace_id: TraceId, records: Records) -> None:
        for number, graph, group, function, element_count, datatype, root, site in _rows(
            records,
            *(
                "communicator",
                "graph",
                "group",
                "function",
                "element_count",
                "datatype",
                "root",
                "site",
            ),
        ):
            rank, rank_count, communicator_hash = self._memberships.get(
                (trace_id, number), Membership()
            )
            if rank < 0 or not communicator_hash:
                continue
            communicator = self._communicators.get(communicator_hash)
            if communicator is None:
                communicator = self._communicators[communicator_hash] = CommunicatorCalls(
                    rank_count, compares_transfers=self._compares_transfers
                )
            if graph:
                communicator.stop()
            else:
                communicator.add(
                    RankCall(
                        rank=rank,
                        group_number=group,
                        function=CollectiveFunction(function),
                        element_count=element_count,
                        datatype=NcclDatatype(datatype),
                        root=root,
                        trace=trace_id,
                        site=site,
                    )
                )

    def _describe(self, call: RankCall) -> CollectiveCall:
        stacks = self._stacks[call.trace]
        stack = stacks[call.site] if call.site < len(stacks) else ()
        return CollectiveCall(
            rank=call.rank,
            process=call.trace[0],
            operation=function_name(call.function, call.root),
            element_count=call.element_count,
            datatype=call.datatype,
            root=call.root,
            stack=stack,
            site=call_site_index(stack),
        )


def _rows(records: Records, *names: str) -> Iterator[tuple[int, ...]]:
    return zip(*(records[name].tolist() for name in names), strict=True)


_FIX_HINTS: Final = {
    DifferenceKind.FUNCTION: "call the same collectives in the same order on all ranks of the communicator",
    DifferenceKind.COUNT: "pass the same number of elements on all ranks",
    DifferenceKind.DATATYPE: "pass elements of the same type on all ranks",
    DifferenceKind.ROOT: "pass the same root on all ranks",
    DifferenceKind.TRANSFER: "receive as many bytes as the other rank sends",
}


def _difference_sentence(
    kind: DifferenceKind, first_call: CollectiveCall, second_call: CollectiveCall
) -> str:
    """Return a sentence that describes two calls and how they differ."""
    if kind is DifferenceKind.TRANSFER:
        return (
            f"rank {first_call.rank} sends {_element_count_text(first_call)} to rank {second_call.rank}, "
            f"which receives {_element_count_text(second_call)}"
        )
    call_details = [
        f"with root {call.root}"
        if kind is DifferenceKind.ROOT
        else f"of {_element_count_text(call)}"
        for call in (first_call, second_call)
    ]
    return (
        f"rank {first_call.rank} calls {first_call.operation} {call_details[0]}, "
        f"rank {second_call.rank} {second_call.operation} {call_details[1]}"
    )


# Types whose elements are bytes.
_BYTE_TYPES: Final = (NcclDatatype.INT8, NcclDatatype.UINT8, NcclDatatype.UNKNOWN)


def _element_count_text(call: CollectiveCall) -> str:
    """Return the number and type of the elements of a call: ``8 float32 elements``."""
    element_name = (
        "byte" if call.datatype in _BYTE_TYPES else f"{call.datatype.name.lower()} element"
    )
    return f"{call.element_count:,} {element_name}{'' if call.element_count == 1 else 's'}"


# --- the calls of one communicator, which must be the same on all ranks ---
#
# NCCL waits forever, or returns wrong data, if ranks call different collectives of a communicator, or the
# same collective with another number or type of elements, or another root (NCCL User Guide, "Collective
# Operations"). The calls of a group are compared in any order, because NCCL may reorder them. A communicator
# is no longer compared after a collective in a CUDA graph, because a graph may run later than its capture.

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
        self.compares_transfers = compares_transfers  # False if some of them were not recorded
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
        if not self.compares_transfers:
            return
        is_send = call.function is CollectiveFunction.SEND
        sending_rank, receiving_rank = (call.rank, call.root) if is_send else (call.root, call.rank)
        counterpart_function = CollectiveFunction.RECEIVE if is_send else CollectiveFunction.SEND
        counterparts = self._transfers[sending_rank, receiving_rank, counterpart_function]
        if not counterparts:
            waiting_calls = self._transfers[sending_rank, receiving_rank, call.function]
            waiting_calls.append(call)
            if len(waiting_calls) > _MAX_WAITING_GROUPS:
                self.compares_transfers = False
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
    missing, extra = reference_signatures - signatures, signatures - reference_signatures
    first = next(
        (call for call in reference_calls if call.signature in missing), reference_calls[0]
    )
    second = next((call for call in calls if call.signature in extra), calls[0])
    if first.rank > second.rank:
        first, second = second, first
    if first.function is not second.function:
        kind = DifferenceKind.FUNCTION
    elif first.datatype is not second.datatype:
        kind = DifferenceKind.DATATYPE
    elif first.element_count != second.element_count:
        kind = DifferenceKind.COUNT
    elif first.root != second.root:
        kind = DifferenceKind.ROOT
    else:
        kind = DifferenceKind.FUNCTION
    return CallPair(kind, first, second)
