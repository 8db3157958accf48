"""Which named range was open at each event."""

from __future__ import annotations

from core.memory import builders
from core.memory.builders import START_US, Entry, annotated
from core.memory.strategies import LAW
from hypothesis import given
from hypothesis import strategies as st

from cudakit.core.memory.analyze.annotations import active_annotation, steady
from cudakit.core.memory.snapshot import Annotation
from cudakit.torch_rules.actions import Action

EVENTS = 10


def bound(name: str, at: int, *, start: bool) -> Annotation:
    return Annotation(name, start, 0, START_US + at)


def span(name: str, start: int, end: int, *, device: int = 0) -> list[Annotation]:
    return list(annotated(name, START_US + start, START_US + end, device=device))


def open_at(*bounds: Annotation, has_times: bool = True) -> list[str]:
    """Name the range open at each of ten events, one microsecond apart."""
    trace = builders.trace([Entry(Action.SNAPSHOT)] * EVENTS)
    snapshot = builders.snapshot(trace, annotations=bounds, has_times=has_times)
    index, names = active_annotation(snapshot, trace)
    return [names[i] for i in index.tolist()]


def test_a_range_is_open_from_its_start_on_and_not_at_its_end() -> None:
    assert open_at(*span("a", 2, 5)) == ["", "", "a", "a", "a", "", "", "", "", ""]


def test_of_nested_ranges_the_innermost_counts() -> None:
    assert open_at(*span("outer", 1, 8), *span("inner", 3, 5)) == [
        *["", "outer", "outer", "inner", "inner"],
        *["outer", "outer", "outer", "", ""],
    ]


def test_of_overlapping_ranges_the_one_that_began_last_counts_until_it_ends() -> None:
    assert open_at(*span("a", 1, 5), *span("b", 3, 8)) == [
        *["", "a", "a", "b", "b"],
        *["b", "b", "b", "", ""],
    ]


def test_a_range_that_began_before_the_recording_is_not_known() -> None:
    assert open_at(bound("a", 4, start=False), *span("b", 6, 8)) == [
        *["", "", "", "", ""],
        *["", "b", "b", "", ""],
    ]


def test_a_range_without_an_end_stays_open() -> None:
    assert open_at(bound("a", 7, start=True))[6:] == ["", "a", "a", "a"]


def test_of_two_ranges_of_one_name_the_later_one_ends_first() -> None:
    bounds = [*span("a", 1, 9), *span("b", 2, 7), *span("a", 3, 5)]
    assert open_at(*bounds) == ["", "a", "b", "a", "a", "b", "b", "a", "a", ""]


def test_ranges_of_another_device_are_none_of_this_one() -> None:
    assert open_at(*span("a", 0, 9, device=1)) == [""] * EVENTS


def test_without_times_nothing_can_be_brought_together() -> None:
    assert open_at(*span("a", 0, 9), has_times=False) == [""] * EVENTS


def test_without_annotations_there_is_none() -> None:
    assert open_at() == [""] * EVENTS


def test_a_clock_that_steps_back_stands_still_instead() -> None:
    times = [5, 7, 6, 3, 9]
    trace = builders.trace([Entry(Action.SNAPSHOT, time_us=time) for time in times])
    assert steady(trace.events.time_us).tolist() == [5, 7, 7, 7, 9]


@LAW
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(-2, EVENTS + 2)), max_size=12
    )
)
def test_starts_and_ends_in_any_order_are_read_as_the_events_come(
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
