from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cudakit.core.sanitize.strided import Rows, rows_of


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    width = draw(st.integers(1, 5))
    return Rows(
        lo=draw(st.integers(0, 40)),
        width=width,
        stride=width + draw(st.integers(0, 6)),
        count=draw(st.integers(1, 8)),
    )


def bytes_of(some: Rows) -> set[int]:
    return {byte for lo, hi in some.ranges() for byte in range(lo, hi)}


@given(rows(), rows())
def test_shared_with_agrees_with_byte_sets(one: Rows, two: Rows) -> None:
    both = bytes_of(one) & bytes_of(two)
    shared = one.shared_with(two)

    assert (shared is not None) == bool(both)
    if shared:
        assert set(range(*shared)) <= both


@given(rows(), st.integers(0, 120), st.integers(1, 30))
def test_shared_with_range_agrees_with_byte_sets(one: Rows, lo: int, size: int) -> None:
    both = bytes_of(one) & set(range(lo, lo + size))
    shared = one.shared_with_range(lo, lo + size)

    assert (shared is not None) == bool(both)
    if shared:
        assert shared[0] == min(both)
        assert set(range(*shared)) <= both


@given(rows())
def test_rows_of_negative_stride_equal_rows_of_positive_stride(one: Rows) -> None:
    for stride in (one.stride, -one.stride):
        assert bytes_of(rows_of(one.lo, one.hi, stride, one.count)) == bytes_of(one)


def test_adjacent_rows_are_one_range() -> None:
    assert rows_of(100, 164, 16, 4) == Rows(100, 64, 64, 1)


def test_many_rows_with_different_strides_are_compared() -> None:
    columns = Rows(lo=0, width=4, stride=1 << 12, count=100_000)
    others = Rows(lo=4, width=4, stride=(1 << 12) + 4, count=100_000)

    assert columns.shared_with(others) == (4096 * 1024, 4096 * 1024 + 4)
    assert columns.shared_with(Rows(lo=4, width=4, stride=1 << 12, count=100_000)) is None
