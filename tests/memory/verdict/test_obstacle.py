"""The obstacle of a failed request: the change that would have let the request succeed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cudakit.memory.snapshot import CUDAKIT_CALLS
from cudakit.memory.verdict.failure import FailedRequest, obstacle_of
from cudakit.torch_rules.oom import Fit, fit_of
from cudakit.torch_rules.sizes import MIB

# A request of 30 MiB; 50 of the device's 64 MiB are reserved and in use.
FULL = FailedRequest(
    size_bytes=30 * MIB,
    device_free_bytes=14 * MIB,
    reserved_bytes=50 * MIB,
    active_bytes=50 * MIB,
    free_bytes=0,
    own_free_bytes=0,
    own_largest_bytes=0,
    later_largest_bytes=0,
    other_largest_bytes=0,
    releasable_bytes=0,
    releasable_private_bytes=0,
    pending_bytes=0,
)


def test_fit_of_each_change_needs_exactly_the_missing_bytes() -> None:
    enough = {
        "usable_bytes": 4,
        "releasable_bytes": 8,  # with what is usable: a segment
        "own_free_bytes": 6,  # with what is usable: a block
        "largest_other_bytes": 10,
        "largest_later_bytes": 10,
    }
    sizes = {"block_bytes": 10, "segment_bytes": 12}

    assert fit_of(**sizes, **enough) == Fit(True, True, True, True)
    less = {name: size - 1 for name, size in enough.items()}
    assert fit_of(**sizes, **less) == Fit(False, False, False, False)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, "capacity"),
        ({"device_free_bytes": 40 * MIB}, "limit"),
        ({"releasable_bytes": 16 * MIB}, "cache"),
        ({"later_largest_bytes": 30 * MIB}, "pending"),
        ({"own_free_bytes": 16 * MIB, "free_bytes": 16 * MIB}, "fragmentation"),
        ({"other_largest_bytes": 30 * MIB}, "pool"),
        ({"free_bytes": 16 * MIB}, "pool"),
    ],
)
def test_obstacle_names_the_change_that_helps(changes: dict[str, int], code: str) -> None:
    assert obstacle_of(replace(FULL, **changes)).code == code  # type: ignore[arg-type]


def test_shortage_counts_usable_device_memory() -> None:
    assert FULL.short_bytes == 16 * MIB
    assert replace(FULL, free_bytes=20 * MIB).short_bytes == 0
    limited = replace(FULL, device_free_bytes=40 * MIB)
    assert limited.is_limited
    assert limited.short_bytes == 30 * MIB


def test_obstacle_of_a_limited_process_is_the_change_that_needs_no_limit() -> None:
    found = obstacle_of(replace(FULL, device_free_bytes=40 * MIB, releasable_bytes=30 * MIB))
    assert found.code == "cache"
    assert "30.0 MiB is in empty segments" in found.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"device_free_bytes": 40 * MIB},
        {"releasable_bytes": 16 * MIB},
        {"own_free_bytes": 16 * MIB, "free_bytes": 16 * MIB},
        {"other_largest_bytes": 30 * MIB},
        {"later_largest_bytes": 30 * MIB},
    ],
)
def test_remedies_for_cudakits_allocator_name_no_call_of_pytorch(changes: dict[str, int]) -> None:
    failed = replace(FULL, calls=CUDAKIT_CALLS, **changes)  # type: ignore[arg-type]
    found = obstacle_of(failed)
    assert "torch" not in (found.reason + found.remedy).lower()
