"""Shadow memory: rows, pointers, pools, and bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sanitize.trace_scene import DEVICE, NON_BLOCKING, READ, SIZE, WRITE, Scene, address_of

from cudakit.sanitize.races import Confidence, RaceKind
from cudakit.sanitize.shadow import StridedRange, StridedStates, strided_range
from cudakit.trace.events import Access, Copy, Fill
from cudakit.trace.kinds import AllocationKind, AllocationLayer, Precision

COUNT = 100  # number of rows, more than are stored as separate ranges
X = address_of("x")


NewScene: TypeAlias = Callable[..., Scene]


@pytest.fixture(params=["compiled", "python"])
def new_scene(request: pytest.FixtureRequest) -> NewScene:
    """Return a function that creates a scene, for each implementation of shadow memory."""
    if request.param == "compiled":
        pytest.importorskip("cudakit.sanitize._shadow_memory")
    return partial(Scene, native=request.param == "compiled")


def column(number: int, mode: int = WRITE, *, count: int = COUNT) -> Access:
    """Return an access to one column of a table with eight columns of four bytes."""
    lo = X + 4 * number
    return Access(lo, lo + 32 * (count - 1) + 4, mode, stride_bytes=32, count=count)


@pytest.mark.parametrize("count", [4, COUNT])
def test_interleaved_columns_do_not_race(new_scene: NewScene, count: int) -> None:
    scene = new_scene()
    assert scene.kernel(1, column(0, count=count)) == []
    assert scene.kernel(2, column(1, count=count)) == []


@pytest.mark.parametrize("count", [4, COUNT])
def test_same_column_races(new_scene: NewScene, count: int) -> None:
    scene = new_scene()
    scene.kernel(1, column(3, count=count))
    (race,) = scene.kernel(2, column(3, READ, count=count))
    assert (race.kind, race.confidence) == (RaceKind.READ_AFTER_WRITE, Confidence.CERTAIN)


def test_strided_access_has_its_number_of_bytes(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.kernel(1, column(3))
    (race,) = scene.kernel(2, column(3, READ))
    assert race.current.accessed_bytes == race.previous.accessed_bytes == 4 * COUNT
    (race,) = scene.write(3, X, size=32)
    assert (race.current.accessed_bytes, race.previous.accessed_bytes) == (0, 4 * COUNT)


@pytest.mark.parametrize("count", [4, COUNT])
def test_column_races_with_range_containing_one_of_its_rows(
    new_scene: NewScene, count: int
) -> None:
    scene = new_scene()
    scene.kernel(1, column(3, count=count))
    assert scene.write(2, X + 16, size=28) == []  # these bytes are between two rows
    (race,) = scene.write(3, X + 72, size=24)
    assert (race.lo, race.hi) == (X + 76, X + 80)


def test_later_column_races_with_earlier_range(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.write(1, X + 16, size=28)
    assert scene.kernel(2, column(3)) == []
    (race,) = scene.kernel(3, column(5))
    assert (race.lo, race.hi) == (X + 20, X + 24)


def test_write_of_all_rows_replaces_their_accesses(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.kernel(1, column(3))
    scene.record(1, 1)
    scene.wait(2, 1)
    scene.write(2, X, size=32 * COUNT)
    (race,) = scene.read(3, X + 12, size=4)
    assert race.previous.stream == 2


def test_pitched_copies_of_adjacent_columns_do_not_race(new_scene: NewScene) -> None:
    scene = new_scene()
    copy = {"source": 5 << 40, "size_bytes": 4, "rows": COUNT, "destination_pitch_bytes": 32}
    scene.call(Copy(1, destination=X, source_pitch_bytes=4, **copy))
    assert scene.call(Copy(2, destination=X + 4, source_pitch_bytes=4, **copy)) == []
    races = scene.call(Copy(3, destination=X + 2, source_pitch_bytes=4, **copy))
    assert {race.previous.stream for race in races} == {1, 2}


def test_contiguous_rows_are_one_range(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.call(Fill(1, X, 64, rows=COUNT, pitch_bytes=64))
    (race,) = scene.read(2, X + 100, size=1)
    assert (race.previous.lo, race.previous.hi) == (X, X + 64 * COUNT)


def test_overlapping_ranges_race_in_shared_bytes(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.write(1, X, size=100)
    (race,) = scene.read(2, X + 60, size=100)
    assert (race.lo, race.hi) == (X + 60, X + 100)
    assert scene.read(3, X + 100, size=1) == []


def test_race_across_several_ranges_is_reported_once(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.write(1, X, size=100)
    for address in range(0, 100, 10):
        scene.read(1, X + address, size=5)
    (race,) = scene.write(2, X, size=100)
    assert race.previous.seq == scene.seq - 1  # the last read happens after all others


def test_pointer_into_copied_bytes_is_a_likely_race(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.copy(1, "x", "y")
    (race,) = scene.launch_with_pointers(2, X + 8)
    assert (race.kind, race.confidence) == (RaceKind.READ_AFTER_WRITE, Confidence.LIKELY)
    assert (race.lo, race.hi) == (X + 8, X + SIZE)
    assert race.previous.precision is Precision.EXACT
    assert race.current.precision is Precision.ASSUMED


@pytest.mark.parametrize(
    ("access", "kind"), [("write", RaceKind.WRITE_AFTER_READ), ("read", RaceKind.READ_AFTER_WRITE)]
)
def test_copy_over_pointer_of_earlier_kernel_is_a_likely_race(
    new_scene: NewScene, access: str, kind: RaceKind
) -> None:
    scene = new_scene()
    scene.launch_with_pointers(1, X + 8)
    (race,) = getattr(scene, access)(2, "x")
    assert (race.kind, race.confidence) == (kind, Confidence.LIKELY)
    assert race.previous.lo == X + 8


def test_pointer_before_the_bytes_is_reported_as_possible_only(new_scene: NewScene) -> None:
    for scene, races in ((new_scene(), 0), (new_scene(report_possible=True), 1)):
        assert scene.launch_with_pointers(1, X - 8) == []
        possible_races = scene.copy(2, "x", "y")
        assert [race.confidence for race in possible_races] == [Confidence.POSSIBLE] * races


def test_later_copy_behind_pointer_is_a_possible_race(new_scene: NewScene) -> None:
    scene = new_scene(report_possible=True)
    scene.copy(2, "x", "y")
    (race,) = scene.launch_with_pointers(1, X - 8)
    assert race.confidence is Confidence.POSSIBLE
    assert scene.launch_with_pointers(3, X - 8, end=X) != []  # this is the same pointer
    assert (
        scene.launch_with_pointers(3, X - 64, end=X) == []
    )  # another pointer, whose allocation ends before the copy


def test_two_kernels_with_the_same_pointer_are_only_counted(new_scene: NewScene) -> None:
    scene = new_scene()
    assert scene.launch_with_pointers(1, "x") + scene.launch_with_pointers(2, "x") == []
    assert scene.engine.coverage.suspected == 1
    scene.launch_with_pointers(2, "x")  # the race with the first kernel implies this race
    assert scene.engine.coverage.suspected == 1


def test_kernels_that_only_read_a_pointer_do_not_conflict(new_scene: NewScene) -> None:
    scene = new_scene()
    for stream in (1, 2, 3):
        scene.kernel(stream, Access(X, X + 4096, READ, Precision.ASSUMED))
    assert scene.read(4, "x") == []
    assert scene.engine.coverage.suspected == 0
    assert {race.previous.stream for race in scene.write(5, "x")} == {1, 2, 3, 4}


def test_ordered_copy_and_pointer_do_not_race(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.launch_with_pointers(1, X + 8)
    scene.record(1, 1)
    scene.wait(2, 1)
    assert scene.copy(2, "x", "y") == []
    scene.record(2, 2)
    scene.wait(1, 2)
    assert scene.launch_with_pointers(1, X + 8) == []
    assert scene.engine.coverage.suspected == 0


def test_kernel_with_many_pointers_into_a_copy_is_reported_once(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.launch_with_pointers(1, *range(X, X + SIZE, 8))
    assert len(scene.copy(2, "x", "y")) == 1


@pytest.mark.parametrize(
    ("precision", "partial_confidence"),
    [(Precision.MERGED, Confidence.POSSIBLE), (Precision.SUMMARY, Confidence.LIKELY)],
)
def test_race_with_merged_ranges_or_whole_tensor_is_certain_only_if_all_bytes_are_accessed(
    new_scene: NewScene, precision: Precision, partial_confidence: Confidence
) -> None:
    for lo, hi, confidence in (
        (X, X + 8, Confidence.CERTAIN),
        (X - 4, X + 12, Confidence.CERTAIN),
        (X, X + 4, partial_confidence),
        (X + 4, X + 12, partial_confidence),
    ):
        scene = new_scene(report_possible=True)
        scene.kernel(1, Access(X, X + 8, WRITE, precision))
        (race,) = scene.read(2, lo, size=hi - lo)
        assert race.confidence is confidence


def test_merged_ranges_and_strided_rows_race_only_possibly(new_scene: NewScene) -> None:
    scene = new_scene(report_possible=True)
    scene.kernel(1, Access(X, X + 32 * COUNT, WRITE, Precision.MERGED))
    (race,) = scene.kernel(2, column(1, READ))
    assert race.confidence is Confidence.POSSIBLE


def test_atomics_race_only_with_other_accesses(new_scene: NewScene) -> None:
    scene = new_scene()
    assert scene.atomic(1, "x") + scene.atomic(2, "x") + scene.atomic(1, "x") == []
    assert len(scene.read(3, "x")) == 2
    assert len(scene.write(4, "x")) == 3


def test_atomic_races_with_write_and_with_read(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.write(1, "x")
    assert len(scene.atomic(2, "x")) == 1
    scene.read(1, "y")
    assert len(scene.atomic(2, "y")) == 1


def test_race_implied_by_another_is_not_reported(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.write(1, "x")
    assert len(scene.read(2, "x")) == 1
    assert scene.read(2, "x") == []
    scene.record(1, 2)
    scene.wait(3, 1)
    assert scene.read(3, "x") == []  # this read is ordered after the first one


def test_race_does_not_hide_races_with_other_streams_or_bytes(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.write(1, "x", "y")
    assert len(scene.read(2, "x")) == 1
    assert len(scene.read(3, "x")) == 1
    assert len(scene.read(2, "y")) == 1


def test_pool_free_keeps_accesses_and_reuse_is_named(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.alloc("x", size=1 << 20)
    scene.alloc("x", layer=AllocationLayer.POOL)
    scene.write(1, "x")
    scene.free("x", layer=AllocationLayer.POOL)
    scene.alloc("x", layer=AllocationLayer.POOL)
    (race,) = scene.write(2, "x")
    assert race.kind is RaceKind.REUSE
    assert race.allocation is not None
    assert (race.allocation.address, race.allocation.size_bytes) == (X, SIZE)


def test_race_within_one_pool_block_is_not_named_reuse(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.alloc("x", layer=AllocationLayer.POOL)
    scene.write(1, "x")
    (race,) = scene.write(2, "x")
    assert race.kind is RaceKind.WRITE_AFTER_WRITE


def test_race_names_the_allocation_that_contains_its_bytes(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.alloc(X, kind=AllocationKind.MANAGED, size=1 << 20)
    scene.write(1, X + 64)
    (race,) = scene.write(2, X + 64)
    assert race.allocation is not None
    assert (race.allocation.address, race.allocation.kind) == (X, AllocationKind.MANAGED)


def test_reallocated_memory_has_no_earlier_accesses(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.alloc("x")
    scene.write(1, "x")
    scene.launch_with_pointers(1, "x")
    scene.kernel(1, column(2))
    scene.free("x", AllocationKind.VIRTUAL, size=4096)
    scene.alloc("x", AllocationKind.VIRTUAL)
    assert scene.write(2, "x") == []


def test_repeated_reads_use_constant_memory(new_scene: NewScene) -> None:
    scene = new_scene()
    accesses = [Access(DEVICE, DEVICE + SIZE, READ)] * 500
    scene.kernel(2, *accesses)
    scene.kernel(1, *accesses)
    tracemalloc.start()
    memory_before = tracemalloc.get_traced_memory()[0]
    for _ in range(10):
        scene.kernel(1, *accesses)
    grown = tracemalloc.get_traced_memory()[0] - memory_before
    tracemalloc.stop()

    assert grown < 10_000


MAX_RANGES = 1 << 12
PIECES_BYTES = 4 * MAX_RANGES  # every other byte: twice the number of range states that are stored


def scene_with_merged_ranges(new_scene: NewScene) -> Scene:
    """Return a scene in which stream 1 wrote more pieces of an allocation than the limit."""
    scene = new_scene(NON_BLOCKING, NON_BLOCKING, report_possible=True, max_range_states=MAX_RANGES)
    scene.alloc(DEVICE, size=1 << 20)
    scene.kernel(
        1,
        *(
            Access(address, address + 1, WRITE)
            for address in range(DEVICE, DEVICE + PIECES_BYTES, 2)
        ),
    )
    return scene


def test_access_to_a_part_of_a_merged_range_races_only_possibly(new_scene: NewScene) -> None:
    (race,) = scene_with_merged_ranges(new_scene).read(2, DEVICE, size=1)
    assert race.is_approximate
    assert race.confidence is Confidence.POSSIBLE


def test_access_to_all_of_a_merged_range_races_certainly(new_scene: NewScene) -> None:
    (race,) = scene_with_merged_ranges(new_scene).write(2, DEVICE, size=PIECES_BYTES)
    assert race.confidence is Confidence.CERTAIN


def test_merged_range_is_exact_again_after_write(new_scene: NewScene) -> None:
    scene = scene_with_merged_ranges(new_scene)
    scene.write(1, DEVICE, size=PIECES_BYTES)
    (race,) = scene.read(2, DEVICE, size=1)
    assert not race.is_approximate
    assert race.confidence is Confidence.CERTAIN


def test_oldest_accesses_outside_allocations_are_removed(new_scene: NewScene) -> None:
    scene = new_scene(NON_BLOCKING, NON_BLOCKING, max_range_states=MAX_RANGES)
    for begin in (DEVICE, DEVICE + PIECES_BYTES):
        addresses = range(begin, begin + PIECES_BYTES, 2)
        scene.kernel(1, *(Access(address, address + 1, WRITE) for address in addresses))
    assert scene.read(2, DEVICE, size=1) == []
    (race,) = scene.read(2, DEVICE + 2 * PIECES_BYTES - 2, size=1)
    assert not race.is_approximate


def test_uncertain_pointer_is_checked_only_for_possible_races(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.launch_with_pointers(1, "x", precision=Precision.UNCERTAIN)
    assert scene.write(2, "x") == []
    assert scene.launch_with_pointers(1, "x", precision=Precision.UNCERTAIN) == []
    assert scene.engine.coverage.accesses_uncertain == 2

    scene = new_scene(report_possible=True)
    scene.launch_with_pointers(1, "x", precision=Precision.UNCERTAIN)
    (race,) = scene.write(2, "x")
    assert race.confidence is Confidence.POSSIBLE


@st.composite
def rows(draw: st.DrawFn) -> StridedRange:
    width = draw(st.integers(1, 5))
    return StridedRange(
        lo=draw(st.integers(0, 40)),
        row_bytes=width,
        stride=width + draw(st.integers(0, 6)),
        row_count=draw(st.integers(1, 8)),
    )


def bytes_of(strided: StridedRange) -> set[int]:
    return {byte for lo, hi in strided.row_ranges() for byte in range(lo, hi)}


@given(rows(), rows())
def test_overlap_of_strided_ranges_agrees_with_byte_sets(
    strided: StridedRange, other_strided: StridedRange
) -> None:
    common_bytes = bytes_of(strided) & bytes_of(other_strided)
    common_range = strided.overlap_with(other_strided)

    assert (common_range is not None) == bool(common_bytes)
    if common_range:
        assert set(range(*common_range)) <= common_bytes


@given(rows(), st.integers(0, 120), st.integers(1, 30))
def test_overlap_with_bounds_agrees_with_byte_sets(
    strided: StridedRange, lo: int, size: int
) -> None:
    common_bytes = bytes_of(strided) & set(range(lo, lo + size))
    common_range = strided.overlap_with_bounds(lo, lo + size)

    assert (common_range is not None) == bool(common_bytes)
    if common_range:
        assert common_range[0] == min(common_bytes)
        assert set(range(*common_range)) <= common_bytes


@given(rows())
def test_rows_of_negative_stride_equal_rows_of_positive_stride(strided: StridedRange) -> None:
    for stride in (strided.stride, -strided.stride):
        assert bytes_of(
            strided_range(strided.lo, strided.hi, stride, strided.row_count)
        ) == bytes_of(strided)


def test_adjacent_rows_are_one_range() -> None:
    assert strided_range(100, 164, 16, 4) == StridedRange(100, 64, 64, 1)


def test_many_rows_with_different_strides_are_compared() -> None:
    columns = StridedRange(lo=0, row_bytes=4, stride=1 << 12, row_count=100_000)
    other_range = StridedRange(lo=4, row_bytes=4, stride=(1 << 12) + 4, row_count=100_000)

    assert columns.overlap_with(other_range) == (4096 * 1024, 4096 * 1024 + 4)
    assert (
        columns.overlap_with(StridedRange(lo=4, row_bytes=4, stride=1 << 12, row_count=100_000))
        is None
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "clear", "find"]),
            st.integers(0, 4000),
            st.integers(1, 3000),
            st.integers(2, 40),
        ),
        max_size=60,
    )
)
def test_states_by_address_agree_with_search_of_all_ranges(
    actions: list[tuple[str, int, int, int]],
) -> None:
    states, reference = StridedStates(), dict[StridedRange, object]()
    for action, lo, size, count in actions:
        if action == "store":
            strided = StridedRange(lo, 2, 2 + size // count, count)
            state = states.get_or_create(strided)
            assert reference.setdefault(strided, state) is state
        elif action == "clear":
            states.clear(lo, lo + size)
            for strided in [r for r in reference if lo <= r.lo and r.hi <= lo + size]:
                del reference[strided]
        expected = [
            (state, common_range)
            for strided, state in reference.items()
            if (common_range := strided.overlap_with_bounds(lo, lo + size))
        ]
        assert list(states.find_overlapping(lo, lo + size)) == expected
        assert list(states.state_by_range) == list(reference)
