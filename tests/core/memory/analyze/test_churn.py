"""Who allocates most over the whole trace."""

from __future__ import annotations

import pytest
from core.memory import builders
from core.memory.builders import KIB, MIB, Block, Segment, alloc, freed
from core.memory.history import History
from core.memory.strategies import LAW, recordings
from hypothesis import given

from cudakit.core.memory.analyze import MemorySpec, analyze
from cudakit.core.memory.result import Churn
from cudakit.core.memory.snapshot import Snapshot
from cudakit.torch_rules.actions import Action

BASE = 0x7F00_0000_0000


def churned(snapshot: Snapshot) -> tuple[Churn, ...]:
    return analyze([snapshot], MemorySpec()).devices[0].churn


@LAW
@given(recordings(pools=2))
def test_all_allocations_of_the_trace_are_counted_once(history: History) -> None:
    found = churned(history.snapshot())
    made = [entry for entry in history.entries if entry.action == Action.ALLOC]
    assert sum(row.count for row in found) == len(made)
    assert sum(row.bytes for row in found) == sum(entry.size for entry in made)
    assert sum(row.share for row in found) == pytest.approx(1 if made else 0)
    assert len(found) == len({entry.stack for entry in made})


def test_the_stack_that_allocated_most_bytes_comes_first() -> None:
    entries = []
    for stack, size, times in ((1, KIB, 4), (2, MIB, 2)):
        for _ in range(times):
            entries += [alloc(BASE, size, stack=stack), *freed(BASE, size, stack=stack)]
    found = churned(builders.snapshot(builders.trace(entries, [Segment(BASE, 2 * MIB)])))
    rows = [(r.stack[r.site].name, r.bytes, r.count, r.mean_size_bytes) for r in found]
    assert rows == [("place2", 2 * MIB, 2, MIB), ("place1", 4 * KIB, 4, KIB)]


def test_the_mean_life_is_of_those_that_ended() -> None:
    entries = [
        alloc(BASE, 512, stack=1, time_us=100),
        alloc(BASE + KIB, 512, stack=1, time_us=100),
        alloc(BASE + 2 * KIB, 512, stack=1, time_us=100),
        *freed(BASE, 512, time_us=110),
        *freed(BASE + KIB, 512, time_us=130),
    ]
    final = [Segment(BASE, 2 * MIB, [Block(BASE + 2 * KIB, 512)])]
    (row,) = churned(builders.snapshot(builders.trace(entries, final)))
    assert row.mean_lifetime_us == 20


def test_without_an_end_or_without_times_there_is_no_mean_life() -> None:
    live = builders.trace([alloc(BASE, 512)], [Segment(BASE, 2 * MIB, [Block(BASE, 512)])])
    assert churned(builders.snapshot(live))[0].mean_lifetime_us is None
    ended = builders.trace([alloc(BASE, 512), *freed(BASE, 512)], [Segment(BASE, 2 * MIB)])
    assert churned(builders.snapshot(ended, has_times=False))[0].mean_lifetime_us is None


def test_what_was_allocated_before_the_trace_does_not_count() -> None:
    trace = builders.trace(freed(BASE, 512), [Segment(BASE, 2 * MIB, [Block(BASE + KIB, 512)])])
    assert churned(builders.snapshot(trace)) == ()
