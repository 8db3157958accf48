from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.l2_cache import MAX_SETS, buffer_sets, is_cold

MIB = 1 << 20


def number_of_sets(
    footprint_bytes: int, *, free_bytes: int = 1 << 40, l2_bytes: int = 60 * MIB
) -> int:
    return buffer_sets(
        "rotate", l2_bytes=l2_bytes, footprint_bytes=footprint_bytes, free_bytes=free_bytes
    )


def test_rotated_sets_exceed_twice_the_cache() -> None:
    assert number_of_sets(MIB) == 121
    assert number_of_sets(50 * MIB) == 4
    assert number_of_sets(1024 * MIB) == 2


def test_rotated_sets_fit_free_memory() -> None:
    assert number_of_sets(1024 * MIB, free_bytes=1000 * MIB) == 1
    assert number_of_sets(MIB, free_bytes=100 * MIB) == 91


def test_number_of_tiny_sets_is_limited() -> None:
    assert number_of_sets(16) == MAX_SETS
    assert not is_cold(MAX_SETS, l2_bytes=60 * MIB, footprint_bytes=16)


def test_hot_flushed_or_empty_footprint_has_one_set() -> None:
    for cache in ("hot", "flush"):
        assert buffer_sets(cache, l2_bytes=MIB, footprint_bytes=MIB, free_bytes=1 << 40) == 1
    assert number_of_sets(0) == 1


@given(st.integers(1 << 18, 1 << 34), st.integers(1 << 20, 1 << 27))
def test_rotated_sets_are_cold(footprint_bytes: int, l2_bytes: int) -> None:
    set_count = number_of_sets(footprint_bytes, l2_bytes=l2_bytes)

    if set_count < MAX_SETS:
        assert is_cold(set_count, l2_bytes=l2_bytes, footprint_bytes=footprint_bytes)


def test_single_set_larger_than_cache_is_cold() -> None:
    assert is_cold(1, l2_bytes=60 * MIB, footprint_bytes=120 * MIB)
    assert not is_cold(1, l2_bytes=60 * MIB, footprint_bytes=119 * MIB)
    assert not is_cold(2, l2_bytes=60 * MIB, footprint_bytes=100 * MIB)
