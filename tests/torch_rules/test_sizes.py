from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from, tuples

from cudakit.torch_rules.settings import recorded_divisions, recorded_max_split
from cudakit.torch_rules.sizes import (
    MIB,
    division_of,
    rounded,
    rounded_array,
    rounded_to_division,
    segment_size,
)

SLOTS = tuple(range(16))
KIB, GIB = 1 << 10, 1 << 30


@given(integers(1, 1 << 45))
def test_without_divisions_sizes_are_rounded_to_512(size: int) -> None:
    rounded_size = rounded(size)

    assert rounded_size % 512 == 0
    assert max(size, 512) <= rounded_size < size + 512 or rounded_size == 512


@given(integers(1, 1 << 40), sampled_from([2, 4, 8, 16]))
def test_divisions_waste_no_more_than_one_step(size: int, division: int) -> None:
    rounded_size = rounded(size, (division,) * 16)

    assert rounded_size % 512 == 0
    assert size <= rounded_size < size * (1 + 1 / division) + 512


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
def test_size_is_rounded_up_to_the_next_division(size: int, division: int, expected: int) -> None:
    assert rounded_to_division(size, division) == expected


def test_large_segment_size_is_configurable() -> None:
    assert segment_size(2 * MIB, 12 * MIB) == 12 * MIB
    assert segment_size(MIB, 12 * MIB) == 2 * MIB
    assert segment_size(10 * MIB, 12 * MIB) == 10 * MIB


def round_up(requested: int, divisions: dict[str, int] | None = None) -> int:
    """Round as memviz does, from settings as a snapshot records them."""
    settings = {} if divisions is None else {"roundup_power2_divisions": divisions}
    return int(rounded_array(np.array([requested], np.int64), recorded_divisions(settings))[0])


def every_power(divisions: int) -> dict[str, int]:
    return {str(1 << i): divisions for i in range(16)}


@pytest.mark.parametrize(
    ("requested", "block"), [(0, 512), (1, 512), (512, 512), (513, KIB), (MIB + 1, MIB + 512)]
)
def test_requests_round_up_to_512_bytes(requested: int, block: int) -> None:
    assert round_up(requested) == rounded(requested) == block


@pytest.mark.parametrize(
    ("requested", "divisions", "block"),
    [
        (84 * MIB, 4, 96 * MIB),
        (84 * MIB, 8, 88 * MIB),
        (400 * MIB, 2, 512 * MIB),
        (64 * MIB, 4, 64 * MIB),
        (1200, 4, 1536),  # at most 512 bytes a division: rounded plainly
        (84 * MIB, 0, 84 * MIB),
        (84 * MIB, 1, 84 * MIB),
    ],
)
def test_requests_round_up_to_divisions_of_a_power_of_two(
    requested: int, divisions: int, block: int
) -> None:
    assert round_up(requested, every_power(divisions)) == block
    assert rounded(requested, (divisions,) * 16) == block


def test_each_power_of_two_has_its_own_number_of_divisions() -> None:
    divisions = every_power(0) | {"1": 4, "64": 2}
    assert round_up(700 * KIB, divisions) == 768 * KIB  # below 1 MiB the first holds
    assert round_up(5 * MIB, divisions) == 5 * MIB
    assert round_up(65 * MIB, divisions) == 96 * MIB


@pytest.mark.parametrize("divisions", [None, "4", {"x": 4}, {"1": "4"}, {"1": -4}, {}, {"1": 1e9}])
def test_invalid_recorded_divisions_round_to_512_bytes(divisions: object) -> None:
    recorded = recorded_divisions({"roundup_power2_divisions": divisions})
    assert rounded_array(np.array([MIB + 1], np.int64), recorded).tolist() == [MIB + 512]


@given(integers(0, 1 << 40), sampled_from((0, 1, 2, 4, 8, 16)))
def test_block_size_is_a_multiple_of_512_bytes_and_fits_the_request(
    requested: int, divisions: int
) -> None:
    block = round_up(requested, every_power(divisions))
    assert block >= max(requested, 512)
    assert block % 512 == 0
    assert block <= 2 * max(requested, 512)


@given(lists(integers(0, 1 << 45)), tuples(*[sampled_from((0, 1, 2, 4, 16, 64))] * 16))
def test_rounding_an_array_equals_rounding_each_request(
    sizes: list[int], divisions: tuple[int, ...]
) -> None:
    rounded_sizes = rounded_array(np.array(sizes, np.int64), divisions)

    assert rounded_sizes.tolist() == [rounded(size, divisions) for size in sizes]


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (100 * MIB + 512, 102 * MIB),
    ],
)
def test_segment_sizes_equal_the_allocators(block: int, segment: int) -> None:
    assert segment_size(block) == segment


@pytest.mark.parametrize("setting", [None, -1, 0, "21"])
def test_recorded_split_limit_of_minus_one_is_unlimited(setting: object) -> None:
    assert recorded_max_split({"max_split_size": setting}) == recorded_max_split({}) > 1 << 60
