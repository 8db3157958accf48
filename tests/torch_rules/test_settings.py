""""""

from __future__ import annotations

import gzip
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from, tuples
from torch_rules.all_settings import settings as all_settings

from cudakit.memory.load import valid_settings
from cudakit.torch_rules.setting_keys import KEYS, Reserve, SettingRefused
from cudakit.torch_rules.settings import (
    Settings,
    division_of,
    parse_config,
    recorded_divisions,
    recorded_max_split,
    rounded,
    rounded_array,
    rounded_to_division,
    segment_size,
)
from cudakit.units import MIB

DATA = Path(__file__).parents[1] / "data"


def test_defaults_equal_pytorchs() -> None:
    assert Settings().as_text() == ""
    assert Settings().slack_bytes == Settings().large_segment_size_bytes == 20 * MIB
    assert Settings().max_split_size_bytes is None
    assert Settings().memory_fraction == 1.0


@pytest.mark.parametrize("name", ["train", "leak", "pools"])
def test_defaults_are_recorded_as_by_pytorch(name: str) -> None:
    with gzip.open(DATA / f"{name}.pkl.gz") as file:
        recorded = pickle.load(file)["allocator_settings"]  # noqa: S301

    ours = Settings().as_torch()

    assert ours == recorded
    assert list(ours) == list(recorded)
    assert {k: type(v) for k, v in ours.items()} == {k: type(v) for k, v in recorded.items()}


def test_changed_settings_are_recorded_as_by_pytorch() -> None:
    written = Settings(
        max_split_size_bytes=128 * MIB, roundup_power2_divisions=(4,) * 16, memory_fraction=0.5
    ).as_torch()

    assert written["max_split_size"] == 128 << 20
    assert written["roundup_power2_divisions"] == {str(1 << n): 4 for n in range(16)}
    assert written["PYTORCH_CUDA_ALLOC_CONF"] == (
        "max_split_size_mb:128,per_process_memory_fraction:0.5,roundup_power2_divisions:4"
    )


@given(all_settings())
def test_snapshot_has_every_setting(settings: Settings) -> None:
    written = settings.as_torch()

    assert valid_settings(written) == written
    assert parse_config(str(written["PYTORCH_CUDA_ALLOC_CONF"])) == settings


def test_each_setting_has_a_key() -> None:
    names = {field.name for field in fields(Settings)}

    assert {key.field for key in KEYS.values()} == names
    assert len(KEYS) == len(names)


def test_settings_are_hashable_values() -> None:
    settings = Settings()

    with pytest.raises(FrozenInstanceError):
        settings.memory_fraction = 0.5  # type: ignore[misc]
    assert hash(settings) == hash(Settings())
    assert replace(settings, memory_fraction=0.5) != settings


@pytest.mark.parametrize(
    ("field", "value", "seen"),
    [
        ("backend", "hipMallocAsync", "'hipMallocAsync'"),
        ("max_split_size_bytes", 128 * MIB + 1, "134217729"),
        ("max_split_size_bytes", 2 * MIB, "2 MiB"),
        ("max_split_size_bytes", -20 * MIB, "-20 MiB"),
        ("max_non_split_rounding_bytes", 19 * MIB, "19 MiB"),
        ("large_segment_size_bytes", 10 * MIB, "10 MiB"),
        ("large_segment_size_bytes", None, "None"),
        ("roundup_power2_divisions", (4,) * 15, "(4, 4, 4, 4, 4, 4, ...)"),
        ("roundup_power2_divisions", (3,) * 16, "(3, 3, 3, 3, 3, 3, ...)"),
        ("garbage_collection_threshold", 1.0, "1.0"),
        ("garbage_collection_threshold", float("nan"), "nan"),
        ("memory_fraction", 1, "1"),
        ("memory_fraction", -0.1, "-0.1"),
        ("memory_fraction", 1.1, "1.1"),
        ("expandable_segments", 1, "1"),
        ("throw_on_cudamalloc_oom", "False", "'False'"),
        ("pinned_num_register_threads", 3, "3"),
        ("pinned_num_register_threads", MIB, "1048576"),
        ("pinned_num_register_threads", True, "True"),
        ("pinned_reserve_segment_size_bytes", -MIB, "-1 MiB"),
        ("expandable_segments_reserve", 0.5, "0.5"),
        ("expandable_segments_reserve_by_class", (("a b", Reserve(value=0.5)),), "(('a b', "),
        ("expandable_segments_reserve_by_class", ((1, 2, 3),), "((1, 2, 3),)"),
    ],
)
def test_wrong_setting_value_is_refused_and_shown(field: str, value: Any, seen: str) -> None:
    with pytest.raises(SettingRefused) as refused:
        Settings(**{field: value})

    assert refused.value.message.startswith(f"{field} is {seen}")
    assert "; it must be " in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.field == field


def test_too_long_number_is_refused() -> None:
    huge = 10**5000

    with pytest.raises(SettingRefused, match="max_split_size_bytes is a number of 16610 bits"):
        Settings(max_split_size_bytes=huge)
    with pytest.raises(SettingRefused, match="roundup_power2_divisions is a tuple"):
        Settings(roundup_power2_divisions=(huge,) * 16)


def test_duplicate_stream_class_is_refused() -> None:
    twice = (("a", Reserve(value=0.5)), ("a", Reserve(value=0.25)))

    with pytest.raises(SettingRefused, match="each class once"):
        Settings(expandable_segments_reserve_by_class=twice)


def test_max_split_size_below_a_large_segment_is_refused() -> None:
    assert Settings(large_segment_size_bytes=12 * MIB, max_split_size_bytes=12 * MIB)

    with pytest.raises(SettingRefused, match="at least the size of a large segment, 40 MiB"):
        Settings(large_segment_size_bytes=40 * MIB, max_split_size_bytes=20 * MIB)


def test_slack_defaults_to_the_large_segment_size() -> None:
    assert Settings(large_segment_size_bytes=40 * MIB).slack_bytes == 40 * MIB
    assert Settings(max_non_split_rounding_bytes=64 * MIB).slack_bytes == 64 * MIB


def test_settings_without_effect_on_the_backend_are_refused() -> None:
    assert Settings(backend="cudaMallocAsync", pinned_use_background_threads=True)

    with pytest.raises(SettingRefused, match="expandable_segments is True; it must be left out"):
        Settings(backend="cudaMallocAsync", expandable_segments=True)


def test_reserve_is_a_share_or_gib_up_to_pytorchs_maximum() -> None:
    total = 80 << 30

    assert Reserve(value=0.5).size_bytes(total) == 40 << 30
    assert Reserve(value=1.5, unit="GiB").size_bytes(total) == 3 << 29
    assert Reserve(value=1e300, unit="GiB").size_bytes(total) == 90 << 30


@pytest.mark.parametrize("value", [0.0, -1.0, 1.2, 40.0, float("inf"), float("nan"), 1, "0.5"])
def test_reserve_share_beyond_the_maximum_is_refused(value: Any) -> None:
    with pytest.raises(SettingRefused, match=r"above 0, at most 1.125"):
        Reserve(value=value)


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
