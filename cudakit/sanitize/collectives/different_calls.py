"""Find the collectives that ranks call differently in the traces of all ranks, and describe them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from cudakit.sanitize.collectives.buffers import Membership
from cudakit.sanitize.collectives.call_comparison import (
    CommunicatorCalls,
    RankCall,
    TraceId,
)
from cudakit.sanitize.names import function_name
from cudakit.sanitize.result import CollectiveCall, DifferenceKind, DifferentCalls
from cudakit.stacks import Stack, call_site_index
from cudakit.trace.kinds import CollectiveFunction, EventKind, NcclDatatype
from cudakit.trace.layout import Records, view
from cudakit.trace.spool import Batch

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
        if EventKind.COMMUNICATOR in records:
            self._add_memberships(trace_id, records[EventKind.COMMUNICATOR])
        if EventKind.COLLECTIVE in records:
            self._stacks[trace_id] = batch.stacks
            self._add_calls(trace_id, records[EventKind.COLLECTIVE])
        if EventKind.GAP in records:
            reasons = (batch.strings[index] for index in records[EventKind.GAP]["reason"].tolist())
            if any(reason.startswith(_UNKNOWN_BUFFERS) for reason in reasons):
                self._stop_transfers()

    def finish(self) -> None:
        """Compare the last calls of all ranks, which have ended."""
        for communicator in self._communicators.values():
            communicator.finish()

    def differences(self) -> Iterator[DifferentCalls]:
        """Yield the first difference of each communicator."""
        for communicator_hash, communicator in self._communicators.items():
            if call_pair := communicator.difference:
                first_call, second_call = (
                    self._describe(call_pair.first_call),
                    self._describe(call_pair.second_call),
                )
                yield DifferentCalls(
                    kind=call_pair.kind,
                    sentence=_difference_sentence(call_pair.kind, first_call, second_call),
                    communicator=communicator_hash,
                    first=first_call,
                    second=second_call,
                    hint=_FIX_HINTS[call_pair.kind],
                )

    def rank_by_process(self) -> dict[int, int]:
        """Return the rank of each process that has exactly one rank in its largest communicator."""
        memberships: dict[int, list[Membership]] = {}
        for ((process, _), _), membership in self._memberships.items():
            memberships.setdefault(process, []).append(membership)
        rank_by_process: dict[int, int] = {}
        for process, process_memberships in memberships.items():
            largest_rank_count = max(membership.rank_count for membership in process_memberships)
            ranks = {
                membership.rank
                for membership in process_memberships
                if membership.rank_count == largest_rank_count
            }
            if len(ranks) == 1 and (rank := ranks.pop()) >= 0:
                rank_by_process[process] = rank
        return rank_by_process

    def _add_memberships(self, trace_id: TraceId, records: Records) -> None:
        field_names = ("communicator", "rank", "rank_count", "hash")
        for communicator_number, *fields in zip(
            *(records[name].tolist() for name in field_names), strict=True
        ):
            self._memberships[trace_id, communicator_number] = Membership(*fields)

    def _add_calls(self, trace_id: TraceId, records: Records) -> None:
        field_names = (
            "communicator",
            "graph",
            "group",
            "function",
            "element_count",
            "datatype",
            "root",
        )
        columns = (records[name].tolist() for name in (*field_names, "site"))
        for communicator_number, graph, group, function, element_count, datatype, root, site in zip(
            *columns, strict=True
        ):
            membership = self._memberships.get((trace_id, communicator_number), Membership())
            if membership.rank < 0 or not membership.communicator_hash:
                continue
            communicator = self._communicator(membership)
            if graph:
                communicator.stop()
            else:
                communicator.add(
                    RankCall(
                        rank=membership.rank,
                        group_number=group,
                        function=CollectiveFunction(function),
                        element_count=element_count,
                        datatype=NcclDatatype(datatype),
                        root=root,
                        trace=trace_id,
                        site=site,
                    )
                )

    def _communicator(self, membership: Membership) -> CommunicatorCalls:
        if membership.communicator_hash not in self._communicators:
            self._communicators[membership.communicator_hash] = CommunicatorCalls(
                membership.rank_count, compares_transfers=self._compares_transfers
            )
        return self._communicators[membership.communicator_hash]

    def _stop_transfers(self) -> None:
        self._compares_transfers = False
        for communicator in self._communicators.values():
            communicator.stop_transfers()

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
