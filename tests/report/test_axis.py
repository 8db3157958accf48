"""Axes: the positions of ticks and their labels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.report.axis import LogUnit, Unit, log_axis, rounded_axis, tight_axis

MIB, GIB = 2**20, 2**30

finite_floats = st.floats(-1e15, 1e15)


@pytest.mark.parametrize(
    ("low", "high", "unit", "labels"),
    [
        (0, 54 * GIB, "bytes", "0 B, 16 GiB, 32 GiB, 48 GiB"),
        (0, 1300 * MIB, "bytes", "0 B, 512 MiB, 1 GiB"),
        (0, 5 * GIB, "bytes", "0 B, 1 GiB, 2 GiB, 3 GiB, 4 GiB, 5 GiB"),
        (0, 3, "bytes", "0 B, 1 B, 2 B, 3 B"),
        (0, 0.0013, "seconds", "0 us, 500 us, 1000 us"),
        (0, 100, "seconds", "0 s, 20 s, 40 s, 60 s, 80 s, 100 s"),
        (0, 1000, "seconds", "0 min, 5 min, 10 min, 15 min"),
        (0, 90_000, "seconds", "0 h, 6 h, 12 h, 18 h, 24 h"),
        (0, 1e6, "seconds", "0 d, 5 d, 10 d"),
        (1_999_990, 2_000_010, "count", "1,999,990, 1,999,995, 2,000,000, 2,000,005, 2,000,010"),
        (0, 0.3, "count", "0"),
        (-0.1, 0.31, "ratio", "-10%, 0%, 10%, 20%, 30%"),
    ],
)
def test_ticks_are_round_in_the_unit_of_their_axis(
    low: float, high: float, unit: Unit, labels: str
) -> None:
    assert ", ".join(tick.label for tick in tight_axis(low, high, unit).ticks) == labels


@given(finite_floats, finite_floats, st.sampled_from(["bytes", "seconds", "count", "ratio"]))
def test_rounded_axis_contains_zero_and_its_data_and_ends_at_ticks(
    one: float, other: float, unit: Unit
) -> None:
    low, high = min(one, other), max(one, other)
    axis = rounded_axis(low, high, unit)
    assert axis.share(low) >= -1e-9
    assert axis.share(high) <= 1 + 1e-9
    assert axis.low <= 0 <= axis.high
    assert 2 <= len(axis.ticks) <= 13
    assert axis.share(axis.ticks[0].value) == pytest.approx(0)
    assert axis.share(axis.ticks[-1].value) == pytest.approx(1)


def test_tight_axis_of_one_instant_has_a_width() -> None:
    axis = tight_axis(5, 5, "count")
    assert (axis.low, axis.high, [tick.label for tick in axis.ticks]) == (4.5, 5.5, ["5"])


@pytest.mark.parametrize("value", [1e17, -1e300, 5e-324])
def test_axis_of_one_value_of_any_size_has_a_width(value: float) -> None:
    for axis in (tight_axis(value, value, "seconds"), rounded_axis(value, value, "seconds")):
        assert axis.low < axis.high
        assert len(axis.ticks) <= 13


@given(
    st.floats(1e-9, 1e15),
    st.floats(1.0, 1e12),
    st.sampled_from(["bytes", "seconds", "count", "rate"]),
)
def test_logarithmic_axis_has_few_ticks_and_all_are_on_it(
    low: float, factor: float, unit: LogUnit
) -> None:
    axis = log_axis(low, low * factor, unit)

    shares = [axis.share(tick.value) for tick in axis.ticks]
    assert 1 <= len(shares) <= 12
    assert shares == sorted(set(shares))
    assert all(-1e-6 <= share <= 1 + 1e-6 for share in shares)
    assert axis.share(low) <= axis.share(low * factor)
    assert axis.shares(np.array([axis.low, axis.high])) == pytest.approx([0, 1])
