"""Leaks, and growth that is not a leak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from memory.builders import KIB, MIB, START_US, annotated
from memory.simulator import Allocator

from cudakit.memory.analyze import MemorySpec, analyze
from cudakit.memory.result import DeviceMemory
from cudakit.memory.snapshot import Annotation, Snapshot

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
