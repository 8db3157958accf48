"""Compute how many thread blocks of a kernel run at the same time, and how well its grid fills the device.

Source: the CUDA programming guide, "Hardware multithreading", and the occupancy calculator of the toolkit.
Registers are allocated for whole warps in units of 256, and for groups of four warps; shared memory in units
of 128 bytes, with the bytes that the driver reserves in each block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from cudakit.profile.result import Grid

_WARP_THREADS: Final = 32
_REGISTER_UNIT: Final = 256
_WARP_GROUP: Final = 4
_SHARED_UNIT_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The number of multiprocessors of a device, and the resources of each multiprocessor; 0 if unknown."""

    multiprocessors: int
    threads: int = 0
    blocks: int = 0
    registers: int = 0
    shared_bytes: int = 0
    reserved_shared_bytes: int = 0  # shared memory that the driver keeps in each block

    @property
    def are_recorded(self) -> bool:
        """Whether all numbers that the occupancy depends on were recorded."""
        return (
            min(self.multiprocessors, self.threads, self.blocks, self.registers, self.shared_bytes)
            > 0
        )


@dataclass(frozen=True, slots=True)
class LaunchConfiguration:
    """The launch configuration of a kernel."""

    blocks: int
    threads_per_block: int
    registers_per_thread: int
    shared_bytes_per_block: int


def blocks_per_multiprocessor(launch: LaunchConfiguration, limits: DeviceLimits) -> int:
    """Return how many blocks of a kernel fit on one multiprocessor; at least 1, because the kernel ran."""
    warps = max(math.ceil(launch.threads_per_block / _WARP_THREADS), 1)
    block_limits = [limits.blocks, limits.threads // (warps * _WARP_THREADS)]
    if launch.registers_per_thread:
        registers_per_warp = _round_up(launch.registers_per_thread * _WARP_THREADS, _REGISTER_UNIT)
        resident_warps = limits.registers // registers_per_warp // _WARP_GROUP * _WARP_GROUP
        block_limits.append(resident_warps // warps)
    shared_bytes = _round_up(launch.shared_bytes_per_block, _SHARED_UNIT_BYTES)
    if shared_bytes + limits.reserved_shared_bytes:
        block_limits.append(limits.shared_bytes // (shared_bytes + limits.reserved_shared_bytes))
    return max(min(block_limits), 1)


def grid_fill(launch: LaunchConfiguration, limits: DeviceLimits) -> Grid:
    """Return how the grid of a kernel fills a device whose limits are known.

    The device runs as many blocks at the same time as fit; this is one wave. If all blocks take the same
    time, multiprocessors without a block of the last wave are idle.
    """
    resident_blocks = blocks_per_multiprocessor(launch, limits)
    waves = launch.blocks / (resident_blocks * limits.multiprocessors)
    running_blocks = min(launch.blocks, resident_blocks * limits.multiprocessors)
    thread_slots = limits.multiprocessors * limits.threads
    return Grid(
        blocks=launch.blocks,
        threads_per_block=launch.threads_per_block,
        registers_per_thread=launch.registers_per_thread,
        shared_bytes_per_block=launch.shared_bytes_per_block,
        multiprocessors_share=min(launch.blocks / limits.multiprocessors, 1.0),
        threads_share=min(running_blocks * launch.threads_per_block / thread_slots, 1.0),
        waves=waves,
        tail_share=1 - waves / math.ceil(waves) if waves else 0.0,
    )


def _round_up(value: int, allocation_unit: int) -> int:
    return -(-value // allocation_unit) * allocation_unit
