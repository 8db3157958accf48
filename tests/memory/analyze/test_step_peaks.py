"""The peak of each step: a law against a brute force, rising peaks, and growth by call site."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory import builders
from memory.builders import KIB, MIB, START_US, alloc, annotated
from memory.simulator import Allocator
from memory.strategies import LAW

from cudakit.memory.analyze import MemorySpec, analyze
from cudakit.memory.analyze.step_peaks import is_rising
from cudakit.memory.result import DeviceMemory

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
