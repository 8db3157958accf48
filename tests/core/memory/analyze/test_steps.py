"""Where the steps of a program begin."""

from __future__ import annotations

from itertools import cycle, islice, pairwise

from core.memory import builders
from core.memory.builders import KIB, START_US, Entry, alloc, annotated
from core.memory.strategies import LAW
from hypothesis import given
from hypothesis import strategies as st

from cudakit.core.memory.analyze.steps import step_moments
from cudakit.core.memory.snapshot import Annotation
from cudakit.torch_rules.actions import Action

BASE = 0x7F00_0000_0000


def moments(
    entries: list[Entry], *annotations: tuple[Annotation, ...], **more: object
) -> tuple[str, list[int]]:
    trace = builders.trace(entries)
    ranges = tuple(end for pair in annotations for end in pair)
    name, found = step_moments(builders.snapshot(trace, annotations=ranges, **more), trace)
    return name, found.tolist()


def allocations(stacks: list[int]) -> list[Entry]:
    return [alloc(BASE + i * KIB, 512, stack=stack) for i, stack in enumerate(stacks)]


def span(name: str, start: int, end: int, *, device: int = 0) -> tuple[Annotation, ...]:
    return annotated(name, START_US + start, START_US + end, device=device)


QUIET = allocations([1] * 30)  # one stack over and over is no sequence of steps


def test_steps_begin_with_their_annotations_and_the_last_one_ends() -> None:
    steps = [span(f"step {i}", 10 * i, 10 * i + 9) for i in range(3)]
    assert moments(QUIET, *steps) == ("annotation step#", [0, 10, 20, 29])


def test_a_step_that_has_not_ended_has_no_last_moment() -> None:
    steps = [span(f"step {i}", 10 * i, 10 * i + 9) for i in range(3)]
    assert moments(QUIET, *steps[:2], steps[2][:1]) == ("annotation step#", [0, 10, 20])


def test_numbered_ranges_go_before_more_frequent_ones_without_a_number() -> None:
    steps = [span(f"ProfilerStep#{i}", 10 * i, 10 * i + 10) for i in range(3)]
    inner = [span("forward", i, i + 1) for i in range(0, 30, 2)]
    assert moments(QUIET, *steps, *inner)[0] == "annotation ProfilerStep#"


def test_layers_that_are_numbered_anew_in_each_step_are_not_steps() -> None:
    steps = [span(f"step {i}", 10 * i, 10 * i + 10) for i in range(3)]
    layers = [span(f"layer{j}", 10 * i + j, 10 * i + j + 1) for i in range(3) for j in range(9)]
    assert moments(QUIET, *steps, *layers) == ("annotation step#", [0, 10, 20, 30])


def test_without_numbers_the_outermost_ranges_are_the_steps() -> None:
    steps = [span("train", 10 * i, 10 * i + 9) for i in range(3)]
    layers = [span("layer", 10 * i + j, 10 * i + j + 1) for i in range(3) for j in (1, 3, 5, 7)]
    assert moments(QUIET, *steps, *layers) == ("annotation train", [0, 10, 20, 29])


def test_a_range_that_never_ends_does_not_hide_those_in_it() -> None:
    steps = [span("train", 10 * i + 1, 10 * i + 9) for i in range(3)]
    assert moments(QUIET, span("job", 0, 0)[:1], *steps)[0] == "annotation train"


def test_a_number_may_be_longer_than_any_integer() -> None:
    steps = [span("step " + "9" * 5000, 10 * i, 10 * i + 10) for i in range(3)]
    assert moments(QUIET, *steps)[0] == "annotation step#"


def test_annotations_of_another_device_do_not_count() -> None:
    steps = [span(f"step {i}", 10 * i, 10 * i + 9, device=1) for i in range(3)]
    assert moments(QUIET, *steps) == ("none", [])


def test_annotations_need_times() -> None:
    steps = [span(f"step {i}", 10 * i, 10 * i + 9) for i in range(3)]
    assert moments(QUIET, *steps, has_times=False) == ("none", [])


def test_snapshot_markers_serve_where_there_are_no_annotations() -> None:
    entries = list(QUIET)
    entries[5] = entries[15] = entries[25] = Entry(Action.SNAPSHOT)
    assert moments(entries) == ("snapshot markers", [5, 15, 25])


def test_a_repeating_sequence_of_stacks_is_cut_into_its_repetitions() -> None:
    assert moments(allocations([1, 2, 2, 3, 4] * 6)) == (
        "repeating allocations",
        [5, 10, 15, 20, 25, 30],
    )


def test_a_warm_up_may_differ() -> None:
    name, found = moments(allocations([7, 8, 9, 9, 8, 7, 7, *([1, 2, 3, 4] * 12)]))
    assert name == "repeating allocations"
    assert {later - earlier for earlier, later in pairwise(found)} == {4}


@LAW
@given(st.lists(st.integers(1, 15), min_size=2, max_size=12), st.integers(6, 20))
def test_the_length_of_a_repetition_is_found(sequence: list[int], times: int) -> None:
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


def test_one_stack_over_and_over_is_no_step() -> None:
    assert moments(QUIET) == ("none", [])
    assert moments(allocations([2, *[1] * 40])) == ("none", [])


def test_a_trace_without_allocations_has_no_steps() -> None:
    assert moments([]) == ("none", [])
    assert moments([Entry(Action.SNAPSHOT)]) == ("none", [])
