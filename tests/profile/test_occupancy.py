"""Blocks of a kernel on a multiprocessor, by the rules of the occupancy calculator, and waves of a grid."""

from __future__ import annotations

import pytest

from cudakit.profile.occupancy import (
    DeviceLimits,
    LaunchConfiguration,
    blocks_per_multiprocessor,
    grid_fill,
)

H100 = DeviceLimits(132, 2048, 32, 65536, 233472, 1024)


@pytest.mark.parametrize(
    ("threads", "registers", "shared_bytes", "expected"),
    [
        (1024, 32, 0, 2),  # threads
        (32, 16, 0, 32),  # blocks
        (128, 168, 0, 3),  # registers: 12 warps of 5,376 registers
        (256, 255, 0, 1),
        (128, 32, 100_000, 2),  # shared memory: 101,120 bytes for each block
        (384, 168, 230_400, 1),
        (1024, 128, 0, 1),  # a kernel that ran has one block at least
    ],
)
def test_blocks_of_a_multiprocessor_are_limited_by_each_resource(
    threads: int, registers: int, shared_bytes: int, expected: int
) -> None:
    launch = LaunchConfiguration(1, threads, registers, shared_bytes)
    assert blocks_per_multiprocessor(launch, H100) == expected


def test_small_grid_leaves_multiprocessors_empty() -> None:
    grid = grid_fill(LaunchConfiguration(33, 256, 32, 0), H100)
    assert grid.multiprocessors_share == pytest.approx(0.25)
    assert grid.threads_share == pytest.approx(33 * 256 / (132 * 2048))
    assert grid.waves == pytest.approx(33 / (132 * 8))


def test_last_wave_is_partly_empty() -> None:
    grid = grid_fill(LaunchConfiguration(132 + 33, 1024, 64, 0), H100)
    assert grid.waves == pytest.approx(1.25)
    assert grid.tail_share == pytest.approx(0.375)
    assert grid.multiprocessors_share == 1
    assert grid.threads_share == pytest.approx(0.5)


def test_full_waves_have_no_tail() -> None:
    grid = grid_fill(LaunchConfiguration(132 * 8, 256, 32, 0), H100)
    assert (grid.waves, grid.tail_share, grid.threads_share) == (1, 0, 1)


def test_limits_of_an_old_trace_are_unknown() -> None:
    assert not DeviceLimits(132).are_recorded
    assert H100.are_recorded
