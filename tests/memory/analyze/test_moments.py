"""The curves, reduced for charts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from memory import builders
from memory.builders import MIB, START_US, Segment, alloc, freed
from memory.history import History
from memory.strategies import LAW, recordings

from cudakit.memory.analyze.moments import timeline
from cudakit.memory.replay.allocations import Curves
from cudakit.memory.result import Timeline

BASE = 0x7F00_0000_0000
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
def test_timeline_of_a_short_trace_has_every_moment(history: History) -> None:
    snapshot, curves = history.snapshot(), history.replay().curves
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
