from __future__ import annotations

from typing import Any

import pytest
from core.memory.load import files
from core.memory.load.files import LARGE, event
from core.memory.load.reading import Loader, only, untraced


@pytest.mark.parametrize("in_settings", [False, True])
@pytest.mark.parametrize(
    ("flag", "devices"),
    [
        (True, [True, True]),
        (False, [False, False]),
        ([True, False], [True, False]),
        ([False], [False, None]),
        ({"1": True}, [None, True]),
        ("yes", [None, None]),
    ],
)
def test_the_overflow_flag_is_read_in_either_place(
    loaded: Loader, flag: Any, devices: list[bool | None], *, in_settings: bool
) -> None:
    said_so = {"trace_alloc_overflowed": flag}
    root = {"device_traces": [[event("alloc", LARGE, 512)]] * 2}
    root |= {"allocator_settings": said_so} if in_settings else said_so
    assert [device.overflowed for device in loaded(root).devices] == devices


def test_a_file_that_is_silent_about_overflow_leaves_it_open(loaded: Loader) -> None:
    assert only(loaded(files.snapshot())).overflowed is None


@pytest.mark.parametrize(
    "setting", [1 << 64, -(1 << 64), b"raw", [[1]], {"a": "b"}, {"9" * 50: 1}, [b"raw"], {"a": {}}]
)
def test_a_setting_that_is_none_is_left_out(loaded: Loader, setting: Any) -> None:
    settings = {"odd": setting, "max_split_size": 2**64 - 1, "list": [1, None, "x"]}
    found = loaded(untraced(allocator_settings=settings)).settings
    assert found == {"max_split_size": 2**64 - 1, "list": [1, None, "x"]}


@pytest.mark.parametrize("settings", [None, [], "text", 5])
def test_settings_that_are_no_dictionary_are_none(loaded: Loader, settings: Any) -> None:
    assert loaded(untraced(allocator_settings=settings)).settings == {}
