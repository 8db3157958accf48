"""Tests that the hash of a set of bytes does not depend on how the set is divided into ranges."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record.on_host import build_patch

PRIME = 2**61 - 1
POINT = 0x13E3779B97F4A7C5


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_patch(tmp_path_factory.mktemp("hash"))


def hash_of_pieces(library: ctypes.CDLL, lo: int, size: int, stride: int, count: int) -> int:
    numbers = (ctypes.c_uint64(number) for number in (lo, size, stride, count))
    hashed: int = library.byte_set_hash(*numbers)
    return hashed


def polynomial(addresses: set[int]) -> int:
    """Return the hash by its definition."""
    return sum(pow(POINT, address, PRIME) for address in addresses) * (POINT - 1) % PRIME


@settings(max_examples=100, deadline=None)
@given(
    lo=st.integers(0, 2**47),
    size=st.integers(1, 12),
    gap=st.integers(0, 300),
    count=st.integers(1, 40),
)
def test_hash_of_pieces_is_that_of_their_bytes(
    library: ctypes.CDLL, lo: int, size: int, gap: int, count: int
) -> None:
    pieces = {lo + i * (size + gap) + j for i in range(count) for j in range(size)}
    assert hash_of_pieces(library, lo, size, size + gap, count) == polynomial(pieces)


@settings(max_examples=50, deadline=None)
@given(lo=st.integers(0, 2**47), cuts=st.sets(st.integers(1, 2**20), min_size=2, max_size=8))
def test_hash_of_divided_range_is_that_of_the_range(
    library: ctypes.CDLL, lo: int, cuts: set[int]
) -> None:
    limits = [0, *sorted(cuts)]
    combined = 0
    for begin, end in pairwise(limits):
        part = hash_of_pieces(library, lo + begin, end - begin, 0, 1)
        combined = library.byte_set_hash_of_union(ctypes.c_uint64(combined), ctypes.c_uint64(part))
    assert combined == hash_of_pieces(library, lo, limits[-1], 0, 1)
