"""Tests the comparison of the collectives that ranks call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cudakit.sanitize.different_calls import RankComparison
from cudakit.sanitize.races import DifferenceKind, DifferentCalls
from cudakit.stacks import Frame
from cudakit.trace.events import Collective, Communicator, Event, Gap
from cudakit.trace.kinds import CollectiveFunction, NcclDatatype
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import pack

ALL_REDUCE, ALL_GATHER = CollectiveFunction.ALL_REDUCE, CollectiveFunction.ALL_GATHER
BROADCAST = CollectiveFunction.BROADCAST
SEND, RECEIVE = CollectiveFunction.SEND, CollectiveFunction.RECEIVE


def collective(
    function: CollectiveFunction = ALL_REDUCE,
    count: int = 8,
    *,
    datatype: NcclDatatype = NcclDatatype.FLOAT32,
    root: int = 0,
    graph: int = 0,
) -> Collective:
    return Collective(
        1, 0x1000, 0x2000, count, 1, root=root, graph=graph, function=function, datatype=datatype
    )


def call_batch(
    rank: int, *groups: Collective | Sequence[Collective], key: int = 77, rank_count: int = 2
) -> Batch:
    """Return the trace of one rank; each argument is one group of calls. Its calls are in line 10 × rank."""
    events = [Event(Communicator(key, 1, rank=rank, rank_count=rank_count))]
    for number, calls in enumerate(groups, 1):
        events += [
            Event(replace(call, group=number), site=1)
            for call in ([calls] if isinstance(calls, Collective) else calls)
        ]
    stacks = [(), (Frame("main", "train.py", 10 * rank),)]
    return Batch(1000 + rank, pack(events, lambda _: 0), [""], stacks)


def differences(*batches: Batch) -> list[DifferentCalls]:
    comparison = RankComparison()
    for batch in batches:
        comparison.feed(batch)
    comparison.finish()
    return list(comparison.differences())


def test_equal_calls_have_no_difference() -> None:
    calls = (collective(), collective(BROADCAST, root=1), collective(ALL_GATHER, 3))
    assert differences(call_batch(0, *calls), call_batch(1, *calls)) == []


@pytest.mark.parametrize(
    ("first", "second", "kind", "sentence"),
    [
        (collective(), collective(ALL_GATHER), DifferenceKind.FUNCTION,
         "rank 0 calls all-reduce of 8 float32 elements, rank 1 all-gather of 8 float32 elements"),
        (collective(count=8), collective(count=9), DifferenceKind.COUNT,
         "rank 0 calls all-reduce of 8 float32 elements, rank 1 all-reduce of 9 float32 elements"),
        (collective(count=1), collective(count=1, datatype=NcclDatatype.BFLOAT16), DifferenceKind.DATATYPE,
         "rank 0 calls all-reduce of 1 float32 element, rank 1 all-reduce of 1 bfloat16 element"),
        (collective(BROADCAST, root=0), collective(BROADCAST, root=1), DifferenceKind.ROOT,
         "rank 0 calls broadcast with root 0, rank 1 broadcast with root 1"),
    ],
)  # fmt: skip
def test_difference_names_both_ranks_and_their_lines(
    first: Collective, second: Collective, kind: DifferenceKind, sentence: str
) -> None:
    (difference,) = differences(call_batch(0, first), call_batch(1, second))
    assert (difference.kind, difference.sentence) == (kind, sentence)
    lines = [
        (call.rank, call.process, call.stack[call.site].line)
        for call in (difference.first, difference.second)
    ]
    assert lines == [(0, 1000, 0), (1, 1001, 10)]


def test_order_of_calls_matters_between_groups() -> None:
    one, other = collective(), collective(BROADCAST)
    (difference,) = differences(call_batch(0, one, other), call_batch(1, other, one))
    assert difference.kind is DifferenceKind.FUNCTION


def test_order_of_calls_does_not_matter_within_a_group() -> None:
    one, other = collective(), collective(BROADCAST)
    assert differences(call_batch(0, [one, other]), call_batch(1, [other, one])) == []


def test_only_first_difference_of_a_communicator_is_reported() -> None:
    calls = [collective(count=count) for count in (1, 2, 3)]
    found = differences(call_batch(0, *calls), call_batch(1, *reversed(calls)))
    assert [(each.first.element_count, each.second.element_count) for each in found] == [(1, 3)]


def test_communicators_are_compared_separately() -> None:
    assert (
        differences(
            call_batch(0, collective(), key=5), call_batch(1, collective(ALL_GATHER), key=6)
        )
        == []
    )


def test_rank_that_died_within_a_group_is_no_difference() -> None:
    one, other = collective(), collective(BROADCAST)
    assert differences(call_batch(0, one, [one, other]), call_batch(1, one, [one])) == []
    assert differences(call_batch(0, one, one, one), call_batch(1, one)) == []


def test_root_of_all_reduce_does_not_matter() -> None:
    calls = collective(root=0), collective(root=1)
    assert differences(call_batch(0, calls[0]), call_batch(1, calls[1])) == []


def test_captured_collectives_end_the_comparison() -> None:
    captured = collective(graph=3)
    ranks = call_batch(0, captured, collective()), call_batch(1, captured, collective(count=9))
    assert differences(*ranks) == []


def test_send_and_receive_of_equal_size_match() -> None:
    send, receive = collective(SEND, 8, root=1), collective(RECEIVE, 8, root=0)
    assert differences(call_batch(0, send, send), call_batch(1, receive, receive)) == []


def test_receive_of_other_size_than_the_send_is_a_difference() -> None:
    sends = [collective(SEND, count, root=1) for count in (8, 16)]
    receives = [collective(RECEIVE, count, root=0) for count in (8, 8)]
    (difference,) = differences(call_batch(1, *receives), call_batch(0, *sends))
    assert difference.kind is DifferenceKind.TRANSFER
    assert difference.sentence == (
        "rank 0 sends 16 float32 elements to rank 1, which receives 8 float32 elements"
    )


def test_unmatched_send_is_no_difference() -> None:
    assert differences(call_batch(0, collective(SEND, root=1)), call_batch(1, collective())) == []


def test_third_rank_is_compared_after_two_ranks_agreed() -> None:
    equal = [call_batch(rank, collective(), collective(), rank_count=3) for rank in (0, 1)]
    last = call_batch(2, collective(count=9), collective(), rank_count=3)
    for batches in ([*equal, last], [last, *equal], [equal[0], last, equal[1]]):
        (difference,) = differences(*batches)
        assert 2 in (difference.first.rank, difference.second.rank)
        assert difference.first.rank < difference.second.rank


def test_ranks_of_other_hosts_are_not_needed() -> None:
    calls = (collective(), collective(count=3), collective())
    others = (collective(), collective(count=4), collective())
    (difference,) = differences(
        call_batch(0, *calls, rank_count=16), call_batch(1, *others, rank_count=16)
    )
    assert difference.kind is DifferenceKind.COUNT


def test_transfers_are_not_compared_if_some_are_unknown() -> None:
    sender = call_batch(0, collective(SEND, 8, root=1))
    receiver = call_batch(1, collective(RECEIVE, 16, root=0))
    reason = "collective whose buffers are unknown: NCCL did not report them"
    gap = Batch(sender.process, pack([Event(Gap(reason))], lambda _: 1), ["", reason], [()])
    assert len(differences(sender, receiver)) == 1
    assert differences(gap, sender, receiver) == []


def test_difference_is_found_before_the_ranks_end() -> None:
    comparison = RankComparison()
    comparison.feed(call_batch(0, collective(), collective()))
    comparison.feed(call_batch(1, collective(count=9), collective()))
    assert len(list(comparison.differences())) == 1
