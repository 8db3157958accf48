from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import integers, sampled_from

from cudakit.torch_rules.sizes import (
    MIB,
    division_of,
    rounded,
    rounded_to_division,
    segment_size,
)

SLOTS = tuple(range(16))
GIB = 1 << 30


@given(integers(1, 1 << 45))
def test_without_divisions_sizes_are_rounded_to_512(size: int) -> None:
    found = rounded(size)

    assert found % 512 == 0
    assert max(size, 512) <= found < size + 512 or found == 512


@given(integers(1, 1 << 40), sampled_from([2, 4, 8, 16]))
def test_divisions_waste_no_more_than_one_step(size: int, division: int) -> None:
    found = rounded(size, (division,) * 16)

    assert found % 512 == 0
    assert size <= found < size * (1 + 1 / division) + 512


@pytest.mark.parametrize(
    ("size", "slot"),
    [
        (1, 0),
        (MIB - 1, 0),
        (MIB, 0),
        (2 * MIB - 1, 0),
        (2 * MIB, 1),
        (84 * MIB, 6),
        (32 * GIB, 15),
        (64 * GIB, 15),
        (1 << 45, 15),
    ],
)
def test_each_power_of_two_has_its_division(size: int, slot: int) -> None:
    assert division_of(size, SLOTS) == slot


@pytest.mark.parametrize(
    ("size", "division", "expected"),
    [(1200, 4, 1280), (1024, 4, 1024), (1, 4, 1), (3, 4, 4), (84 * MIB, 8, 88 * MIB)],
)
def test_a_size_goes_up_to_the_next_step(size: int, division: int, expected: int) -> None:
    assert rounded_to_division(size, division) == expected


def test_the_segment_of_middle_sizes_can_be_chosen() -> None:
    assert segment_size(2 * MIB, 12 * MIB) == 12 * MIB
    assert segment_size(MIB, 12 * MIB) == 2 * MIB
    assert segment_size(10 * MIB, 12 * MIB) == 10 * MIB
