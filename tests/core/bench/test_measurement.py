from __future__ import annotations

import pytest

from cudakit.core.bench.measurement import Samples


def test_cycles_are_times_multiplied_by_clocks() -> None:
    assert Samples((2.0, 3.0), (5.0, 7.0)).cycles == (10.0, 21.0)


def test_samples_without_clocks_have_no_cycles() -> None:
    assert Samples((2.0, 3.0)).cycles == ()


def test_samples_with_unmatched_clock_are_refused() -> None:
    with pytest.raises(ValueError, match="1 clocks for 2 times"):
        Samples((2.0, 3.0), (5.0,))
