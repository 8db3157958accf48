"""Philox4x32-10: counter-based random numbers, equal in numpy and on the device.

Each number of a sequence is a function of its position and a key, so threads need no shared state (J. K.
Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
# Multipliers and Weyl increments of Philox4x32 (Salmon et al., SC11, section 3.3).
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_WORD_BITS = np.uint64(32)
_LOW_WORD_MASK = np.uint64(0xFFFFFFFF)

SOURCE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

// Returns the low and the high half of a 64-bit product. The assembly text keeps the compiler from adding an
// instruction that has no effect after each multiplication (NVRTC 13.5 for sm_90).
__device__ inline uint2 multiply_wide(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    uint2 halves;
    asm("{ .reg .u64 product; mul.wide.u32 product, %2, %3; mov.b64 {%0, %1}, product; }"
        : "=r"(halves.x), "=r"(halves.y) : "r"(a), "r"(b));
    return halves;
#else
    const u64 product = (u64)a * b;
    return {(u32)product, (u32)(product >> 32)};
#endif
}

// Returns the block of four words at a position of a sequence.
__device__ uint4 philox(u64 position, u64 sequence, u64 key) {
    uint4 at = make_uint4((u32)position, (u32)(position >> 32), (u32)sequence, (u32)(sequence >> 32));
    u32 first = (u32)key, second = (u32)(key >> 32);
    #pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint2 a = multiply_wide(at.x, 0xD2511F53u), b = multiply_wide(at.z, 0xCD9E8D57u);
        at = make_uint4(b.y ^ at.y ^ first, b.x, a.y ^ at.w ^ second, a.x);
        first += 0x9E3779B9u;
        second += 0xBB67AE85u;
    }
    return at;
}
"""


def philox(
    first: int, blocks: int | npt.NDArray[Any], sequence: int, key: int
) -> npt.NDArray[np.uint32]:
    """Return blocks of a sequence as rows of four words.

    ``blocks`` is the number of adjacent blocks from position ``first``, or an array of distances from
    ``first``. The low 64 bits of the counter are the position, the high 64 bits the sequence.
    """
    distances = np.arange(blocks) if isinstance(blocks, int) else blocks
    position = np.uint64(first) + distances.astype(np.uint64)
    high_half = np.uint64(sequence)
    words: list[npt.NDArray[Any]] = [
        position & _LOW_WORD_MASK,
        position >> _WORD_BITS,
        np.broadcast_to(high_half & _LOW_WORD_MASK, position.shape),
        np.broadcast_to(high_half >> _WORD_BITS, position.shape),
    ]
    round_keys = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(_ROUNDS):
        words = _round(words, round_keys)
        round_keys = [
            (k + step) & 0xFFFFFFFF for k, step in zip(round_keys, _INCREMENTS, strict=True)
        ]
    return np.stack(words, axis=1).astype(np.uint32)


def _round(words: list[npt.NDArray[Any]], keys: list[int]) -> list[npt.NDArray[Any]]:
    a, b = (words[2 * i] * np.uint64(_MULTIPLIERS[i]) for i in range(2))
    return [
        (b >> _WORD_BITS) ^ words[1] ^ np.uint64(keys[0]),
        b & _LOW_WORD_MASK,
        (a >> _WORD_BITS) ^ words[3] ^ np.uint64(keys[1]),
        a & _LOW_WORD_MASK,
    ]
