from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.devices.visible_devices import visibility

FIRST = "GPU-51053698-363a-a59f-4199-60617802a154"
SECOND = "GPU-61972ae1-fe9a-6bfb-1a3c-4dd28da50fb9"

# Values, and the devices of two GPUs that driver 580.159.04 left visible; <0> and <1> are the UUIDs.
SEEN: list[tuple[str, tuple[int, ...]]] = [
    ("", ()),
    (" ", ()),
    ("0", (0,)),
    ("1", (1,)),
    ("0,1", (0, 1)),
    ("1,0", (1, 0)),
    ("2", ()),
    ("0,2,1", (0,)),
    ("-1", ()),
    ("1,-1,0", (1,)),
    # Twice is once too often: CUDA then does not start.
    ("1,0,1", ()),
    ("1,1,0", ()),
    ("0,1,0", ()),
    # Numbers are read as strtoul does, and what is behind them is passed over.
    (" 1", (1,)),
    ("\t1", (1,)),
    ("1 ,0", (1, 0)),
    ("01", (1,)),
    ("+1", (1,)),
    ("-0", (0,)),
    ("-0,1", (0, 1)),
    ("0x1", (0,)),
    ("1gpu2,0ampere", (1, 0)),
    ("1;0", (1,)),
    ("0.9,1", (0, 1)),
    ("4294967296", (0,)),
    ("4294967297", (1,)),
    ("99999999999999999999", ()),
    # An entry that is not a number ends the list.
    ("a", ()),
    ("1,a,0", (1,)),
    ("1,,0", (1,)),
    (",1", ()),
    # UUIDs, or as much of them as is not ambiguous.
    ("<0>", (0,)),
    ("<1>,<0>", (1, 0)),
    ("GPU-5", (0,)),
    ("GPU-6", (1,)),
    ("GPU-", ()),
    ("GPU-,<1>", ()),
    ("GPU-61972AE1-FE9A-6BFB-1A3C-4DD28DA50FB9", (1,)),
    ("gpu-61972ae1-fe9a-6bfb-1a3c-4dd28da50fb9", ()),
    ("<1>,<1>", ()),
    ("<1>, <0>", (1,)),
    ("<1> ,<0>", (1, 0)),
    (" <1>", ()),
    ("GPU-ffffffff,<0>", ()),
    ("<0>,GPU-ffffffff,<1>", (0,)),
    # The first entry decides of which kind all are.
    ("0,<1>", (0,)),
    ("<1>,0", (1,)),
    ("MIG-51053698-363a-a59f-4199-60617802a154", (0,)),
    ("MIG-51053698-363a-a59f-4199-60617802a154,<1>", (0, 1)),
]


@pytest.mark.parametrize(("value", "visible"), SEEN)
def test_rules_agree_with_observed_driver(value: str, visible: tuple[int, ...]) -> None:
    named = value.replace("<0>", FIRST).replace("<1>", SECOND)

    assert visibility(named, [FIRST, SECOND]).visible == visible


def test_unset_variable_leaves_all_devices() -> None:
    devices_found = visibility(None, [FIRST, SECOND])

    assert (devices_found.visible, devices_found.notes) == ((0, 1), ())


def test_negative_number_ends_list_as_in_programming_guide() -> None:
    # CUDA Programming Guide, "Environment variables": 0,2,-1,1 leaves 0 and 2.
    devices_found = visibility("0,2,-1,1", ["GPU-a", "GPU-b", "GPU-c"])

    assert devices_found.visible == (0, 2)
    assert devices_found.notes == (
        "CUDA_VISIBLE_DEVICES=0,2,-1,1: '-1' is negative, so CUDA ignores this and all later entries",
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "is empty, which hides every device"),
        ("0,5,1", "no device has index 5 (of 2), so CUDA ignores this and all later entries"),
        ("7", "no device has index 7 (of 2)"),
        ("x", "'x' is not a number"),
        ("0,0", "'0' repeats a device, so CUDA does not start"),
        (f"{FIRST},1", "'1' does not start with GPU- or MIG-"),
        ("GPU-abc", "no UUID starts with 'GPU-abc'"),
    ],
)
def test_ineffective_entry_has_note(value: str, reason: str) -> None:
    (note,) = visibility(value, [FIRST, SECOND]).notes

    assert note.endswith(reason)


def test_ambiguous_uuid_prefix_matches_none() -> None:
    devices_found = visibility("GPU-1", ["GPU-11", "GPU-12"])

    assert devices_found.visible == ()
    assert "2 UUIDs start with 'GPU-1'" in devices_found.notes[0]


@given(st.text(), st.integers(0, 4))
def test_any_value_leaves_distinct_existing_devices(value: str, count: int) -> None:
    visible = visibility(value, [f"GPU-{number}" for number in range(count)]).visible

    assert set(visible) <= set(range(count))
    assert len(visible) == len(set(visible))


@given(st.lists(st.integers(0, 7), unique=True, min_size=1))
def test_valid_numbers_keep_their_order_without_note(numbers: list[int]) -> None:
    devices_found = visibility(",".join(map(str, numbers)), [f"GPU-{index}" for index in range(8)])

    assert (devices_found.visible, devices_found.notes) == (tuple(numbers), ())
