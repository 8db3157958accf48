"""Bytes, seconds, counts, rates and ratios as text, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.units import (
    format_bytes,
    format_count,
    format_rate,
    format_ratio,
    format_seconds,
    parse_bytes,
    parse_ratio,
    round_up_bytes,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (1024**3 - 1, "1.00 GiB"),
        (-(54 * GIB), "-54.0 GiB"),
        (141 * GIB, "141 GiB"),
    ],
)
def test_bytes_have_three_significant_digits_and_a_binary_unit(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(0, 2**70))
def test_formatted_bytes_parse_to_nearly_the_same_size(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.006)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("0", 0), ("512M", 512 * 2**20), ("10GiB", 10 * GIB), (" 1.5 gb ", 3 * GIB // 2)],
)
def test_sizes_are_parsed_with_powers_of_1024(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "-1", "1e9", "ten", "1 QiB", "9" * 50])
def test_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.2e-9, "1.2 ns"),
        (0.9999e-3, "1 ms"),
        (3.4, "3.4 s"),
        (125, "2 min 05 s"),
        (7380, "2 h 03 min"),
        (-0.5, "-500 ms"),
    ],
)
def test_seconds_have_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("amount", "text"), [(999.0, "999 B/s"), (999.6, "1 kB/s"), (3.35e12, "3.35 TB/s")]
)
def test_rates_have_a_decimal_prefix(amount: float, text: str) -> None:
    assert format_rate(amount, "B") == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.0, "0.0%"),
        (1e-6, "<0.1%"),
        (-1e-6, ">-0.1%"),
        (0.1234, "12.3%"),
        (0.9994, "99.9%"),
        (0.9999, "100%"),
        (2.5, "250%"),
    ],
)
def test_nonzero_ratio_is_never_shown_as_zero(ratio: float, text: str) -> None:
    assert format_ratio(ratio) == text


def test_counts_have_separated_thousands() -> None:
    assert format_count(1139322) == "1,139,322"


def test_ratios_are_parsed_as_percentages_or_plain() -> None:
    assert (parse_ratio("5%"), parse_ratio(" 0.05 ")) == (0.05, 0.05)


@pytest.mark.parametrize("text", ["", "-1%", "inf", "nan", "5 percent"])
def test_invalid_ratio_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not a percentage"):
        parse_ratio(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (700, "700 B"),
        (2 << 30, "2.00 GiB"),
        (2_622_488_576, "2.45 GiB"),
        (10_737_418_241, "10.1 GiB"),
    ],
)
def test_rounded_up_size_is_sufficient_when_its_text_is_parsed(size_bytes: int, text: str) -> None:
    rounded_bytes = round_up_bytes(size_bytes)
    assert format_bytes(rounded_bytes) == text
    assert parse_bytes(text) == rounded_bytes >= size_bytes
