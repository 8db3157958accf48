"""The reliability of a file, and advice on recording."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory import builders
from memory.builders import KIB, MIB, START_US, Block, Entry, Segment, alloc, freed, segment_alloc
from memory.simulated_history import SimulatedHistory
from memory.strategies import LAW, garbage, recordings

from cudakit.errors import UsageError
from cudakit.memory.analyze import analyze, diff, timeline
from cudakit.memory.history import Curves
from cudakit.memory.load import load
from cudakit.memory.result import DeviceMemory, DiffResult, Health, MomentDiff, Timeline
from cudakit.memory.selection import MemorySpec
from cudakit.memory.snapshot import HOST, Action, DeviceTrace, Snapshot

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
def test_replay_of_an_allocators_trace_is_exact(history: SimulatedHistory) -> None:
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


# --- The curves, reduced for charts ----------------------------------------------------------------

NAMES = ("requested", "allocated", "reserved")


def thinned(values: list[int]) -> Timeline:
    """Return the timeline of a curve with these values, one per moment."""
    curve = np.array(values, np.int64)
    trace = builders.trace(
        [alloc(BASE, 512) for _ in range(len(values) - 1)], [Segment(BASE, 2 * MIB)]
    )
    return timeline(builders.snapshot(trace), trace, Curves(curve, curve, curve, curve))


@LAW
@given(recordings())
def test_timeline_of_a_short_trace_has_every_moment(history: SimulatedHistory) -> None:
    snapshot, curves = history.snapshot(), history.reconstruct().curves
    found = timeline(snapshot, snapshot.devices[0], curves)
    assert found.event == tuple(range(-1, len(history.entries)))
    for name in NAMES:
        assert list(getattr(found, f"{name}_bytes")) == getattr(curves, name).tolist()


@LAW
@given(st.integers(2, 30_000), st.data())
def test_timeline_keeps_the_peak_and_the_end(length: int, data: st.DataObject) -> None:
    values = [0] * length
    peaks = data.draw(st.lists(st.integers(0, length - 1), max_size=5, unique=True))
    for height, place in enumerate(peaks, start=1):
        values[place] = height
    found = thinned(values)
    bounds = [event + 1 for event in found.event] + [length]
    assert list(found.requested_bytes) == [max(values[a:b]) for a, b in pairwise(bounds)]
    assert found.requested_bytes[-1] == values[-1]
    assert max(found.reserved_bytes) == max(values)


def test_timeline_keeps_the_end_after_a_late_peak() -> None:
    assert thinned([*[0] * 20_000, 5, 1]).requested_bytes[-2:] == (5, 1)


def test_timeline_of_a_long_trace_has_about_2000_spans() -> None:
    assert len(thinned([0] * 30_000).event) <= 2001


def test_timeline_has_the_times_of_first_events() -> None:
    found = thinned([0, 1, 2])
    assert found.event == (-1, 0, 1)
    assert found.time_us == (START_US, START_US, START_US + 1)


def test_timeline_without_times_or_events_has_no_times() -> None:
    trace = builders.trace([alloc(BASE, 512), *freed(BASE, 512)], [Segment(BASE, 2 * MIB)])
    curve = np.zeros(4, np.int64)
    curves = Curves(curve, curve, curve, curve)
    assert timeline(builders.snapshot(trace, has_times=False), trace, curves).time_us is None
    empty = Curves(curve[:1], curve[:1], curve[:1], curve[:1])
    assert timeline(builders.snapshot(), builders.trace(), empty).event == (-1,)


# --- The comparison of two snapshots ---------------------------------------------------------------

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def trained() -> Snapshot:
    return load(str(DATA / "train_python.pkl.gz"))


@pytest.fixture(scope="module")
def failed() -> Snapshot:
    return load(str(DATA / "oom.pkl.gz"))


@pytest.fixture(scope="module")
def changed(trained: Snapshot, failed: Snapshot) -> DiffResult:
    return diff(trained, failed, MemorySpec())


def is_empty(moment: MomentDiff) -> bool:
    return not any((moment.grown, moment.shrunk, moment.appeared, moment.vanished))


def rows(moment: MomentDiff) -> int:
    parts = (moment.grown, moment.shrunk, moment.appeared, moment.vanished)
    return sum(row.change_bytes for part in parts for row in part)


@pytest.mark.parametrize("name", ["peak", "end"])
def test_changes_of_all_stacks_sum_to_the_total_change(changed: DiffResult, name: str) -> None:
    moment = getattr(changed.devices[0], name)

    assert rows(moment) == moment.after.state.active_bytes - moment.before.state.active_bytes


def test_rows_are_listed_by_kind_of_change(changed: DiffResult) -> None:
    moment = changed.devices[0].end

    assert all(row.before_count and row.change_bytes > 0 for row in moment.grown)
    assert all(row.after_count and row.change_bytes < 0 for row in moment.shrunk)
    assert all(not row.before_count and row.after_bytes for row in moment.appeared)
    assert all(not row.after_count and row.before_bytes for row in moment.vanished)


def test_rows_are_sorted_by_size_of_change(changed: DiffResult) -> None:
    grown = [row.change_bytes for row in changed.devices[0].peak.grown]

    assert grown == sorted(grown, reverse=True)


def test_diff_of_a_snapshot_with_itself_is_empty(trained: Snapshot) -> None:
    same = diff(trained, trained, MemorySpec())
    moment = same.devices[0].peak

    assert moment.growth == 0
    assert is_empty(moment)
    assert not same.grew_beyond(0)


def test_swapped_snapshots_swap_appeared_and_vanished(
    trained: Snapshot, failed: Snapshot, changed: DiffResult
) -> None:
    back = diff(failed, trained, MemorySpec()).devices[0].end

    assert len(back.vanished) == len(changed.devices[0].end.appeared)
    assert len(back.shrunk) == len(changed.devices[0].end.grown)


def test_stacks_match_despite_another_checkout_and_edited_lines(trained: Snapshot) -> None:
    frames = tuple(
        replace(
            frame,
            filename=f"/home/a/{frame.filename}",
            line=frame.line + 3,
        )
        for frame in trained.frames
    )
    moment = diff(trained, replace(trained, frames=frames), MemorySpec()).devices[0].peak

    assert not set(frames) & set(trained.frames)
    assert is_empty(moment)


def test_single_devices_are_compared_despite_different_indices(trained: Snapshot) -> None:
    other = replace(trained, devices=(replace(trained.devices[0], device=5),))
    found = diff(trained, other, MemorySpec()).devices[0]

    assert (found.before_device, found.device) == (0, 5)


def test_grew_beyond_checks_the_peak_and_the_end(changed: DiffResult) -> None:
    peak, end = changed.devices[0].peak.growth, changed.devices[0].end.growth
    assert peak is not None
    assert end is not None

    assert changed.grew_beyond(max(peak, end) - 0.01)
    assert not changed.grew_beyond(max(peak, end) + 0.01)


def test_diff_of_snapshots_without_a_common_device_is_a_usage_error(trained: Snapshot) -> None:
    device = trained.devices[0]
    before = replace(trained, devices=(replace(device, device=0), replace(device, device=1)))
    after = replace(trained, devices=(replace(device, device=2), replace(device, device=3)))

    with pytest.raises(UsageError, match="no common device"):
        diff(before, after, MemorySpec())
