from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.arrays.random_values import philox

WORD64 = st.integers(0, 2**64 - 1)

# Random123 1.14, tests/kat_vectors, lines "philox4x32 10": counter, key, and what comes of them. The
# counter here is (sequence, place), each with its low word first.
PUBLISHED = {
    "zeros": (0, 0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": (2**64 - 1, 2**64 - 1, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        0x85A308D3_243F6A88,
        0x03707344_13198A2E,
        0x299F31D0_A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_philox_published_vectors(name: str) -> None:
    place, sequence, key, words = PUBLISHED[name]

    assert philox(place, 1, sequence, key).tolist() == [list(words)]


@given(st.integers(0, 2**63), st.integers(1, 50), WORD64, WORD64)
def test_philox_block_depends_on_position_only(
    first: int, count: int, sequence: int, key: int
) -> None:
    blocks = philox(first, count, sequence, key)
    last = philox(first + count - 1, 1, sequence, key)

    assert blocks.shape == (count, 4)
    assert blocks[-1].tolist() == last[0].tolist()
