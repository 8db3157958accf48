"""Work that is not ordered after a launch from a template is found if they may share bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import race_logs
from invocation import Cli
from sanitize.gather_rounds import ROUNDS, gather_rounds, templates_batch

from cudakit.sanitize.conflicts import Conflict, ConflictChecker
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
from cudakit.sanitize.races import Allocation, Coverage
from cudakit.sanitize.shadow import new_shadow
from cudakit.sanitize.templates import TemplateAccesses
from cudakit.sanitize.unrecorded import CheckedShadow, PossibleAccess
from cudakit.trace.events import Access, Accessed, Event, Launch, Template, TemplatePointers
from cudakit.trace.kinds import AccessMode, AllocationKind, EventKind, Precision, TemplateCheck
from cudakit.trace.trace_file import pack

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
