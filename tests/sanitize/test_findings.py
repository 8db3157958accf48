"""Reports: the races of several processes, each once, in the result and its JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from sanitize.sample_races import (
    BASE,
    BLOCKING_STREAM,
    DEFAULT_STREAM,
    MIB,
    STACKS,
    STREAMS,
    demangle,
    exact_operation,
    found_race,
    kernel,
    race,
    report_of,
    result_of,
)

from cudakit.report import json as json_render
from cudakit.sanitize.baseline import parse_pattern
from cudakit.sanitize.findings import RaceCollector, message
from cudakit.sanitize.races import Confidence, Coverage, NamedRange, RaceKind
from cudakit.stacks import Frame

POSSIBLE, CERTAIN = Confidence.POSSIBLE, Confidence.CERTAIN


def test_same_call_sites_are_one_race() -> None:
    second_race = race(
        current=replace(kernel(seq=212), lo=BASE, hi=BASE + MIB, stream=BLOCKING_STREAM),
        previous=replace(exact_operation(seq=207), thread=5),
        last_sync=None,
    )
    (decoded,) = result_of(report_of(race(), second_race, race())).races

    assert decoded.count == 3
    assert (decoded.current.seq, decoded.current.stream_number) == (
        112,
        DEFAULT_STREAM,
    )  # the first occurrence is kept


def test_different_kind_kernel_or_stack_is_another_race() -> None:
    races = (
        race(),
        race(RaceKind.WRITE_AFTER_WRITE),
        race(current=kernel("add")),
        race(current=kernel(site=1)),
        race(previous=exact_operation(site=2)),
    )

    assert [decoded.count for decoded in result_of(report_of(*races, *races)).races] == [2] * 5


def test_same_race_in_two_processes_is_one_race() -> None:
    report = report_of(race())
    reversed_stacks = ((), *reversed(STACKS[1:]))
    last_stack = len(STACKS)
    other_race = race(
        current=kernel(site=last_stack - 2),
        previous=exact_operation(site=last_stack - 1),
        allocation=None,
        last_sync=None,
    )
    report.add(7, [other_race], stacks=reversed_stacks, flag_by_stream=STREAMS)
    result = report.result(
        exit_status=None, coverage={7: Coverage(launches=5), 4242: Coverage(launches=2)}
    )

    (decoded,) = result.races
    assert (decoded.count, decoded.process) == (2, 4242)
    assert [(p.process, p.launches, p.count) for p in result.processes] == [(7, 5, 1), (4242, 2, 1)]
    assert result.coverage.launches == 7


def test_races_are_sorted_by_their_highest_confidence() -> None:
    fill = race(current=kernel("fill"))
    certain_race = replace(race(), confidence=CERTAIN, lo=BASE)
    races = result_of(report_of(fill, race(), certain_race, race())).races

    assert [(decoded.confidence, decoded.count) for decoded in races] == [
        (CERTAIN, 3),
        (Confidence.LIKELY, 1),
    ]
    assert races[0].address == BASE


def test_possible_races_are_counted_by_default() -> None:
    report = RaceCollector()
    possible = race(confidence=POSSIBLE)

    assert report.add(1, [possible, race(), possible], stacks=STACKS, flag_by_stream=STREAMS) == 1
    result = report.result(exit_status=0, coverage={1: Coverage(suspected=5)})
    assert [decoded.count for decoded in result.races] == [1]
    assert result.coverage.suspected == 7


def test_possible_races_are_shown_on_request() -> None:
    report = RaceCollector(min_confidence=POSSIBLE)
    possible = race(confidence=POSSIBLE)

    assert report.add(1, [possible], stacks=STACKS, flag_by_stream=STREAMS) == 1
    assert len(result_of(report).races) == 1


def test_only_certain_races_are_shown_on_request() -> None:
    result = result_of(report_of(race(), report=RaceCollector(min_confidence=CERTAIN)))

    assert (result.races, result.coverage.suspected) == ((), 1)


def test_suppressed_race_is_counted_for_the_first_matching_pattern() -> None:
    patterns = [
        parse_pattern(text) for text in ("kernel:no", "site:loader.py", "kernel:*elementwise*")
    ]
    report = RaceCollector(suppressions=patterns, demangle=demangle)
    races = [race(), race(), race(RaceKind.REUSE)]

    assert report.add(1, races, stacks=STACKS, flag_by_stream=STREAMS) == 0
    result = result_of(report)
    assert result.races == ()
    assert [
        (suppressed.pattern, suppressed.races, suppressed.count) for suppressed in result.suppressed
    ] == [
        ("kernel:no", 0, 0),
        ("site:loader.py", 2, 3),
        ("kernel:*elementwise*", 0, 0),
    ]


def test_gaps_of_all_processes_are_summed_and_sorted_by_frequency() -> None:
    gaps = [{"a": 1, "b": 2}, {"a": 4}]
    result = RaceCollector().result(exit_status=None, coverage={}, gaps=gaps)

    assert list(result.gaps.items()) == [("a", 5), ("b", 2)]


def test_decoder_resolves_names_and_stacks() -> None:
    decoded = found_race()
    later, earlier = decoded.current, decoded.previous

    assert (decoded.address, decoded.size_bytes, decoded.offset_bytes) == (
        BASE + 4 * MIB,
        4 * MIB,
        4 * MIB,
    )
    assert (later.reads, later.writes, later.atomic) == (True, True, False)
    assert (earlier.reads, earlier.writes) == (False, True)
    assert later.kernel == demangle(str(later.mangled)) != later.mangled
    assert (earlier.operation, earlier.kernel, earlier.mangled) == ("copy", None, None)
    assert later.stack[later.site] == Frame("step", "/home/user/train/train.py", 44)
    assert decoded.memory
    assert decoded.memory.stack[decoded.memory.site].name == "buffers"
    assert decoded.last_sync
    assert decoded.last_sync.recorded_stack[decoded.last_sync.recorded_site].line == 30


def test_launch_without_accesses_is_unknown() -> None:
    decoded = found_race(race(current=kernel("", site=0), allocation=None, last_sync=None))

    assert (decoded.memory, decoded.last_sync, decoded.offset_bytes) == (None, None, None)
    assert (decoded.current.stack, decoded.current.operation) == ((), "a kernel without a name")


def test_stack_missing_in_the_table_is_empty() -> None:
    report = RaceCollector()
    report.add(1, [race(current=kernel(site=99))], stacks=STACKS, flag_by_stream={})

    (decoded,) = result_of(report).races
    assert decoded.current.stack == ()
    assert decoded.current.stream == "stream 1"


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 5)), max_size=40))
def test_every_occurrence_is_counted_once(exact_kernel: list[tuple[str, int]]) -> None:
    report = report_of(*(race(current=kernel(name, site=site)) for name, site in exact_kernel))
    races = result_of(report).races

    assert sum(decoded.count for decoded in races) == len(exact_kernel)
    assert len(races) == len(set(exact_kernel))


def test_json_of_a_race(golden: Callable[[str, str], None]) -> None:
    result = result_of(
        report_of(race(), race(), race(RaceKind.REUSE, last_sync=None, allocation=None))
    )

    golden("run-sanitize.json", json_render.render(result))


def test_json_has_the_documented_fields() -> None:
    content = json.loads(json_render.render(result_of(report_of(race()))))
    (decoded,) = content["races"]

    assert content["schema"] == "cudakit.sanitize/1"
    assert {"exit_status", "races", "coverage"} <= content.keys()
    assert {"kind", "confidence", "address", "size_bytes", "count", "hint"} <= decoded.keys()
    for side in (decoded["current"], decoded["previous"]):
        assert {"stream", "operation", "stack"} <= side.keys()


def test_result_of_program_without_cuda() -> None:
    empty = RaceCollector().result(exit_status=None, coverage={})

    assert json.loads(json_render.render(empty))["races"] == []


def test_message_names_innermost_ranges_of_each_side() -> None:
    ranges = tuple(NamedRange(name, "") for name in ("epoch 1", "step 7", "backward", ""))
    decoded = found_race(
        race(
            current=replace(kernel(), ranges=ranges),
            previous=replace(exact_operation(), ranges=ranges[:2]),
        )
    )

    text = message([decoded])

    assert "on the legacy default stream, in range '… / step 7 / backward / unnamed'" in text
    assert ", in range 'epoch 1 / step 7'" in text
    assert decoded.previous.ranges == ranges[:2]
