"""The reliability of a file, and advice on recording."""

from __future__ import annotations

import pytest
from hypothesis import given
from memory import builders
from memory.builders import KIB, MIB, Block, Entry, Segment, alloc, freed, segment_alloc
from memory.history import History
from memory.strategies import LAW, garbage, recordings

from cudakit.memory.analyze import MemorySpec, analyze
from cudakit.memory.result import DeviceMemory, Health
from cudakit.memory.snapshot import HOST, DeviceTrace, Snapshot
from cudakit.torch_rules.actions import Action

BASE = 0x7F00_0000_0000


def device(snapshot: Snapshot) -> DeviceMemory:
    return analyze([snapshot], MemorySpec()).devices[0]


def analyzed(trace: DeviceTrace, **more: object) -> Health:
    return device(builders.snapshot(trace, **more)).health


def lifetimes(times: int, *, stack: int = 1) -> list[Entry]:
    """Return entries that allocate and free at one address repeatedly."""
    return [
        entry
        for _ in range(times)
        for entry in (alloc(BASE, 512, stack=stack), *freed(BASE, 512, stack=stack))
    ]


SEGMENT = Segment(BASE, 2 * MIB)
FROM_THE_START = [segment_alloc(BASE, 2 * MIB)]


@LAW
@given(recordings(pools=3))
def test_replay_of_an_allocators_trace_is_exact(history: History) -> None:
    found = device(history.snapshot())
    assert found.exact
    assert found.inconsistencies == 0


@LAW
@given(garbage())
def test_arbitrary_trace_is_exact_if_and_only_if_consistent(trace: DeviceTrace) -> None:
    found = device(builders.snapshot(trace))
    assert found.exact == (found.inconsistencies == 0)


def test_reader_warning_makes_a_file_inexact() -> None:
    trace = builders.trace(lifetimes(1), [SEGMENT], warnings=("1 entry was skipped",))
    assert not device(builders.snapshot(trace)).exact
    assert analyzed(trace).warnings == ("1 entry was skipped",)


def test_trace_that_starts_with_an_empty_allocator_has_not_overflowed() -> None:
    found = analyzed(builders.trace([*FROM_THE_START, *lifetimes(1)], [SEGMENT]))
    assert found.begins_complete
    assert found.overflowed is False


def test_overflow_of_an_incomplete_trace_is_unknown() -> None:
    found = analyzed(builders.trace(lifetimes(1), [SEGMENT]))
    assert not found.begins_complete
    assert found.overflowed is None


def test_incomplete_trace_of_a_round_length_has_overflowed() -> None:
    entries = [*lifetimes(333), Entry(Action.SNAPSHOT)]
    found = analyzed(builders.trace(entries, [SEGMENT]))
    assert found.overflowed is True
    assert "max_entries" in found.advice[0]


def test_complete_trace_of_a_round_length_has_not_overflowed() -> None:
    entries = [*FROM_THE_START, *lifetimes(333)]
    assert len(entries) == 1000
    assert analyzed(builders.trace(entries, [SEGMENT])).overflowed is False


@pytest.mark.parametrize("said", [True, False])
def test_recorded_overflow_flag_overrides_the_guess(said: bool) -> None:
    assert analyzed(builders.trace(lifetimes(1), [SEGMENT], overflowed=said)).overflowed is said


def test_file_without_a_trace_gives_advice_on_recording() -> None:
    found = analyzed(builders.trace([], [SEGMENT]))
    assert len(found.advice) == 1
    assert "_record_memory_history" in found.advice[0]


@pytest.mark.parametrize(
    ("action", "word"),
    [
        (Action.ALLOC, "alloc"),
        (Action.FREE_REQUESTED, "free_requested"),
        (Action.FREE_COMPLETED, "free_completed"),
    ],
)
def test_absent_kind_of_event_is_reported_as_skipped(action: Action, word: str) -> None:
    entries = [entry for entry in lifetimes(3) if entry.action != action]
    found = analyzed(builders.trace(entries, [SEGMENT]))
    assert any(
        advice.startswith(
            f"The trace lacks all {word} events, so figures before the end may be wrong"
        )
        for advice in found.advice
    )


def test_events_that_did_not_happen_are_not_reported_as_skipped() -> None:
    for entries in (lifetimes(1)[:1], lifetimes(1)[1:], [Entry(Action.SNAPSHOT)]):
        blocks = [Block(BASE, 512, stack=1)] if entries[0].action == Action.ALLOC else []
        final = [Segment(BASE, 2 * MIB, blocks)]
        assert analyzed(builders.trace(entries, final)).advice == ()


def test_free_entries_count_as_request_and_completion() -> None:
    entries = [alloc(BASE, 512, stack=1), Entry(Action.FREE, BASE, 512), alloc(BASE, 512, stack=1)]
    assert analyzed(builders.trace(entries, [SEGMENT])).advice == ()


def test_share_without_a_stack_excludes_allocations_whose_stack_is_unknowable() -> None:
    entries = [
        *freed(BASE, 512),  # allocated before the trace
        *lifetimes(1, stack=0),
        *lifetimes(2, stack=1),
    ]
    live = Block(BASE + KIB, 512, stack=1)
    found = analyzed(builders.trace(entries, [Segment(BASE, 2 * MIB, [live])]))
    assert found.without_stack == 0.25
    assert 'stacks="all"' in found.advice[0]


def test_few_allocations_without_a_stack_give_no_advice() -> None:
    found = analyzed(builders.trace([*lifetimes(1, stack=0), *lifetimes(20)], [SEGMENT]))
    assert 0 < found.without_stack < 0.1
    assert found.advice == ()


def test_advice_on_missing_stacks_names_their_share_or_that_none_has_one() -> None:
    some = analyzed(builders.trace([*lifetimes(1, stack=0), *lifetimes(1)], [SEGMENT]))
    none = analyzed(builders.trace(lifetimes(2, stack=0), [SEGMENT]))
    assert some.advice[0].startswith("50% of the allocations have no call stack, for example")
    assert none.advice[0] == 'No allocation has a call stack: record with stacks="all".'


def test_file_without_times_gives_advice() -> None:
    found = analyzed(builders.trace(lifetimes(1), [SEGMENT]), has_times=False)
    assert not found.has_times
    assert any("no times" in line for line in found.advice)


def test_pinned_host_memory_has_no_device_index() -> None:
    trace = builders.trace([*FROM_THE_START, *lifetimes(1)], [SEGMENT], device=HOST)
    assert device(builders.snapshot(trace)).device is None
