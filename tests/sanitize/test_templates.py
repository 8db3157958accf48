"""``--accesses auto`` finds the races of ``--accesses exact``, and inserts the accesses of templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import race_logs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from invocation import Cli
from sanitize.brute_force import unordered_accesses, with_graph_rows
from sanitize.gather_rounds import ROUNDS, gather_rounds, templates_batch
from sanitize.random_traces import Step, steps, trace
from sanitize.template_player import apply

from cudakit.sanitize.conflicts import Conflict, ConflictChecker
from cudakit.sanitize.detector import RaceDetector
from cudakit.sanitize.engine import Engine
from cudakit.sanitize.findings import RaceCollector
from cudakit.sanitize.ordering import (
    ALWAYS,
    ATOMIC,
    EXACT,
    READ,
    WRITE,
    Call,
    MemoryAccess,
    Release,
)
from cudakit.sanitize.races import Allocation, Coverage, Race
from cudakit.sanitize.records import reorder_records
from cudakit.sanitize.shadow import new_shadow
from cudakit.sanitize.templates import (
    CheckedShadow,
    PossibleAccess,
    TemplateAccesses,
    _possible_modes,
    _split_at_pointers,
)
from cudakit.trace.events import (
    Access,
    Accessed,
    Event,
    GraphLaunch,
    GraphNode,
    Launch,
    Template,
    TemplatePointers,
)
from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    AllocationLayer,
    EventKind,
    NodeType,
    Precision,
    TemplateCheck,
)
from cudakit.trace.run_log import LogReader
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import RECORD, Records, layout, pack, unpack, view

LOGS = Path(__file__).parents[1] / "sanitize_corpus" / "logs"
PROGRAMS = sorted({path.stem.rpartition("_")[0] for path in LOGS.glob("*_fixed.npz")})
PROGRAM_ROUNDS = 50
WAITS = (
    EventKind.STREAM_WAIT,
    EventKind.EVENT_SYNC,
    EventKind.EVENT_QUERY_OK,
    EventKind.STREAM_SYNC,
    EventKind.STREAM_QUERY_OK,
    EventKind.CONTEXT_SYNC,
)
WORK = (
    *WAITS,
    EventKind.LAUNCH,
    EventKind.COPY,
    EventKind.FILL,
    EventKind.EVENT_RECORD,
    EventKind.HOST_CALL,
    EventKind.GRAPH_LAUNCH,
    EventKind.MEMOP,
)


@cache
def program_log(name: str) -> tuple[Records, list[str]]:
    """Return the records of the first process of a program, in the order of their calls, and its strings."""
    with LogReader(LOGS / f"{name}.npz") as log:
        batches = list(log.batches())
    first = [batch for batch in batches if batch.process == batches[0].process]
    records = np.concatenate([batch.records for batch in first])
    return records[np.argsort(records["seq"], kind="stable")], list(first[-1].strings)


def in_rounds(records: Records, change: Callable[[Records], Records], changed: int) -> Records:
    """Return the trace of a program that repeats its work, and waits for the device after each round.

    ``change`` is applied to the work of one round.
    """
    calls, first = np.unique(records["seq"], return_index=True)
    kinds = dict(zip(calls.tolist(), records["kind"][first].tolist(), strict=True))
    kind_of_call = np.array([kinds[seq] for seq in records["seq"].tolist()])
    is_work = np.isin(kind_of_call, WORK)
    setup = records[~is_work & (kind_of_call != EventKind.FREE)]
    work = records[is_work]
    contexts = np.unique(work["context"]).tolist()
    rounds = []
    for number in range(PROGRAM_ROUNDS):
        round_records = change(work) if number == changed else work
        if number == 0:
            both = np.concatenate([setup, round_records])
            round_records = both[np.argsort(both["seq"], kind="stable")]
        ends = np.zeros(len(contexts), RECORD)
        ends["kind"], ends["context"] = EventKind.CONTEXT_SYNC, contexts
        ends["seq"] = records["seq"].max() + 1 + np.arange(len(contexts))
        rounds.append(np.concatenate([round_records, ends]))
        rounds[-1]["seq"] += np.uint64(number) * (records["seq"].max() + np.uint64(16))
    return np.concatenate(rounds)


def without_waits(work: Records) -> Records:
    return work[~np.isin(work["kind"], WAITS)]


def unchanged(work: Records) -> Records:
    return work


def with_moved_accesses(work: Records) -> Records:
    """Move the accesses of all kernels by 64 bytes: as if their indices had changed."""
    moved = work.copy()
    accesses = moved.view(view(moved[:1], EventKind.ACCESS).dtype)
    is_exact = (moved["kind"] == EventKind.ACCESS) & (accesses["precision"] == Precision.EXACT)
    for name in ("lo", "hi"):
        accesses[name][is_exact] += np.uint64(64)
    return moved


def with_moved_scattered_accesses(work: Records) -> Records:
    """Move the accesses of kernels that are not those of an array at a pointer, as if indices had changed."""
    moved = with_moved_accesses(work)
    accesses = view(work, EventKind.ACCESS)
    is_access = work["kind"] == EventKind.ACCESS
    is_pointer = is_access & (accesses["precision"] >= Precision.ASSUMED)
    pointers = set(
        zip(work["seq"][is_pointer].tolist(), accesses["lo"][is_pointer].tolist(), strict=True)
    )
    is_of_array = [
        (not count or count >= 16) and (seq, lo) in pointers and precision == Precision.EXACT
        for seq, lo, count, precision in zip(
            work["seq"].tolist(),
            accesses["lo"].tolist(),
            accesses["count"].tolist(),
            accesses["precision"].tolist(),
            strict=True,
        )
    ]
    keep = is_access & np.array(is_of_array)
    moved[keep] = work[keep]
    return moved


def analyzed(records: Records, strings: list[str]) -> tuple[list[Race], list[Race]]:
    """Return the races of a trace, and those with possible accesses of launches that were not recorded."""
    in_order, never_read_count = reorder_records(records)
    assert not never_read_count
    engine, templates = Engine(), TemplateAccesses()
    in_order = templates.insert(in_order, engine.coverage)
    assert not templates.unknown_count
    found = engine.feed(in_order, strings, templates.possible_accesses, templates.graph_rows)
    return found, engine.take_unverified()


def races(records: Records, strings: list[str]) -> list[Race]:
    """Return the races of a trace."""
    return analyzed(records, strings)[0]


def racing_calls(found: list[Race]) -> set[tuple[int, int]]:
    """Return the numbers of the two calls of each race."""
    return {(race.current.seq, race.previous.seq) for race in found}


def without_templates(found: list[Race]) -> list[Race]:
    return [
        replace(
            race,
            current=replace(race.current, from_template=False),
            previous=replace(race.previous, from_template=False),
        )
        for race in found
    ]


@given(data=st.data())
def test_strided_access_is_divided_at_pointers(data: st.DataObject) -> None:
    size, count = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    stride = size + data.draw(st.integers(1, 5))
    hi = 100 + (count - 1) * stride + size
    pointers = sorted(data.draw(st.sets(st.integers(101, max(hi - 1, 101)), max_size=5)))
    row = np.zeros(1, RECORD)
    row["kind"] = EventKind.ACCESS
    access = row.view(layout(EventKind.ACCESS))
    access["lo"], access["hi"] = 100, hi
    if count > 1:
        access["stride_bytes"], access["count"] = stride, count
    divided = view(
        _split_at_pointers(row, np.array(pointers, np.uint64)), EventKind.ACCESS
    ).tolist()
    bytes_of_parts = []
    for part in (dict(zip(access.dtype.names, values, strict=True)) for values in divided):
        steps = max(part["count"], 1)
        part_size = part["hi"] - part["lo"] - (steps - 1) * part["stride_bytes"]
        starts = [part["lo"] + i * part["stride_bytes"] for i in range(steps)]
        bytes_of_parts += [start + j for start in starts for j in range(part_size)]
        assert not any(part["lo"] < pointer < part["hi"] for pointer in pointers)
    assert sorted(bytes_of_parts) == [
        100 + i * stride + j for i in range(count) for j in range(size)
    ]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        *((name, 36) for name in PROGRAMS),
        *((name, changed) for name in PROGRAMS[::5] for changed in (0, PROGRAM_ROUNDS - 1)),
    ],
)
def test_missing_wait_in_one_round_gives_the_races_of_exact_accesses(
    name: str, changed: int
) -> None:
    records, strings = program_log(f"{name}_fixed")
    trace = in_rounds(records, without_waits, changed)
    with_templates = apply(trace)
    assert len(with_templates) <= len(trace) + len(np.unique(trace["seq"]))
    assert without_templates(races(with_templates, strings)) == races(trace, strings)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("change", [unchanged, with_moved_accesses])
def test_programs_with_race_have_the_races_of_exact_accesses(
    name: str, change: Callable[[Records], Records]
) -> None:
    records, strings = program_log(f"{name}_race")
    trace = in_rounds(records, change, 36)
    expected = races(trace, strings)
    assert without_templates(races(apply(trace), strings)) == expected


def in_one_allocation(records: Records) -> Records:
    """Return the trace of a program whose memory is one allocation, as with a pool of XLA or RMM."""
    is_driver = np.isin(records["kind"], (EventKind.ALLOC, EventKind.FREE))
    is_driver &= view(records, EventKind.ALLOC)["layer"] == AllocationLayer.DRIVER
    pool = np.zeros(1, RECORD)
    pool["kind"], pool["context"] = EventKind.ALLOC, records["context"][is_driver][:1]
    body = pool.view(layout(EventKind.ALLOC))
    body["address"], body["size_bytes"] = 1 << 12, 1 << 48
    body["layer"], body["allocation_kind"] = AllocationLayer.DRIVER, AllocationKind.SYNC
    return np.concatenate([pool, records[~is_driver]])


@pytest.mark.parametrize("name", PROGRAMS[::3])
@pytest.mark.parametrize(("state", "changed"), [("fixed", 36), ("race", None)])
def test_program_in_one_allocation_has_the_races_of_exact_accesses(
    name: str, state: str, changed: int | None
) -> None:
    records, strings = program_log(f"{name}_{state}")
    change = unchanged if changed is None else without_waits
    trace = in_rounds(in_one_allocation(records), change, changed or 0)
    assert without_templates(races(apply(trace), strings)) == races(trace, strings)


def with_graph_templates(events: Sequence[Event]) -> list[Event]:
    """Return a trace whose graph launches name a template if an earlier launch had the same accesses."""
    template_ids: dict[object, int] = {}
    result: list[Event] = []
    for _, group in groupby(events, key=lambda event: event.seq):
        launch, *accesses = group
        if isinstance(launch.body, GraphLaunch):
            launch_key = launch.body.graph, tuple(event.body for event in accesses)
            if launch_key in template_ids:
                template_id = template_ids[launch_key]
                launch = replace(launch, body=replace(launch.body, template_id=template_id))
                accesses = []
            else:
                template_ids[launch_key] = len(template_ids) + 1
                accesses.append(replace(launch, body=Template(template_ids[launch_key])))
        result += [launch, *accesses]
    return result


def analyzed_in_batches(
    events: Sequence[Event], last_calls: Sequence[int], *, native: bool
) -> tuple[list[Race], Coverage]:
    """Return the races and the coverage of a trace, analyzed in batches that end with these calls."""
    engine, templates, strings = Engine(native=native), TemplateAccesses(), {"": 0}
    records = pack(events, lambda text: strings.setdefault(text, len(strings)))
    ends = sorted({int((records["seq"] <= call).sum()) for call in last_calls})
    found: list[Race] = []
    for batch in np.split(records, ends):
        in_order = templates.insert(batch, engine.coverage)
        graph_rows = templates.graph_rows
        found += engine.feed(in_order, list(strings), templates.possible_accesses, graph_rows)
    assert not templates.unknown_count
    return found, engine.coverage


@pytest.mark.parametrize("native", [False, True])
@settings(max_examples=100, deadline=None)
@given(steps=steps(), last_calls=st.lists(st.integers(1, 60), max_size=4))
@example(steps=[("graph", 0, 1, 2), *[("repeat", n, 0, 0) for n in (4, 5, 4)]], last_calls=[])
def test_graph_launches_with_templates_have_the_races_of_recorded_ones(
    steps: list[Step], last_calls: list[int], native: bool
) -> None:
    events = trace(steps)
    expected, expected_coverage = analyzed_in_batches(events, [], native=native)

    found, coverage = analyzed_in_batches(with_graph_templates(events), last_calls, native=native)

    assert without_templates(found) == expected
    assert replace(coverage, launches_from_template=0) == expected_coverage


@settings(max_examples=100, deadline=None)
@given(steps())
def test_brute_force_finds_the_same_pairs_with_templates_of_graph_launches(
    steps: list[Step],
) -> None:
    events, templates, strings = trace(steps), TemplateAccesses(), {"": 0}
    with_templates = with_graph_templates(events)
    records = pack(with_templates, lambda text: strings.setdefault(text, len(strings)))
    records = templates.insert(records, Coverage())
    unpacked = unpack(with_graph_rows(records, templates.graph_rows), list(strings))

    found, expected = unordered_accesses(unpacked), unordered_accesses(events)

    assert [(a.number, b.number) for a, b in found.pairs] == [
        (a.number, b.number) for a, b in expected.pairs
    ]
    assert found.uncertainties == expected.uncertainties


def test_pointers_of_changed_nodes_are_those_of_the_last_change() -> None:
    templates, assumed = TemplateAccesses(), Precision.ASSUMED
    for node, addresses in ((1, (8, 16)), (2, (24,)), (1, (32,)), (3, ())):
        pointers = [Access(a, a + 8, AccessMode.READ, assumed, node=node) for a in addresses]
        bodies = (
            GraphNode(5, node, NodeType.LAUNCH),
            *pointers,
            Access(0, 8, AccessMode.READ, node=node),
        )
        events = [Event(body, seq=node) for body in bodies]
        templates.insert(pack(events, lambda _: 0), Coverage())
    assert templates._node_pointers == {5: {1: [32], 2: [24]}}


@pytest.mark.parametrize("name", PROGRAMS)
def test_missing_wait_and_changed_indices_give_a_race_or_a_warning(name: str) -> None:
    records, strings = program_log(f"{name}_fixed")
    trace = in_rounds(records, lambda work: with_moved_scattered_accesses(without_waits(work)), 36)
    found, unverified = analyzed(apply(trace), strings)
    assert racing_calls(found) == racing_calls(races(trace, strings)) or unverified


def test_most_launches_of_a_repeated_program_have_templates() -> None:
    records, _ = program_log("torch_matmul_result_fixed")
    coverage = Coverage()
    in_order, _ = reorder_records(apply(in_rounds(records, unchanged, 0)))
    TemplateAccesses().insert(in_order, coverage)
    assert coverage.launches_from_template > 0.5 * np.count_nonzero(
        in_order["kind"] == EventKind.LAUNCH
    )
    assert coverage.template_checks > 0
    assert coverage.template_differences == 0


def test_launch_with_forgotten_template_counts_as_gap() -> None:
    records, _ = program_log("torch_matmul_result_fixed")
    in_order, _ = reorder_records(apply(in_rounds(records, unchanged, 0)))
    is_use = in_order["kind"] == EventKind.LAUNCH
    is_use[is_use] = view(in_order[is_use], EventKind.LAUNCH)["template_id"] != 0
    first_use = int(np.flatnonzero(is_use)[0])
    forget = in_order[first_use : first_use + 1].copy()
    forget["kind"], forget["seq"] = EventKind.TEMPLATE, in_order["seq"][first_use - 1]
    forget["body"] = np.zeros(1, forget["body"].dtype)
    templates = TemplateAccesses()
    templates.insert(np.insert(in_order, first_use, forget), Coverage())
    assert templates.unknown_count > 0


@pytest.mark.parametrize("strict_threads", [False, True])
def test_log_with_templates_is_incomplete_for_separate_host_threads(strict_threads: bool) -> None:
    """The recorder left launches out by the order of joined threads, in which more work is ordered."""
    records, strings = program_log("torch_matmul_result_fixed")
    trace = apply(in_rounds(records, unchanged, 0))
    detector, report = RaceDetector(strict_threads=strict_threads), RaceCollector()
    detector.feed(Batch(1, trace, strings, [()]), report)
    detector.finish(report)
    incomplete = detector.result(report).incomplete
    assert any("--host-threads strict" in sentence for sentence in incomplete) is strict_threads


@pytest.mark.parametrize(
    ("count", "offset", "is_of_array"),
    [(16, 0, True), (15, 0, False), (16, 4, False), (0, 0, True)],
)
def test_accesses_at_equal_distances_from_a_pointer_are_those_of_an_array(
    count: int, offset: int, is_of_array: bool
) -> None:
    pointer = 0x1000
    rows = np.zeros(2, RECORD)
    rows["kind"] = EventKind.ACCESS
    accesses = rows.view(layout(EventKind.ACCESS))
    accesses["lo"], accesses["mode"] = pointer + offset, (AccessMode.READ, AccessMode.WRITE)
    accesses["hi"] = pointer + offset + 8 * max(count - 1, 0) + 4
    accesses["count"], accesses["stride_bytes"] = count, 8 if count else 0
    possible_modes = list(
        _possible_modes(rows, np.zeros(2, np.intp), np.array([pointer], np.uint64))
    )
    assert possible_modes == ([] if is_of_array else [(0, AccessMode.READ | AccessMode.WRITE)])


# --- Work that is not ordered after a launch from a template is found if they may share bytes ------

BEGIN, SIZE = 0x10000, 0x8000
ALLOCATION = Allocation(BEGIN, SIZE, AllocationKind.SYNC, 0, 1)
LAUNCH_SLOT, OTHER_SLOT = 1, 2


def call(seq: int) -> Call:
    return Call(seq, EventKind.LAUNCH, name=0, stream=1, context=1, device=0, thread=1, site=seq)


def allocation_at(address: int) -> Allocation | None:
    return ALLOCATION if BEGIN <= address < BEGIN + SIZE else None


def new_checked_shadow(conflicts: list[Conflict]) -> CheckedShadow:
    stored = new_shadow(ConflictChecker(conflicts.append))
    return CheckedShadow(stored, conflicts.append)


def position(tick: int) -> Release:
    return Release(LAUNCH_SLOT, tick, [0, 0, 0], [])


def conflicts(
    possible: PossibleAccess, access: tuple[int, int, int], *, seen_tick: int = 0, tick: int = 5
) -> list[Conflict]:
    """Return the conflicts of an access with a launch at ``tick``.

    The stream of the access is ordered after the work of the launch's stream up to ``seen_tick``.
    """
    found: list[Conflict] = []
    shadow = new_checked_shadow(found)
    shadow.add_unrecorded(call(1), position(tick), [possible], allocation_at)
    lo, hi, mode = access
    later = MemoryAccess(OTHER_SLOT, 9, call(2), lo, hi, mode, EXACT)
    shadow.add(later, [0, seen_tick, ALWAYS])
    return found


@pytest.mark.parametrize(
    ("mode", "later_mode", "count"),
    [
        (READ, READ, 0),
        (READ, WRITE, 1),
        (WRITE, READ, 1),
        (WRITE | ATOMIC, READ | WRITE | ATOMIC, 0),
        (WRITE | ATOMIC, READ, 1),
    ],
)
def test_unordered_access_to_same_allocation_conflicts_unless_both_read_or_are_atomic(
    mode: int, later_mode: int, count: int
) -> None:
    possible = PossibleAccess(BEGIN + 64, mode)
    assert len(conflicts(possible, (BEGIN + 4096, BEGIN + 8192, later_mode))) == count


@pytest.mark.parametrize(
    ("lo", "hi"),
    [(BEGIN, BEGIN + 64), (BEGIN + SIZE, BEGIN + SIZE + 64), (BEGIN - 64, BEGIN)],
)
def test_access_below_pointer_or_outside_of_allocation_does_not_conflict(lo: int, hi: int) -> None:
    assert conflicts(PossibleAccess(BEGIN + 64, WRITE), (lo, hi, WRITE)) == []


def test_access_ordered_after_launch_does_not_conflict() -> None:
    access = BEGIN, BEGIN + 64, WRITE
    assert conflicts(PossibleAccess(BEGIN, WRITE), access, seen_tick=5) == []
    assert len(conflicts(PossibleAccess(BEGIN, WRITE), access, seen_tick=4)) == 1


def test_freed_and_ordered_launches_are_forgotten() -> None:
    found: list[Conflict] = []
    shadow = new_checked_shadow(found)
    for tick in range(1, 101):
        possible = [PossibleAccess(BEGIN + tick * 8, READ)]
        shadow.add_unrecorded(call(tick), position(tick), possible, allocation_at)
    shadow.prune([0, 40, 0])
    assert shadow.possible_count == 60
    shadow.clear(BEGIN, BEGIN + SIZE)
    assert shadow.possible_count == 0


def template_launch(*accesses: Access) -> dict[int, list[PossibleAccess]]:
    """Return the possible accesses of a second launch. Its template is that of the first one."""
    pointers = BEGIN, BEGIN + 0x1000
    assumed = [
        Access(lo=p, hi=BEGIN + SIZE, mode=AccessMode(3), precision=Precision.ASSUMED)
        for p in pointers
    ]
    bodies = [
        Launch(1, "kernel"),
        *assumed,
        *accesses,
        Template(template_id=1, check=TemplateCheck.NONE),
        TemplatePointers(pointers=(*pointers, 0, 0, 0, 0, 0)),
        Accessed(exact=True),
    ]
    first = [Event(body, seq=1, context=1) for body in bodies]
    second = Event(seq=2, context=1, body=Launch(1, "kernel", template_id=1))
    templates = TemplateAccesses()
    templates.insert(pack([*first, second], lambda _: 0), Coverage())
    return templates.possible_accesses


def exact(lo: int, hi: int, mode: int = READ, stride: int = 0, count: int = 0) -> Access:
    return Access(
        lo=lo,
        hi=hi,
        mode=AccessMode(mode),
        precision=Precision.EXACT,
        stride_bytes=stride,
        count=count,
    )


def test_contiguous_accesses_from_the_pointers_on_leave_no_possible_access() -> None:
    first, second = BEGIN, BEGIN + 0x1000
    accesses = (
        exact(first, first + 512),
        exact(first + 256, first + 1024, WRITE),
        exact(second, second + 4, WRITE),
    )
    assert template_launch(*accesses) == {}


def test_strided_accesses_from_the_pointers_on_leave_no_possible_access() -> None:
    assert template_launch(exact(BEGIN, BEGIN + 0x104, READ, 16, 17)) == {}


@pytest.mark.parametrize(
    "scattered",
    [
        exact(BEGIN + 64, BEGIN + 128),
        exact(BEGIN, BEGIN + 14 * 16 + 4, READ, 16, 15),
        exact(BEGIN + 4, BEGIN + 0x108, READ, 16, 17),
    ],
)
def test_scattered_accesses_through_a_pointer_are_possible_elsewhere(scattered: Access) -> None:
    second = BEGIN + 0x1000
    possible = template_launch(scattered, exact(second, second + 64, WRITE))
    assert possible == {2: [PossibleAccess(BEGIN, READ)]}


def test_unused_pointer_leaves_no_possible_access() -> None:
    assert template_launch(exact(BEGIN, BEGIN + 64)) == {}


def test_random_accesses_conflict_as_brute_force_says() -> None:
    generator = np.random.default_rng(0)
    for _ in range(500):
        pointer, lo = (BEGIN + int(generator.integers(0, 512)) for _ in range(2))
        hi = lo + int(generator.integers(1, 64))
        mode, later_mode = (int(generator.choice([READ, WRITE])) for _ in range(2))
        seen_tick = int(generator.integers(0, 10))
        expected = hi > pointer and WRITE in (mode, later_mode) and seen_tick < 5
        found = conflicts(PossibleAccess(pointer, mode), (lo, hi, later_mode), seen_tick=seen_tick)
        assert bool(found) == expected


@pytest.mark.parametrize("changed_round", [0, 36, ROUNDS - 1])
@pytest.mark.parametrize("with_other_index", [False, True])
@pytest.mark.parametrize("without_wait", [False, True])
def test_changed_index_and_missing_wait_are_never_silent(
    changed_round: int, with_other_index: bool, without_wait: bool
) -> None:
    records = gather_rounds(
        changed_round=changed_round, without_wait=without_wait, with_other_index=with_other_index
    )
    exact_result = race_logs.analyze([replace(templates_batch(records), records=records)])
    result = race_logs.analyze([templates_batch(records)])

    has_race = without_wait and with_other_index
    assert len(exact_result.races) == has_race
    assert exact_result.unverified == ()
    assert len(result.races) + len(result.unverified) >= has_race
    if not without_wait:
        assert not result.races
        assert not result.unverified


@pytest.mark.parametrize("changed_round", [0, 36, ROUNDS - 1])
def test_changed_index_of_streams_that_never_wait_is_never_silent(changed_round: int) -> None:
    records = gather_rounds(
        changed_round=changed_round, without_wait=False, with_other_index=True, has_waits=False
    )
    exact_result = race_logs.analyze([replace(templates_batch(records), records=records)])
    result = race_logs.analyze([templates_batch(records)])

    assert len(exact_result.races) == 1
    assert len(result.races) + len(result.unverified) >= 1


def test_streams_that_never_wait_and_use_other_rows_have_no_race() -> None:
    records = gather_rounds(
        changed_round=0, without_wait=False, with_other_index=False, has_waits=False
    )
    result = race_logs.analyze([templates_batch(records)])
    assert not result.races


def test_unverified_launch_is_a_finding_with_advice(
    cli: Cli, golden: Callable[[str, str], None], tmp_path: Path
) -> None:
    records = gather_rounds(changed_round=36, without_wait=True, with_other_index=True)
    race_logs.save(tmp_path / "run.log", [templates_batch(records)])

    report = cli("sanitize", tmp_path / "run.log", "--json")
    text = cli("sanitize", tmp_path / "run.log")

    assert report.exit_code == text.exit_code == 1
    (pair,) = json.loads(report.stdout)["unverified"]
    assert pair["previous"]["kernel"] == "gather"
    assert pair["previous"]["from_template"]
    assert pair["current"]["kernel"] == "scale"
    golden("run-sanitize-unverified.txt", text.stdout)


def test_suppressed_unverified_launch_is_no_finding(cli: Cli, tmp_path: Path) -> None:
    records = gather_rounds(changed_round=36, without_wait=True, with_other_index=True)
    race_logs.save(tmp_path / "run.log", [templates_batch(records)])
    assert cli("sanitize", tmp_path / "run.log", "--suppress", "kernel:gather").exit_code == 0
