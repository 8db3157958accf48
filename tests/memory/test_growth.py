"""The peak of each step: a law against a brute force, rising peaks, and growth by call site."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory import builders
from memory.builders import KIB, MIB, START_US, alloc, annotated
from memory.simulator import Allocator
from memory.strategies import LAW

from cudakit.memory.analyze import analyze
from cudakit.memory.growth import is_rising
from cudakit.memory.result import DeviceMemory
from cudakit.memory.selection import MemorySpec
from cudakit.memory.snapshot import Annotation, Snapshot

# A size in MiB allocates, a negative number frees the live block with this index, 0 marks a new step.
PROGRAMS = st.lists(st.integers(-10, 30), min_size=1, max_size=80)


def run(program: list[int]) -> tuple[DeviceMemory, list[int]]:
    """Run a program; return its analysis, and the requested bytes after each event by counting."""
    allocator = Allocator(capacity=1 << 40)
    live: dict[int, int] = {}
    requested = [0]

    def count_up_to_now() -> None:
        requested.extend([sum(live.values())] * (len(allocator.entries) + 1 - len(requested)))

    for call in program:
        if call > 0:
            address = allocator.alloc(call * MIB, stack=call % 5 + 1)
            assert address is not None
            live[address] = call * MIB
        elif call < 0 and live:
            address = list(live)[call % len(live)]
            allocator.free(address)
            # Requested memory counts until the free completes, which is the last event.
            before = sum(live.values())
            missing = len(allocator.entries) - len(requested)
            requested.extend([before] * missing)
            del live[address]
        elif call == 0:
            allocator.mark()
        count_up_to_now()
    return analyze([allocator.history().snapshot()], MemorySpec()).devices[0], requested


def test_events_after_the_end_of_the_last_step_are_no_step() -> None:
    entries = [alloc(0x7F00_0000_0000 + index * KIB, 512, stack=1) for index in range(30)]
    ranges = [annotated(f"step {i}", START_US + 10 * i, START_US + 10 * i + 5) for i in range(3)]
    snapshot = builders.snapshot(
        builders.trace(entries), annotations=tuple(end for pair in ranges for end in pair)
    )
    steps = analyze([snapshot], MemorySpec()).devices[0].steps

    assert [(peak.first_event, peak.last_event) for peak in steps.peaks] == [
        (0, 9),
        (10, 19),
        (20, 24),
    ]
    assert steps.peaks[-1].requested_bytes == 25 * 512


@LAW
@given(PROGRAMS)
def test_peak_of_each_step_is_the_highest_requested_memory_in_it(program: list[int]) -> None:
    device, requested = run(program)
    steps = device.steps
    if steps.source == "none":
        assert steps.peaks == ()
        return
    assert [peak.first_event for peak in steps.peaks][1:] == [
        peak.last_event + 1 for peak in steps.peaks
    ][:-1]
    for peak in steps.peaks:
        # The moment before the first event of the next step belongs to the next step.
        last = peak.last_event + 1 if peak is steps.peaks[-1] else peak.last_event
        in_step = requested[peak.first_event : last + 1]
        assert peak.requested_bytes == max(in_step)
        assert peak.start_bytes == in_step[0]
        assert requested[peak.peak_event + 1] == peak.requested_bytes
    first = steps.peaks[0].first_event
    assert max(peak.requested_bytes for peak in steps.peaks) == max(requested[first:])


@LAW
@given(PROGRAMS)
def test_growth_by_call_site_adds_up_to_the_growth_of_the_peaks(program: list[int]) -> None:
    device, _ = run(program)
    steps = device.steps
    if len(steps.peaks) < 2:
        assert steps.site_growth == ()
        return
    growth = steps.peaks[-1].requested_bytes - steps.peaks[0].requested_bytes
    assert sum(row.change_bytes for row in steps.site_growth) == growth
    changes = [row.change_bytes for row in steps.site_growth]
    assert changes == sorted(changes, reverse=True)
    for row in steps.site_growth:
        assert row.change_bytes == row.after_bytes - row.before_bytes


@pytest.mark.parametrize(
    ("peaks", "rising"),
    [
        ([1, 2, 3, 4, 5, 6], True),
        ([10, 11, 12, 14, 15, 17, 18, 21], True),
        ([4, 4, 5, 5, 6, 6, 8, 8, 10, 10], True),
        ([5, 5, 5, 5, 5, 5], False),  # steady
        ([1, 5, 5, 5, 5, 5], False),  # the first step is smaller: the optimizer has no state yet
        ([5, 5, 5, 5, 5, 20], False),  # one high step
        ([1, 3, 6, 8, 8, 7, 8, 7, 8, 8], False),  # fills up, then stays
        ([1, 2], False),
        ([100, 101, 102, 103, 104, 105], False),  # less than a tenth
    ],
)
def test_peaks_rise_only_if_later_steps_set_records(peaks: list[int], rising: bool) -> None:
    assert is_rising(np.array(peaks, np.int64) * MIB) == rising


# --- Leaks, and growth that is not a leak ----------------------------------------------------------

ACTIVATION, GRADIENT, KEPT = 1, 2, 5  # stacks

Step = Callable[[Allocator, int], None]


class Loop:
    """A program in steps; each makes temporaries and calls a given function."""

    def __init__(self, step: Step, *, steps: int = 12, marked: bool = False) -> None:
        self.allocator = Allocator(capacity=4096 * MIB)
        self.bounds: list[int] = []
        for number in range(steps):
            self.bounds.append(len(self.allocator.entries))
            if marked:
                self.allocator.mark()
            self._temporaries()
            step(self.allocator, number)
        self.bounds.append(len(self.allocator.entries))

    def _temporaries(self) -> None:
        made = [self.allocator.alloc(3 * MIB, stack=s) for s in (ACTIVATION, ACTIVATION, GRADIENT)]
        for address in made:
            assert address is not None
            self.allocator.free(address)

    def snapshot(self) -> Snapshot:
        return self.allocator.history().snapshot()

    def annotated(self, name: str) -> Snapshot:
        ranges: list[Annotation] = []
        for number, (start, end) in enumerate(pairwise(self.bounds)):
            ranges += annotated(name.format(number), START_US + start, START_US + end)
        return replace(self.snapshot(), annotations=tuple(ranges))


def analyzed(snapshot: Snapshot) -> DeviceMemory:
    return analyze([snapshot], MemorySpec()).devices[0]


def leaking(allocator: Allocator, _: int) -> None:
    allocator.alloc(300 * KIB + 1, stack=KEPT)


def check_leak(found: DeviceMemory, *, steps: int = 12) -> None:
    (leak,) = found.leaks
    assert leak.bytes_per_step == 300 * KIB + 512
    assert leak.count_per_step == 1
    assert leak.stack[leak.site].name == f"place{KEPT}"
    assert leak.count in (steps - 1, steps)
    assert list(leak.growth) == sorted(leak.growth)
    assert leak.growth[-1] == leak.bytes == leak.count * leak.bytes_per_step


def test_leak_is_found_by_numbered_annotations() -> None:
    found = analyzed(Loop(leaking).annotated("ProfilerStep#{}"))
    assert found.steps.source == "annotation ProfilerStep#"
    assert found.steps.count == 13  # the starts of 12 steps, and the end of the last
    check_leak(found)


def test_leak_is_found_by_annotations_of_one_name() -> None:
    found = analyzed(Loop(leaking).annotated("train"))
    assert found.steps.source == "annotation train"
    check_leak(found)


def test_leak_is_found_by_snapshot_markers() -> None:
    found = analyzed(Loop(leaking, marked=True).snapshot())
    assert found.steps.source == "snapshot markers"
    check_leak(found)


def test_leak_is_found_by_repeating_allocations() -> None:
    found = analyzed(Loop(leaking).snapshot())
    assert found.steps.source == "repeating allocations"
    check_leak(found)


def test_bytes_per_step_are_right_if_not_all_steps_are_compared() -> None:
    found = analyzed(Loop(leaking, steps=100).annotated("step {}"))
    check_leak(found, steps=100)
    assert len(found.leaks[0].growth) < 70


def test_leak_in_every_other_step_is_found() -> None:
    def step(allocator: Allocator, number: int) -> None:
        if number % 2:
            allocator.alloc(MIB, stack=KEPT)

    (leak,) = analyzed(Loop(step).annotated("step {}")).leaks
    assert 0.4 * MIB < leak.bytes_per_step <= MIB


def test_leaks_are_sorted_by_growth() -> None:
    def step(allocator: Allocator, _: int) -> None:
        allocator.alloc(KIB, stack=3)
        allocator.alloc(MIB, stack=4)

    found = analyzed(Loop(step).annotated("step {}")).leaks
    assert [leak.stack[leak.site].name for leak in found] == ["place4", "place3"]


def test_leaks_are_found_in_a_trace_that_starts_late() -> None:
    history = Loop(leaking, marked=True).allocator.history()
    found = analyzed(history.last(len(history.entries) // 2).snapshot())
    (leak,) = found.leaks
    assert leak.bytes_per_step == 300 * KIB + 512
    assert leak.count == 11


# Growth that is not a leak.


def optimizer_state(allocator: Allocator, number: int) -> None:
    if number == 0:
        for _ in range(4):
            allocator.alloc(5 * MIB, stack=KEPT)


def a_cache_that_fills(allocator: Allocator, number: int) -> None:
    if number < 7:
        allocator.alloc(MIB, stack=KEPT)


def a_list_that_is_emptied_now_and_then(allocator: Allocator, number: int) -> None:
    if number % 4 == 1:
        for address in allocator.live():
            allocator.free(address)
    else:
        allocator.alloc(MIB, stack=KEPT)


def a_list_that_is_given_up_at_the_end(allocator: Allocator, number: int) -> None:
    allocator.alloc(MIB, stack=KEPT)
    if number == 11:
        allocator.mark()
        for address in allocator.live():
            allocator.free(address)


def a_buffer_that_is_replaced(allocator: Allocator, _: int) -> None:
    old = allocator.live()
    allocator.alloc(MIB, stack=KEPT)
    for address in old:
        allocator.free(address)


@pytest.mark.parametrize(
    "step",
    [
        optimizer_state,
        a_cache_that_fills,
        a_list_that_is_emptied_now_and_then,
        a_list_that_is_given_up_at_the_end,
        a_buffer_that_is_replaced,
    ],
)
@pytest.mark.parametrize("by", ["annotations", "markers", "repetition"])
def test_memory_that_stops_growing_or_is_freed_is_not_a_leak(step: Step, by: str) -> None:
    loop = Loop(step, marked=by == "markers")
    found = analyzed(loop.annotated("step {}") if by == "annotations" else loop.snapshot())
    assert found.leaks == ()


def test_trace_without_steps_has_no_leaks() -> None:
    allocator = Allocator()
    for _ in range(40):
        leaking(allocator, 0)
    found = analyzed(allocator.history().snapshot())
    assert found.steps.source == "none"
    assert found.steps.count == 0
    assert found.leaks == ()


def test_two_steps_are_too_few_for_a_leak() -> None:
    loop = Loop(leaking, steps=1)
    assert analyzed(loop.annotated("step {}")).leaks == ()
