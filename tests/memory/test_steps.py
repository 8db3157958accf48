"""The steps of a program, and the named ranges that are open at each event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory import builders
from memory.builders import KIB, MIB, START_US, Entry, alloc, annotated
from memory.simulator import Allocator
from memory.strategies import LAW

from cudakit.memory.analyze import analyze
from cudakit.memory.result import DeviceMemory
from cudakit.memory.selection import MemorySpec
from cudakit.memory.snapshot import Action, Annotation, Mark, Snapshot
from cudakit.memory.steps import (
    active_annotation,
    find_loop,
    is_inside_one_call,
    is_rising,
    last_mark_at,
    non_decreasing,
    open_ranges_at,
    step_moments,
)
from cudakit.stacks import Frame

BASE = 0x7F00_0000_0000


def moments(
    entries: list[Entry], *annotations: tuple[Annotation, ...], **more: object
) -> tuple[str, list[int]]:
    trace = builders.trace(entries)
    ranges = tuple(end for pair in annotations for end in pair)
    name, found, _ = step_moments(builders.snapshot(trace, annotations=ranges, **more), trace)
    return name, found.tolist()


def allocations(stacks: list[int]) -> list[Entry]:
    return [alloc(BASE + i * KIB, 512, stack=stack) for i, stack in enumerate(stacks)]


def span(name: str, start: int, end: int, *, device: int = 0) -> tuple[Annotation, ...]:
    return annotated(name, START_US + start, START_US + end, device=device)


QUIET = allocations([1] * 30)  # a single repeating stack is not a sequence of steps


def test_step_moments_are_starts_and_the_last_end() -> None:
    steps = [span(f"step {i}", 10 * i, 10 * i + 9) for i in range(3)]
    assert moments(QUIET, *steps) == ("annotation step#", [0, 10, 20, 29])


def test_open_last_step_has_no_end_moment() -> None:
    steps = [span(f"step {i}", 10 * i, 10 * i + 9) for i in range(3)]
    assert moments(QUIET, *steps[:2], steps[2][:1]) == ("annotation step#", [0, 10, 20])


def test_ranges_that_all_have_one_number_are_steps_of_their_whole_name() -> None:
    steps = [span("step0", 10 * i, 10 * i + 9) for i in range(3)]
    assert moments(QUIET, *steps) == ("annotation step0", [0, 10, 20, 29])


def test_numbered_ranges_precede_more_frequent_unnumbered_ranges() -> None:
    steps = [span(f"ProfilerStep#{i}", 10 * i, 10 * i + 10) for i in range(3)]
    inner = [span("forward", i, i + 1) for i in range(0, 30, 2)]
    assert moments(QUIET, *steps, *inner)[0] == "annotation ProfilerStep#"


def test_numbered_ranges_that_restart_in_each_step_are_not_steps() -> None:
    steps = [span(f"step {i}", 10 * i, 10 * i + 10) for i in range(3)]
    layers = [span(f"layer{j}", 10 * i + j, 10 * i + j + 1) for i in range(3) for j in range(9)]
    assert moments(QUIET, *steps, *layers) == ("annotation step#", [0, 10, 20, 30])


def test_outermost_ranges_are_steps_without_numbered_ranges() -> None:
    steps = [span("train", 10 * i, 10 * i + 9) for i in range(3)]
    layers = [span("layer", 10 * i + j, 10 * i + j + 1) for i in range(3) for j in (1, 3, 5, 7)]
    assert moments(QUIET, *steps, *layers) == ("annotation train", [0, 10, 20, 29])


def test_range_without_an_end_does_not_hide_nested_ranges() -> None:
    steps = [span("train", 10 * i + 1, 10 * i + 9) for i in range(3)]
    assert moments(QUIET, span("job", 0, 0)[:1], *steps)[0] == "annotation train"


def test_annotation_number_may_exceed_64_bits() -> None:
    steps = [span("step " + "9" * 5000 + str(i), 10 * i, 10 * i + 10) for i in range(3)]
    assert moments(QUIET, *steps)[0] == "annotation step#"


def test_annotations_of_another_device_give_no_steps() -> None:
    steps = [span(f"step {i}", 10 * i, 10 * i + 9, device=1) for i in range(3)]
    assert moments(QUIET, *steps) == ("none", [])


def test_annotations_without_times_give_no_steps() -> None:
    steps = [span(f"step {i}", 10 * i, 10 * i + 9) for i in range(3)]
    assert moments(QUIET, *steps, has_times=False) == ("none", [])


def test_snapshot_markers_are_steps_without_annotations() -> None:
    entries = list(QUIET)
    entries[5] = entries[15] = entries[25] = Entry(Action.SNAPSHOT)
    assert moments(entries) == ("snapshot markers", [5, 15, 25])


def test_repeating_stacks_give_one_moment_per_period() -> None:
    assert moments(allocations([1, 2, 2, 3, 4] * 6)) == (
        "repeating allocations",
        [5, 10, 15, 20, 25, 30],
    )


def test_period_is_found_after_a_different_warm_up() -> None:
    name, found = moments(allocations([7, 8, 9, 9, 8, 7, 7, *([1, 2, 3, 4] * 12)]))
    assert name == "repeating allocations"
    assert {later - earlier for earlier, later in pairwise(found)} == {4}


@LAW
@given(st.lists(st.integers(1, 15), min_size=2, max_size=12), st.integers(6, 20))
def test_period_of_repeating_stacks_is_found(sequence: list[int], times: int) -> None:
    name, found = moments(allocations(sequence * times))
    shortest = next(
        n
        for n in range(1, len(sequence) + 1)
        if list(islice(cycle(sequence[:n]), len(sequence) * 2)) == sequence * 2
    )
    if shortest == 1:
        assert name == "none"
    else:
        assert name == "repeating allocations"
        assert {later - earlier for earlier, later in pairwise(found)} == {shortest}


def test_single_repeating_stack_is_not_a_step() -> None:
    assert moments(QUIET) == ("none", [])
    assert moments(allocations([2, *[1] * 40])) == ("none", [])


def test_trace_without_allocations_has_no_steps() -> None:
    assert moments([]) == ("none", [])
    assert moments([Entry(Action.SNAPSHOT)]) == ("none", [])


EVENTS = 10


def bound(name: str, at: int, *, start: bool) -> Annotation:
    return Annotation(name, start, 0, START_US + at)


def spans(name: str, start: int, end: int, *, device: int = 0) -> list[Annotation]:
    return list(annotated(name, START_US + start, START_US + end, device=device))


def open_at(*bounds: Annotation, has_times: bool = True) -> list[str]:
    """Return the open range at each of ten events, one microsecond apart."""
    trace = builders.trace([Entry(Action.SNAPSHOT)] * EVENTS)
    snapshot = builders.snapshot(trace, annotations=bounds, has_times=has_times)
    index, names = active_annotation(snapshot, trace)
    return [names[i] for i in index.tolist()]


def test_range_includes_its_start_and_excludes_its_end() -> None:
    assert open_at(*spans("a", 2, 5)) == ["", "", "a", "a", "a", "", "", "", "", ""]


def test_innermost_of_nested_ranges_is_active() -> None:
    assert open_at(*spans("outer", 1, 8), *spans("inner", 3, 5)) == [
        *["", "outer", "outer", "inner", "inner"],
        *["outer", "outer", "outer", "", ""],
    ]


def test_latest_of_overlapping_ranges_is_active_until_its_end() -> None:
    assert open_at(*spans("a", 1, 5), *spans("b", 3, 8)) == [
        *["", "a", "a", "b", "b"],
        *["b", "b", "b", "", ""],
    ]


def test_end_of_a_range_without_start_is_ignored() -> None:
    assert open_at(bound("a", 4, start=False), *spans("b", 6, 8)) == [
        *["", "", "", "", ""],
        *["", "b", "b", "", ""],
    ]


def test_range_without_an_end_stays_open() -> None:
    assert open_at(bound("a", 7, start=True))[6:] == ["", "a", "a", "a"]


def test_end_closes_the_later_range_of_its_name() -> None:
    bounds = [*spans("a", 1, 9), *spans("b", 2, 7), *spans("a", 3, 5)]
    assert open_at(*bounds) == ["", "a", "b", "a", "a", "b", "b", "a", "a", ""]


def test_ranges_of_another_device_are_not_active() -> None:
    assert open_at(*spans("a", 0, 9, device=1)) == [""] * EVENTS


def test_no_range_is_active_without_times() -> None:
    assert open_at(*spans("a", 0, 9), has_times=False) == [""] * EVENTS


def test_no_range_is_active_without_annotations() -> None:
    assert open_at() == [""] * EVENTS


def test_non_decreasing_times_replace_a_clock_that_goes_back() -> None:
    times = [5, 7, 6, 3, 9]
    trace = builders.trace([Entry(Action.SNAPSHOT, time_us=time) for time in times])
    assert non_decreasing(trace.events.time_us).tolist() == [5, 7, 7, 7, 9]


@LAW
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(-2, EVENTS + 2)), max_size=12
    )
)
def test_annotations_are_sorted_by_time(
    bounds: list[tuple[str, bool, int]],
) -> None:
    in_order = sorted(bounds, key=lambda each: each[2])
    expected = []
    for event in range(EVENTS):
        open_names: list[str] = []
        for name, start, at in in_order:
            if at > event:
                break
            if start:
                open_names.append(name)
            elif name in open_names:
                last = max(i for i, each in enumerate(open_names) if each == name)
                del open_names[last]
        expected.append(open_names[-1] if open_names else "")
    found = open_at(*(bound(name, at, start=start) for name, start, at in bounds))
    assert found == expected


def test_open_ranges_are_those_around_the_time_of_the_event() -> None:
    trace = builders.trace(QUIET)
    ranges = (
        *span("epoch", 0, 29),
        *span("step", 5, 20),
        *span("forward", 5, 8),
        *span("other", 5, 9, device=1),
    )
    snapshot = builders.snapshot(trace, annotations=ranges)

    found = [open_ranges_at(snapshot, trace, event) for event in (-1, 4, 7, 12, 25)]

    assert found == [(), ("epoch",), ("epoch", "step", "forward"), ("epoch", "step"), ("epoch",)]


def test_last_mark_is_the_newest_before_the_event_on_its_device() -> None:
    trace = builders.trace(QUIET)
    marks = (
        Mark("second", 0, START_US + 9),
        Mark("first", 0, START_US + 5),
        Mark("other device", 1, START_US + 10),
    )
    snapshot = replace(builders.snapshot(trace), marks=marks)

    names = [last_mark_at(snapshot, trace, event) for event in (-1, 4, 5, 8, 9, 25)]

    assert names == ["", "", "first", "first", "second", "second"]


# --- The loop that runs the steps of a program, found in sequences of call stacks ------------------

TORCH = "/usr/lib/python3/site-packages/torch/"
MODULE = Frame("_call_impl", f"{TORCH}nn/modules/module.py", 1750)
LINEAR = Frame("forward", f"{TORCH}nn/modules/linear.py", 134)
GELU = Frame("forward", f"{TORCH}nn/modules/activation.py", 816)


def program(*stacks: tuple[Frame, ...]) -> tuple[Snapshot, list[int]]:
    """Return a snapshot with these call stacks, outermost frame first, and the id of each."""
    frames = list(dict.fromkeys(frame for stack in stacks for frame in stack))
    distinct = list(dict.fromkeys(stacks))
    table = ((), *(tuple(frames.index(frame) for frame in stack[::-1]) for stack in distinct))
    snapshot = replace(builders.snapshot(), frames=tuple(frames), stacks=table)
    return snapshot, [distinct.index(stack) + 1 for stack in stacks]


def loop(*stacks: tuple[Frame, ...]) -> tuple[str, list[int]] | None:
    snapshot, ids = program(*stacks)
    found = find_loop(snapshot, np.array(ids, np.int32), 3)
    return None if found is None else (found.first_line, found.starts.tolist())


def main(line: int) -> Frame:
    return Frame("main", "/home/ada/train.py", line)


def step(line: int) -> Frame:
    return Frame("train_step", "/home/ada/train.py", line)


def test_each_jump_back_to_an_earlier_line_starts_an_iteration() -> None:
    setup = [(main(10),), (main(11),)]
    body = [(main(20),), (main(21),), (main(21),), (main(22),)]
    assert loop(*setup, *body * 4) == ("train.py:20 main", [2, 6, 10, 14])


def test_loop_in_a_called_function_is_found_below_its_call() -> None:
    body = [(main(30), step(5)), (main(30), step(6)), (main(30), step(8))]
    assert loop((main(10),), *body * 3) == ("train.py:5 train_step", [1, 4, 7])


def test_outer_loop_is_found_before_the_loop_inside_it() -> None:
    layers = [(main(21), step(5)), (main(21), step(6))] * 3
    body = [(main(20),), *layers, (main(22),)]
    assert loop(*body * 3) == ("train.py:20 main", [0, 8, 16])


def test_nested_loop_of_one_function_does_not_start_iterations() -> None:
    body = [(main(20),), *[(main(23),), (main(24),)] * 3]
    assert loop(*body * 3) == ("train.py:20 main", [0, 7, 14])


def test_two_iterations_are_not_a_loop() -> None:
    assert loop(*[(main(20),), (main(21),)] * 2) is None


def test_layers_of_a_network_are_not_a_loop() -> None:
    layers = [(main(20), MODULE, LINEAR), (main(20), MODULE, GELU)]
    assert loop(*layers * 10) is None


def test_allocations_without_a_call_stack_do_not_hide_the_loop() -> None:
    body = [(main(20),), (), (main(21),), ()]
    snapshot, _ = program((main(20),), (main(21),))
    ids = [[1, 0, 2, 0][i % 4] for i in range(len(body) * 3)]
    found = find_loop(snapshot, np.array(ids, np.int32), 3)
    assert found is not None
    assert found.starts.tolist() == [0, 4, 8]


def test_empty_sequence_has_no_loop() -> None:
    assert loop() is None
    assert find_loop(builders.snapshot(), np.zeros(5, np.int32), 3) is None


def test_stacks_are_inside_one_call_if_they_share_it() -> None:
    snapshot, ids = program(
        (main(20), MODULE, LINEAR), (main(20), MODULE, GELU), (main(20),), (main(21), MODULE, GELU)
    )
    inside = [is_inside_one_call(snapshot, np.array(ids[:n], np.int32)) for n in (1, 2, 3)]
    assert inside == [True, True, False]
    assert not is_inside_one_call(snapshot, np.array([ids[0], ids[3]], np.int32))


# --- The peak of each step: a law against a brute force, rising peaks, and growth by call site -----

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
