from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.gpu.api.arrays import (
    BF16,
    ELEMENTS,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    FP64,
    INT8,
    INT32,
    Element,
    decode,
    encode,
)

singles = st.floats(width=32, allow_nan=False, allow_infinity=False)
EIGHT_BITS = [FP8_E4M3, FP8_E5M2]


@given(st.lists(st.floats(-65504, 65504, width=32), min_size=1))
def test_half_precision_values_match_numpy(values: list[float]) -> None:
    assert encode(values, FP16).tolist() == np.float16(values).view(np.uint16).tolist()


@given(singles)
def test_bfloat16_is_rounded_to_nearest(value: float) -> None:
    rounded = decode(encode([value], BF16), BF16)[0]

    upper_half = int(np.float32([value]).view(np.uint32)[0]) >> 16
    nearby_values = [(upper_half + step) << 16 for step in (-1, 0, 1) if upper_half + step >= 0]
    candidates = np.array(nearby_values, np.uint32).view(np.float32).astype(np.float64)
    finite = candidates[np.isfinite(candidates)]
    assert abs(rounded - value) <= np.abs(finite - value).min()


@pytest.mark.parametrize("element", EIGHT_BITS, ids=lambda element: element.name)
@given(singles)
def test_fp8_is_rounded_to_nearest(element: Element, value: float) -> None:
    all_values = decode(np.arange(256, dtype=np.uint8), element)
    finite = all_values[np.isfinite(all_values)]
    bits = encode([value], element)

    clamped = np.clip(value, finite.min(), finite.max())
    distance = np.abs(finite - clamped)
    assert abs(decode(bits, element)[0] - clamped) == distance.min()
    if np.count_nonzero(np.unique(finite[distance == distance.min()])) == 2:
        assert bits[0] % 2 == 0


# "FP8 Formats for Deep Learning" (arXiv 2209.05433), table 1.
def test_fp8_limits_match_publication() -> None:
    e4m3, e5m2 = (decode(np.arange(256, dtype=np.uint8), element) for element in EIGHT_BITS)

    assert (e4m3[0x7E], e4m3[0x08], e4m3[0x07], e4m3[0x01]) == (448, 2**-6, 0.875 * 2**-6, 2**-9)
    assert (e5m2[0x7B], e5m2[0x04], e5m2[0x03], e5m2[0x01]) == (
        57344,
        2**-14,
        0.75 * 2**-14,
        2**-16,
    )
    assert np.flatnonzero(np.isnan(e4m3)).tolist() == [0x7F, 0xFF]
    assert np.flatnonzero(np.isnan(e5m2)).tolist() == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
    assert np.flatnonzero(np.isinf(e5m2)).tolist() == [0x7C, 0xFC]


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_exact_values_round_trip(element: Element) -> None:
    values = [-16.0, -3.0, 0.0, 1.0, 2.0, 96.0]

    bits = encode(values, element)

    assert bits.dtype == element.storage_dtype
    assert bits.nbytes == len(values) * element.size_bytes
    assert decode(bits, element).tolist() == values


def test_integers_are_rounded_and_clamped() -> None:
    assert encode([-200, -0.6, 0.5, 1.5, 300], INT8).tolist() == [-128, -1, 0, 2, 127]
    assert encode([-1e12, 1e12], INT32).tolist() == [-(2**31), 2**31 - 1]


def test_all_ones_byte_pattern_is_nan_in_every_floating_format() -> None:
    for element in (FP64, FP32, FP16, BF16, FP8_E4M3, FP8_E5M2):
        poison = np.full(element.size_bytes, 0xFF, np.uint8).view(element.storage_dtype)
        assert np.isnan(decode(poison, element)).all(), element.name
