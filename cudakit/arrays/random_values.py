"""Random numbers in numpy, equal bit by bit to those of the kernels in ``cuda/random.cu``.

Each function returns ``element_count`` elements of one call from ``first_index`` on. The call begins at a
Philox counter. All floating-point operations are additions, multiplications, divisions and square roots,
which IEEE 754 defines exactly, and no two of them are fused: thus numpy and the kernels round alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Values = npt.NDArray[Any]

WORDS_PER_BLOCK = 4
# If an integer must be drawn again, the top 16 bits of the sequence number are the number of the attempt.
ATTEMPT_SHIFT = 48
# Feistel rounds of a permutation, and the Philox blocks that give their keys and the parity bit.
ROUNDS = 16
PERMUTATION_BLOCKS = ROUNDS // WORDS_PER_BLOCK + 1
# Minimum number of bits of the permuted numbers: smaller Feistel networks mix badly.
MIN_DOMAIN_BITS = 8

# Coefficients of polynomials, the highest power first. ln(1 + f) = f - f^2 / 2 + f^3 P(f) [/ Q(f)] for a
# mantissa 1 + f in [sqrt(1/2), sqrt(2)). LOG_FP32 is a fit with the least maximum of the relative error of
# the logarithm, 2.6e-7; all others are those of the Cephes Mathematical Library (S. L. Moshier: sinf.c,
# log.c, sin.c).
LOG_FP32 = (
    -0.10191725939512253,
    0.16024380922317505,
    -0.17137128114700317,
    0.19924503564834595,
    -0.24983267486095428,
    0.33334246277809143,
)
SIN_FP32 = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
COS_FP32 = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
LOG_P_FP64 = (
    1.01875663804580931796e-4,
    4.97494994976747001425e-1,
    4.70579119878881725854e0,
    1.44989225341610930846e1,
    1.79368678507819816313e1,
    7.70838733755885391666e0,
)
LOG_Q_FP64 = (
    1.0,
    1.12873587189167450590e1,
    4.52279145837532221105e1,
    8.29875266912776603211e1,
    7.11544750618563894466e1,
    2.31251620126765340583e1,
)
SIN_FP64 = (
    1.58962301576546568060e-10,
    -2.50507477628578072866e-8,
    2.75573136213857245213e-6,
    -1.98412698295895385996e-4,
    8.33333333332211858878e-3,
    -1.66666666666666307295e-1,
)
COS_FP64 = (
    -1.13585365213876817300e-11,
    2.08757008419747316778e-9,
    -2.75573141792967388112e-7,
    2.48015872888517045348e-5,
    -1.38888888888730564116e-3,
    4.16666666666665929218e-2,
)
# ln(2) as the sum of a number with few bits, which has exact products with exponents, and a remainder.
LN2_HIGH, LN2_LOW = 0.693359375, -2.121944400546905827679e-4
# Angle in radians of half a unit of the integer that selects the angle, which has 32 or 53 bits.
RADIANS_FP32 = np.pi * 2.0**-32
RADIANS_FP64 = np.pi * 2.0**-53
# Bits of sqrt(1/2) in fp32 and in fp64: the smallest mantissa.
SQRT_HALF_FP32, SQRT_HALF_FP64 = 0x3F3504F3, 0x3FE6A09E667F3BCD


class Counter(NamedTuple):
    """The counter and key of a Philox block."""

    position: int  # Low 64 bits of the counter.
    sequence: int  # High 64 bits of the counter.
    seed: int  # Key.


def elements_per_block(dtype: str) -> int:
    """Return the number of floating-point values that one Philox block gives for ``uniform``."""
    return {"float64": 2, "float32": 4}.get(dtype, 8)


def bits(first_index: int, element_count: int, start_counter: Counter) -> Values:
    """Return ``element_count`` bytes of the words from ``first_index`` on, the low byte first."""
    return _convert_words(
        first_index, element_count, start_counter, 16, lambda words: words.view(np.uint8)
    )


def uniform(
    dtype: str, first_index: int, element_count: int, start_counter: Counter, *scale: np.generic
) -> Values:
    """Return uniform values in [low, high); ``scale`` is low, high - low and the largest value below high."""
    low, value_range, largest_value = scale

    def convert(words: Words) -> Values:
        values = low + value_range * _unit_values(words, dtype)
        return round_to_dtype(np.minimum(values, largest_value), dtype)

    return _convert_words(
        first_index, element_count, start_counter, elements_per_block(dtype), convert
    )


def normal(
    dtype: str, first_index: int, element_count: int, start_counter: Counter, *scale: np.generic
) -> Values:
    """Return normal values; ``scale`` is the pair of mean and standard deviation."""
    mean, deviation = scale
    is_fp64 = dtype == "float64"
    normal_pairs = _normal_pairs_fp64 if is_fp64 else _normal_pairs_fp32

    def convert(words: Words) -> Values:
        return round_to_dtype(mean + deviation * normal_pairs(words), dtype)

    return _convert_words(first_index, element_count, start_counter, 2 if is_fp64 else 4, convert)


def integers(
    first_index: int,
    element_count: int,
    start_counter: Counter,
    low: np.uint64,
    value_count: np.uint64,
    limit: np.uint32,
) -> Values:
    """Return integers of the interval [low, low + value_count), modulo 2^64.

    ``value_count``, the size of the interval, is at most 2^32.

    The high half of word * value_count is the result, unless the low half is below ``limit``, which is
    2^32 mod value_count: then another word replaces the word (D. Lemire, "Fast Random Integer Generation in
    an Interval", 2019).
    """

    def draw(words: Words) -> tuple[Values, Values]:
        product = words.astype(np.uint64) * value_count
        return product >> np.uint64(32), product.astype(np.uint32) < limit

    return low + _draw_integers(first_index, element_count, start_counter, WORDS_PER_BLOCK, draw)


def wide_integers(
    first_index: int,
    element_count: int,
    start_counter: Counter,
    low: np.uint64,
    value_count: np.uint64,
    limit: np.uint64,
) -> Values:
    """Return integers as ``integers`` does, from 64-bit words; a ``value_count`` of 0 means 2^64."""

    def draw(words: Words) -> tuple[Values, Values]:
        wide_words = words.view(np.uint64)
        if not value_count:
            return wide_words, np.zeros(len(wide_words), bool)
        half_bits, low_mask = np.uint64(32), np.uint64(0xFFFFFFFF)
        a_low, a_high, b_low, b_high = (
            wide_words & low_mask,
            wide_words >> half_bits,
            value_count & low_mask,
            value_count >> half_bits,
        )
        first_middle = a_high * b_low + (a_low * b_low >> half_bits)
        second_middle = a_low * b_high + (first_middle & low_mask)
        high: Values = a_high * b_high + (first_middle >> half_bits) + (second_middle >> half_bits)
        return high, wide_words * value_count < limit

    return low + _draw_integers(first_index, element_count, start_counter, 2, draw)


def permutation(
    first_index: int,
    element_count: int,
    start_counter: Counter,
    size: np.uint64,
    left_bits: np.int32,
    right_bits: np.int32,
) -> Values:
    """Return elements of a permutation of 0 to ``size`` - 1; the bits are those of ``domain_bits``."""
    half_widths = int(left_bits), int(right_bits)
    round_keys = philox(
        start_counter.position, PERMUTATION_BLOCKS, start_counter.sequence, start_counter.seed
    ).reshape(-1)
    is_small = sum(half_widths) == MIN_DOMAIN_BITS
    # For a small size, values pass through the network many times: a table of the small domain is faster.
    permuted_domain = _permute_domain(
        np.arange(1 << MIN_DOMAIN_BITS, dtype=np.uint64), round_keys, half_widths
    )
    values = np.arange(first_index, first_index + element_count, dtype=np.uint64)
    too_large_indices = np.arange(element_count)  # indices of values that are not below the size
    while len(too_large_indices):
        network_inputs = values[too_large_indices]
        values[too_large_indices] = (
            permuted_domain[network_inputs]
            if is_small
            else _permute_domain(network_inputs, round_keys, half_widths)
        )
        too_large_indices = too_large_indices[values[too_large_indices] >= size]
    # A Feistel network gives even permutations only. A random swap of 0 and 1 makes odd ones as likely.
    values[values < 2] ^= np.uint64(round_keys[ROUNDS] & 1 if size > 1 else 0)
    return values


def domain_bits(size: int) -> tuple[int, int]:
    """Return the numbers of bits of both halves of a Feistel network that permutes ``size`` numbers."""
    bit_count = max((size - 1).bit_length(), MIN_DOMAIN_BITS)
    return bit_count - bit_count // 2, bit_count // 2


def round_to_dtype(values: Values, dtype: str) -> Values:
    """Round values to a dtype, ties to even, large ones to infinity; bfloat16 as its 16 bits."""
    if dtype == "bfloat16":
        words = values.view(np.uint32)
        return ((words + np.uint32(0x7FFF) + (words >> 16 & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def _convert_words(
    first_index: int,
    element_count: int,
    start_counter: Counter,
    values_per_block: int,
    convert: Callable[[Words], Values],
) -> Values:
    first_block, skipped_elements = divmod(first_index, values_per_block)
    block_count = -(-(skipped_elements + element_count) // values_per_block)
    words = philox(
        start_counter.position + first_block,
        block_count,
        start_counter.sequence,
        start_counter.seed,
    )
    return convert(words.reshape(-1))[skipped_elements : skipped_elements + element_count]


def _unit_values(words: Words, dtype: str) -> Values:
    """Return multiples of a power of 2 in [0, 1)."""
    if dtype == "float64":
        return _integers_of_53_bits(words).astype(np.float64) * 2.0**-53
    if dtype == "float32":
        return (words >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
    dropped_bits = 5 if dtype == "float16" else 8
    integers_ = words.view(np.uint16) >> np.uint16(dropped_bits)
    return integers_.astype(np.float32) * np.float32(2.0 ** (dropped_bits - 16))


def _integers_of_53_bits(words: Words) -> Values:
    """Return 53-bit integers from pairs of words, composed as by curand_uniform2_double."""
    pairs = words.reshape(-1, 2).astype(np.uint64)
    return pairs[:, 0] ^ (pairs[:, 1] << np.uint64(21))


def _normal_pairs_fp32(words: Words) -> Values:
    """Return normal values by the transform of Box and Muller (1958), two from two words."""
    fp32, pairs = np.float32, words.reshape(-1, 2)
    fraction = pairs[:, 0].astype(fp32) * fp32(2**-32) + fp32(2**-33)
    radius = np.sqrt(fp32(-2) * _log_fp32(fraction))
    quadrant = (pairs[:, 1] + np.uint32(1 << 29)) >> np.uint32(30)
    offset = (pairs[:, 1] - (quadrant << np.uint32(30))).view(np.int32)
    angle = (offset * np.int32(2) + np.int32(1)).astype(fp32) * fp32(RADIANS_FP32)
    square = angle * angle
    sine = _polynomial(square, SIN_FP32) * square * angle + angle
    cosine = _polynomial(square, COS_FP32) * square * square - fp32(0.5) * square + fp32(1)
    return _rotate_pairs(radius, sine, cosine, quadrant)


def _normal_pairs_fp64(words: Words) -> Values:
    """Return normal values by the transform of Box and Muller, two from four words."""
    pairs = _integers_of_53_bits(words).reshape(-1, 2)
    radius = np.sqrt(-2.0 * _log_fp64(pairs[:, 0].astype(np.float64) * 2.0**-53 + 2.0**-54))
    quadrant = (pairs[:, 1] + np.uint64(1 << 50)) >> np.uint64(51)
    offset = (pairs[:, 1] - (quadrant << np.uint64(51))).view(np.int64)
    angle = (offset * 2 + 1).astype(np.float64) * RADIANS_FP64
    square = angle * angle
    sine = _polynomial(square, SIN_FP64) * square * angle + angle
    cosine = _polynomial(square, COS_FP64) * square * square - 0.5 * square + 1.0
    return _rotate_pairs(radius, sine, cosine, quadrant)


def _rotate_pairs(radius: Values, sine: Values, cosine: Values, quadrant: Values) -> Values:
    """Return radius * sin and radius * cos of angles, adjacent, after turns by quadrants."""
    is_odd, is_upper = (quadrant & 1).astype(bool), (quadrant & 2).astype(bool)
    turned_sine = np.where(is_odd, cosine, sine)
    turned_cosine = np.where(is_odd, -sine, cosine)
    signed_radius = np.where(is_upper, -radius, radius)
    return np.stack([signed_radius * turned_sine, signed_radius * turned_cosine], axis=1).reshape(
        -1
    )


def _log_fp32(values: Values) -> Values:
    fp32, bit_values = np.float32, values.view(np.int32)
    exponent = (bit_values - np.int32(SQRT_HALF_FP32)) >> np.int32(23)
    f = (bit_values - (exponent << np.int32(23))).view(fp32) - fp32(1)  # mantissa minus 1
    e, square = exponent.astype(fp32), f * f
    correction = _polynomial(f, LOG_FP32) * square * f + e * fp32(LN2_LOW)
    logarithm: Values = (correction - fp32(0.5) * square + f) + e * fp32(LN2_HIGH)
    return logarithm


def _log_fp64(values: Values) -> Values:
    bit_values = values.view(np.int64)
    exponent = (bit_values - np.int64(SQRT_HALF_FP64)) >> np.int64(52)
    f = (bit_values - (exponent << np.int64(52))).view(np.float64) - 1.0  # mantissa minus 1
    e, square = exponent.astype(np.float64), f * f
    ratio = _polynomial(f, LOG_P_FP64) / _polynomial(f, LOG_Q_FP64)
    correction = ratio * square * f + e * LN2_LOW
    return (correction - 0.5 * square + f) + e * LN2_HIGH


def _polynomial(x: Values, coefficients: tuple[float, ...]) -> Values:
    """Evaluate a polynomial by Horner's rule in the type of ``x``."""
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + x.dtype.type(coefficient)
    return value


def _draw_integers(
    first_index: int,
    element_count: int,
    start_counter: Counter,
    values_per_block: int,
    draw: Callable[[Words], tuple[Values, Values]],
) -> Values:
    """Draw integers, and draw rejected ones again from the same block of later sequences."""
    first_block, skipped_elements = divmod(first_index, values_per_block)
    block_count = -(-(skipped_elements + element_count) // values_per_block)
    words = philox(
        start_counter.position + first_block,
        block_count,
        start_counter.sequence,
        start_counter.seed,
    )
    values, is_rejected = draw(words.reshape(-1))
    values, is_rejected = (
        values[skipped_elements : skipped_elements + element_count],
        is_rejected[skipped_elements : skipped_elements + element_count],
    )
    sequence = start_counter.sequence
    while (rejected_indices := np.flatnonzero(is_rejected)).size:
        sequence += 1 << ATTEMPT_SHIFT
        block_offsets, lanes = np.divmod(rejected_indices + skipped_elements, values_per_block)
        words = philox(
            start_counter.position + first_block, block_offsets, sequence, start_counter.seed
        )
        new_values, is_rejected_again = draw(words.reshape(-1))
        drawn_indices = np.arange(len(rejected_indices)) * values_per_block + lanes
        values[rejected_indices], is_rejected[rejected_indices] = (
            new_values[drawn_indices],
            is_rejected_again[drawn_indices],
        )
    return values


def _permute_domain(values: Values, round_keys: Words, half_widths: tuple[int, int]) -> Values:
    """Apply a Feistel network to numbers whose halves have the given numbers of bits, 4 to 32 each."""
    left_mask, right_mask = (np.uint32((1 << width) - 1) for width in half_widths)
    right_bits = np.uint64(half_widths[1])
    left, right = (values >> right_bits).astype(np.uint32), values.astype(np.uint32) & right_mask
    for round_number in range(0, ROUNDS, 2):
        left ^= _mix_bits(right ^ round_keys[round_number]) & left_mask
        right ^= _mix_bits(left ^ round_keys[round_number + 1]) & right_mask
    permuted_values: Values = left.astype(np.uint64) << right_bits | right
    return permuted_values


def _mix_bits(words: Words) -> Words:
    """Return the finalizer of MurmurHash3 (A. Appleby): each input bit changes half of the output bits."""
    words = (words ^ words >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    words = (words ^ words >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return words ^ words >> np.uint32(16)


# --- Philox4x32-10: counter-based random numbers, equal in numpy and on the device ----------------
#
# Each number of a sequence is a function of its position and a key, so threads need no shared state (J. K.
# Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11).

_ROUNDS = 10
# Multipliers and Weyl increments of Philox4x32 (Salmon et al., SC11, section 3.3).
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_WORD_BITS = np.uint64(32)
_LOW_WORD_MASK = np.uint64(0xFFFFFFFF)


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
        a, b = words[0] * np.uint64(_MULTIPLIERS[0]), words[2] * np.uint64(_MULTIPLIERS[1])
        words = [
            (b >> _WORD_BITS) ^ words[1] ^ np.uint64(round_keys[0]),
            b & _LOW_WORD_MASK,
            (a >> _WORD_BITS) ^ words[3] ^ np.uint64(round_keys[1]),
            a & _LOW_WORD_MASK,
        ]
        round_keys = [
            (k + step) & 0xFFFFFFFF for k, step in zip(round_keys, _INCREMENTS, strict=True)
        ]
    return np.stack(words, axis=1).astype(np.uint32)
