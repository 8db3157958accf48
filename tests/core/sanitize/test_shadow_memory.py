"""Shadow memory: rows, pointers, pools, and bounded memory."""

from __future__ import annotations

import tracemalloc

import pytest
from core.sanitize.trace_scene import (
    DEVICE,
    NON_BLOCKING,
    READ,
    SIZE,
    WRITE,
    Scene,
    address_of,
)

from cudakit.core.sanitize.races import Confidence, RaceKind
from cudakit.core.sanitize.shadow_memory import MAX_RANGE_STATES
from cudakit.trace.events import Access, Copy, Fill
from cudakit.trace.kinds import AllocationKind, AllocationLayer, Precision

COUNT = 100  # number of rows, more than are stored as separate ranges
X = address_of("x")


def column(number: int, mode: int = WRITE, *, count: int = COUNT) -> Access:
    """Return an access to one column of a table with eight columns of four bytes."""
    lo = X + 4 * number
    return Access(lo, lo + 32 * (count - 1) + 4, mode, stride_bytes=32, count=count)


@pytest.mark.parametrize("count", [4, COUNT])
def test_interleaved_columns_do_not_race(count: int) -> None:
    s = Scene()
    assert s.kernel(1, column(0, count=count)) == []
    assert s.kernel(2, column(1, count=count)) == []


@pytest.mark.parametrize("count", [4, COUNT])
def test_same_column_races(count: int) -> None:
    s = Scene()
    s.kernel(1, column(3, count=count))
    (race,) = s.kernel(2, column(3, READ, count=count))
    assert (race.kind, race.confidence) == (RaceKind.READ_AFTER_WRITE, Confidence.CERTAIN)


@pytest.mark.parametrize("count", [4, COUNT])
def test_column_races_with_range_containing_one_of_its_rows(count: int) -> None:
    s = Scene()
    s.kernel(1, column(3, count=count))
    assert s.W(2, X + 16, size=28) == []  # between two rows
    (race,) = s.W(3, X + 72, size=24)
    assert (race.lo, race.hi) == (X + 76, X + 80)


def test_later_column_races_with_earlier_range() -> None:
    s = Scene()
    s.W(1, X + 16, size=28)
    assert s.kernel(2, column(3)) == []
    (race,) = s.kernel(3, column(5))
    assert (race.lo, race.hi) == (X + 20, X + 24)


def test_write_of_all_rows_replaces_their_accesses() -> None:
    s = Scene()
    s.kernel(1, column(3))
    s.record(1, 1)
    s.wait(2, 1)
    s.W(2, X, size=32 * COUNT)
    (race,) = s.R(3, X + 12, size=4)
    assert race.previous.stream == 2


def test_pitched_copies_of_adjacent_columns_do_not_race() -> None:
    s = Scene()
    copy = {"source": 5 << 40, "size_bytes": 4, "rows": COUNT, "destination_pitch_bytes": 32}
    s.call(Copy(1, destination=X, source_pitch_bytes=4, **copy))
    assert s.call(Copy(2, destination=X + 4, source_pitch_bytes=4, **copy)) == []
    races = s.call(Copy(3, destination=X + 2, source_pitch_bytes=4, **copy))
    assert {race.previous.stream for race in races} == {1, 2}


def test_contiguous_rows_are_one_range() -> None:
    s = Scene()
    s.call(Fill(1, X, 64, rows=COUNT, pitch_bytes=64))
    (race,) = s.R(2, X + 100, size=1)
    assert (race.previous.lo, race.previous.hi) == (X, X + 64 * COUNT)


def test_overlapping_ranges_race_in_shared_bytes() -> None:
    s = Scene()
    s.W(1, X, size=100)
    (race,) = s.R(2, X + 60, size=100)
    assert (race.lo, race.hi) == (X + 60, X + 100)
    assert s.R(3, X + 100, size=1) == []


def test_race_across_several_ranges_is_reported_once() -> None:
    s = Scene()
    s.W(1, X, size=100)
    for at in range(0, 100, 10):
        s.R(1, X + at, size=5)
    (race,) = s.W(2, X, size=100)
    assert race.previous.seq == s.seq - 1  # the last read happens after all others


def test_pointer_into_copied_bytes_is_a_likely_race() -> None:
    s = Scene()
    s.copy(1, "x", "y")
    (race,) = s.launch_with_pointers(2, X + 8)
    assert (race.kind, race.confidence) == (RaceKind.READ_AFTER_WRITE, Confidence.LIKELY)
    assert (race.lo, race.hi) == (X + 8, X + SIZE)
    assert race.previous.precision is Precision.EXACT
    assert race.current.precision is Precision.ASSUMED


@pytest.mark.parametrize(
    ("word", "kind"), [("W", RaceKind.WRITE_AFTER_READ), ("R", RaceKind.READ_AFTER_WRITE)]
)
def test_copy_over_pointer_of_earlier_kernel_is_a_likely_race(word: str, kind: RaceKind) -> None:
    s = Scene()
    s.launch_with_pointers(1, X + 8)
    (race,) = getattr(s, word)(2, "x")
    assert (race.kind, race.confidence) == (kind, Confidence.LIKELY)
    assert race.previous.lo == X + 8


def test_pointer_before_the_bytes_is_reported_as_possible_only() -> None:
    for s, races in ((Scene(), 0), (Scene(report_possible=True), 1)):
        assert s.launch_with_pointers(1, X - 8) == []
        found = s.copy(2, "x", "y")
        assert [race.confidence for race in found] == [Confidence.POSSIBLE] * races


def test_later_copy_behind_pointer_is_a_possible_race() -> None:
    s = Scene(report_possible=True)
    s.copy(2, "x", "y")
    (race,) = s.launch_with_pointers(1, X - 8)
    assert race.confidence is Confidence.POSSIBLE
    assert s.launch_with_pointers(3, X - 8, end=X) != []  # the same pointer
    assert (
        s.launch_with_pointers(3, X - 64, end=X) == []
    )  # another pointer, whose allocation ends before the copy


def test_two_kernels_with_the_same_pointer_are_only_counted() -> None:
    s = Scene()
    assert s.launch_with_pointers(1, "x") + s.launch_with_pointers(2, "x") == []
    assert s.engine.coverage.suspected == 1
    s.launch_with_pointers(2, "x")  # the race with the first kernel implies this race
    assert s.engine.coverage.suspected == 1


def test_kernels_that_only_read_a_pointer_do_not_conflict() -> None:
    s = Scene()
    for stream in (1, 2, 3):
        s.kernel(stream, Access(X, X + 4096, READ, Precision.ASSUMED))
    assert s.R(4, "x") == []
    assert s.engine.coverage.suspected == 0
    assert {race.previous.stream for race in s.W(5, "x")} == {1, 2, 3, 4}


def test_ordered_copy_and_pointer_do_not_race() -> None:
    s = Scene()
    s.launch_with_pointers(1, X + 8)
    s.record(1, 1)
    s.wait(2, 1)
    assert s.copy(2, "x", "y") == []
    s.record(2, 2)
    s.wait(1, 2)
    assert s.launch_with_pointers(1, X + 8) == []
    assert s.engine.coverage.suspected == 0


def test_kernel_with_many_pointers_into_a_copy_is_reported_once() -> None:
    s = Scene()
    s.launch_with_pointers(1, *range(X, X + SIZE, 8))
    assert len(s.copy(2, "x", "y")) == 1


@pytest.mark.parametrize(
    ("known", "partly"),
    [(Precision.MERGED, Confidence.POSSIBLE), (Precision.SUMMARY, Confidence.LIKELY)],
)
def test_race_with_merged_ranges_or_whole_tensor_is_certain_only_if_all_bytes_are_accessed(
    known: Precision, partly: Confidence
) -> None:
    for lo, hi, confidence in (
        (X, X + 8, Confidence.CERTAIN),
        (X - 4, X + 12, Confidence.CERTAIN),
        (X, X + 4, partly),
        (X + 4, X + 12, partly),
    ):
        s = Scene(report_possible=True)
        s.kernel(1, Access(X, X + 8, WRITE, known))
        (race,) = s.R(2, lo, size=hi - lo)
        assert race.confidence is confidence


def test_merged_ranges_and_strided_rows_race_only_possibly() -> None:
    s = Scene(report_possible=True)
    s.kernel(1, Access(X, X + 32 * COUNT, WRITE, Precision.MERGED))
    (race,) = s.kernel(2, column(1, READ))
    assert race.confidence is Confidence.POSSIBLE


def test_atomics_race_only_with_other_accesses() -> None:
    s = Scene()
    assert s.A(1, "x") + s.A(2, "x") + s.A(1, "x") == []
    assert len(s.R(3, "x")) == 2
    assert len(s.W(4, "x")) == 3


def test_atomic_races_with_write_and_with_read() -> None:
    s = Scene()
    s.W(1, "x")
    assert len(s.A(2, "x")) == 1
    s.R(1, "y")
    assert len(s.A(2, "y")) == 1


def test_race_implied_by_another_is_not_reported() -> None:
    s = Scene()
    s.W(1, "x")
    assert len(s.R(2, "x")) == 1
    assert s.R(2, "x") == []
    s.record(1, 2)
    s.wait(3, 1)
    assert s.R(3, "x") == []  # ordered after the first reader


def test_race_does_not_hide_races_with_other_streams_or_bytes() -> None:
    s = Scene()
    s.W(1, "x", "y")
    assert len(s.R(2, "x")) == 1
    assert len(s.R(3, "x")) == 1
    assert len(s.R(2, "y")) == 1


def test_pool_free_keeps_accesses_and_reuse_is_named() -> None:
    s = Scene()
    s.alloc("x", size=1 << 20)
    s.alloc("x", layer=AllocationLayer.POOL)
    s.W(1, "x")
    s.free("x", layer=AllocationLayer.POOL)
    s.alloc("x", layer=AllocationLayer.POOL)
    (race,) = s.W(2, "x")
    assert race.kind is RaceKind.REUSE
    assert race.allocation is not None
    assert (race.allocation.address, race.allocation.size_bytes) == (X, SIZE)


def test_race_within_one_pool_block_is_not_named_reuse() -> None:
    s = Scene()
    s.alloc("x", layer=AllocationLayer.POOL)
    s.W(1, "x")
    (race,) = s.W(2, "x")
    assert race.kind is RaceKind.WRITE_AFTER_WRITE


def test_race_names_the_allocation_that_contains_its_bytes() -> None:
    s = Scene()
    s.alloc(X, how=AllocationKind.MANAGED, size=1 << 20)
    s.W(1, X + 64)
    (race,) = s.W(2, X + 64)
    assert race.allocation is not None
    assert (race.allocation.address, race.allocation.how) == (X, AllocationKind.MANAGED)


def test_reallocated_memory_has_no_earlier_accesses() -> None:
    s = Scene()
    s.alloc("x")
    s.W(1, "x")
    s.launch_with_pointers(1, "x")
    s.kernel(1, column(2))
    s.free("x", AllocationKind.VIRTUAL, size=4096)
    s.alloc("x", AllocationKind.VIRTUAL)
    assert s.W(2, "x") == []


def test_repeated_reads_use_constant_memory() -> None:
    s = Scene()
    touched = [Access(DEVICE, DEVICE + SIZE, READ)] * 500
    s.kernel(2, *touched)
    s.kernel(1, *touched)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(10):
        s.kernel(1, *touched)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()

    assert grown < 10_000


PIECES_BYTES = (
    4 * MAX_RANGE_STATES
)  # every other byte: twice the number of range states that are stored


def scene_with_merged_ranges() -> Scene:
    """Return a scene in which stream 1 wrote more pieces of an allocation than the limit."""
    s = Scene(NON_BLOCKING, NON_BLOCKING, report_possible=True)
    s.alloc(DEVICE, size=1 << 20)
    s.kernel(1, *(Access(at, at + 1, WRITE) for at in range(DEVICE, DEVICE + PIECES_BYTES, 2)))
    return s


def test_access_to_a_part_of_a_merged_range_races_only_possibly() -> None:
    (race,) = scene_with_merged_ranges().R(2, DEVICE, size=1)
    assert race.approximate
    assert race.confidence is Confidence.POSSIBLE


def test_access_to_all_of_a_merged_range_races_certainly() -> None:
    (race,) = scene_with_merged_ranges().W(2, DEVICE, size=PIECES_BYTES)
    assert race.confidence is Confidence.CERTAIN


def test_merged_range_is_exact_again_after_write() -> None:
    s = scene_with_merged_ranges()
    s.W(1, DEVICE, size=PIECES_BYTES)
    (race,) = s.R(2, DEVICE, size=1)
    assert not race.approximate
    assert race.confidence is Confidence.CERTAIN


def test_oldest_accesses_outside_allocations_are_removed() -> None:
    s = Scene(NON_BLOCKING, NON_BLOCKING)
    for begin in (DEVICE, DEVICE + PIECES_BYTES):
        pieces = range(begin, begin + PIECES_BYTES, 2)
        s.kernel(1, *(Access(at, at + 1, WRITE) for at in pieces))
    assert s.R(2, DEVICE, size=1) == []
    (race,) = s.R(2, DEVICE + 2 * PIECES_BYTES - 2, size=1)
    assert not race.approximate


def test_uncertain_pointer_is_checked_only_for_possible_races() -> None:
    s = Scene()
    s.launch_with_pointers(1, "x", known=Precision.UNCERTAIN)
    assert s.W(2, "x") == []
    assert s.launch_with_pointers(1, "x", known=Precision.UNCERTAIN) == []
    assert s.engine.coverage.accesses_uncertain == 2

    s = Scene(report_possible=True)
    s.launch_with_pointers(1, "x", known=Precision.UNCERTAIN)
    (race,) = s.W(2, "x")
    assert race.confidence is Confidence.POSSIBLE
