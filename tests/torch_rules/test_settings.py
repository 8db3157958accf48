from __future__ import annotations

import gzip
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from torch_rules.all_settings import settings as all_settings

from cudakit.memory.load.schema import valid_settings
from cudakit.torch_rules.setting_keys import KEYS, Reserve, SettingRefused
from cudakit.torch_rules.settings import Settings, parse_config
from cudakit.torch_rules.sizes import MIB

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
