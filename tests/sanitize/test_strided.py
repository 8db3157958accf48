from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cudakit.sanitize.shadow import StridedRange, StridedStates, strided_range


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
