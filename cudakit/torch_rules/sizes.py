"""Sizes: rounding of requests, and the size of the segment that is allocated for a block.

The rules and constants come from PyTorch's c10/cuda/CUDACachingAllocator.cpp; comments give PyTorch's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


MIB = 1 << 20

SMALLEST_BLOCK = 512  # kMinBlockSize: the size of every block is a multiple of this size
MAX_SMALL_BYTES = MIB  # kSmallSize: larger blocks come from the large pool
SMALL_SEGMENT = 2 * MIB  # PyTorch's kSmallBuffer: the size of a segment of the small pool
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer; the default of the setting large_segment_size_mb
# kMinLargeAlloc: a block of at least this size gets a new segment of its size.
OWN_SEGMENT = 10 * MIB
# kRoundLarge: the size of a segment for a block of at least OWN_SEGMENT is a multiple of this size.
SEGMENT_STEP = 2 * MIB

# PyTorch rejects a request of 1 EiB before it calls the allocator (aten/src/ATen/EmptyTensor.cpp).
TOO_MANY_BYTES = 1 << 60
# The value of a limit that means "no limit": SIZE_MAX in PyTorch, here the largest signed 64-bit number.
UNLIMITED = (1 << 63) - 1

# The setting of divisions has a slot for each power of two from 1 MiB on; the last slot is for 32 GiB and
# above.
_FIRST_SLOT_BITS = MIB.bit_length()


def rounded(size_bytes: int, divisions: Sequence[int] = ()) -> int:
    """Round a request up to the size of its block.

    ``divisions`` are the 16 values of the setting ``roundup_power2_divisions``; empty: multiples of 512
    bytes. Source: round_size.
    """
    if size_bytes < SMALLEST_BLOCK:
        return SMALLEST_BLOCK
    if divisions:
        division = division_of(size_bytes, divisions)
        if division > 1 and size_bytes > SMALLEST_BLOCK * division:
            return rounded_to_division(size_bytes, division)
    return -(-size_bytes // SMALLEST_BLOCK) * SMALLEST_BLOCK


def division_of(size_bytes: int, divisions: Sequence[int]) -> int:
    """Return the number of divisions between the two powers of two around ``size_bytes``.

    Source: CUDAAllocatorConfig::roundup_power2_divisions (c10/core/AllocatorConfig.cpp).
    """
    slot = size_bytes.bit_length() - _FIRST_SLOT_BITS
    return divisions[min(max(slot, 0), len(divisions) - 1)]


def rounded_to_division(size_bytes: int, division: int) -> int:
    """Round up to the next of ``division`` equal steps between two powers of two.

    Source: roundup_power2_next_division.
    """
    power = 1 << (size_bytes.bit_length() - 1)
    if power == size_bytes:
        return size_bytes
    step = power // division
    return -(-size_bytes // step) * step if step else 2 * power


def segment_size(block_bytes: int, large_segment_bytes: int = LARGE_SEGMENT) -> int:
    """Return the size of the segment that is allocated for a block. Source: get_allocation_size."""
    if block_bytes <= MAX_SMALL_BYTES:
        return SMALL_SEGMENT
    if block_bytes < OWN_SEGMENT:
        return large_segment_bytes
    return -(-block_bytes // SEGMENT_STEP) * SEGMENT_STEP


def rounded_array(
    sizes_bytes: npt.NDArray[np.int64], divisions: Sequence[int] = ()
) -> npt.NDArray[np.int64]:
    """Round up each request of an array, as ``rounded`` does."""
    import numpy as np  # imported here, so that the allocator works without numpy

    rounded_to_block = np.maximum(
        -(-sizes_bytes // SMALLEST_BLOCK) * SMALLEST_BLOCK, SMALLEST_BLOCK
    )
    if not any(divisions):
        return rounded_to_block
    log2 = np.floor(np.log2(np.maximum(sizes_bytes, 1))).astype(np.int64)
    slots = np.clip(log2 + 1 - _FIRST_SLOT_BITS, 0, len(divisions) - 1)
    divisions_of_sizes = np.array(divisions, np.int64)[slots]
    power = np.int64(1) << np.minimum(log2, 60)
    step = np.maximum(power // np.maximum(divisions_of_sizes, 1), 1)
    next_step = np.where(sizes_bytes == power, sizes_bytes, -(-sizes_bytes // step) * step)
    is_divided = (divisions_of_sizes > 1) & (sizes_bytes > SMALLEST_BLOCK * divisions_of_sizes)
    return np.where(is_divided, next_step, rounded_to_block)
