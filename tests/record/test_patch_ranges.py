"""Compares the conversion of pages to ranges with a simple decoder that reads every bit."""

from __future__ import annotations

import ctypes
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record.on_host import (
    BITMAP_BYTES,
    PAGE_SHIFTS,
    Page,
    Range,
    build_patch,
    read_ranges,
)

READ, WRITE = 0, 1
BITS = BITMAP_BYTES * 8
WINDOW = 1 << PAGE_SHIFTS[0]
BASE = 0x7F12_3400_0000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_patch(tmp_path_factory.mktemp("patch"))


def key(launch: int, mode: int, level: int, address: int) -> int:
    return 1 << 63 | launch << 46 | mode << 44 | level << 43 | address >> PAGE_SHIFTS[level]


def bitmap(kind: str, seed: int) -> bytes:
    """Return bits as kernels set them: all, none, runs, every second one, or random."""
    rng = random.Random(seed)
    if kind == "full":
        return b"\xff" * BITMAP_BYTES
    if kind == "strided":
        return b"\x55" * BITMAP_BYTES
    if kind == "noise":
        return rng.randbytes(BITMAP_BYTES)
    bits = 0
    for _ in range(rng.randrange(4)):
        first = rng.randrange(BITS)
        bits |= ((1 << rng.randrange(1, 3000)) - 1) << first
    return (bits & ((1 << BITS) - 1)).to_bytes(BITMAP_BYTES, "little")


Content = tuple[
    int, int, int, int, str, int
]  # launch, mode, level, quarter of the memory, kind of bits, seed
CONTENTS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 65536, 131071]),
        st.sampled_from([READ, WRITE]),
        st.integers(0, 1),
        st.integers(0, 11),
        st.sampled_from(["full", "strided", "noise", "runs", "runs"]),
        st.integers(0, 1 << 30),
    ),
    max_size=6,
)


def base_of(level: int, quarter: int) -> int:
    return BASE + ((quarter if level else quarter // 4) << PAGE_SHIFTS[level])


def brute_force(contents: list[Content]) -> dict[tuple[int, int], set[int]]:
    accessed_bytes: dict[tuple[int, int], set[int]] = {}
    for launch, mode, level, quarter, kind, seed in contents:
        size = 1 if level else 4
        base = base_of(level, quarter)
        bits = int.from_bytes(bitmap(kind, seed), "little")
        touched_bytes = accessed_bytes.setdefault((launch, mode), set())
        for granule, bit in enumerate(reversed(f"{bits:b}")):
            if bit == "1":
                touched_bytes.update(range(base + granule * size, base + (granule + 1) * size))
    return {name: touched_bytes for name, touched_bytes in accessed_bytes.items() if touched_bytes}


def pages_of(contents: list[Content]) -> tuple[ctypes.Array[Page], bytes]:
    pages = (Page * len(contents))()
    bitmaps = b""
    for page, (launch, mode, level, quarter, kind, seed) in zip(pages, contents, strict=True):
        base = base_of(level, quarter)
        page.key = key(launch, mode, level, base)
        page.full = kind == "full"
        # The bitmap of a full page is not copied to the host.
        bitmaps += b"\xa7" * BITMAP_BYTES if kind == "full" else bitmap(kind, seed)
    return pages, bitmaps


def one_page_each(contents: list[Content]) -> list[Content]:
    page_addresses = {}
    for content in contents:
        launch, mode, level, quarter = content[:4]
        page_addresses[launch, mode, level, quarter if level else quarter // 4] = content
    return list(page_addresses.values())


@settings(max_examples=50)
@given(contents=CONTENTS)
def test_ranges_are_bytes_of_set_bits_in_order(
    library: ctypes.CDLL, contents: list[Content]
) -> None:
    contents = one_page_each(contents)
    ranges = read_ranges(library, *pages_of(contents), len(contents))
    bytes_by_access: dict[tuple[int, int], set[int]] = {}
    for accessed in ranges:
        touched_bytes = bytes_by_access.setdefault((accessed.launch, accessed.mode), set())
        for begin, end in accessed.pieces():
            assert touched_bytes.isdisjoint((begin, end - 1)), "no byte twice"
            touched_bytes.update(range(begin, end))
    assert bytes_by_access == brute_force(contents)
    sort_keys = [(accessed.launch, accessed.mode, accessed.lo) for accessed in ranges]
    assert sort_keys == sorted(sort_keys)


def test_adjacent_pieces_are_joined_across_pages_and_levels(library: ctypes.CDLL) -> None:
    contents = [
        (5, WRITE, 0, 4, "full", 0),
        (5, WRITE, 1, 8, "full", 0),
        (5, WRITE, 0, 0, "full", 0),
    ]
    (merged,) = read_ranges(library, *pages_of(contents), 3)
    assert (merged.lo, merged.bytes, merged.count) == (BASE, 2 * WINDOW + WINDOW // 4, 1)


def test_column_is_one_range_across_pages(library: ctypes.CDLL) -> None:
    contents = [(5, WRITE, 0, 4 * i, "strided", 0) for i in range(2)]
    (merged,) = read_ranges(library, *pages_of(contents), 2)
    assert (merged.lo, merged.bytes, merged.stride, merged.count) == (BASE, 4, 8, 2 * WINDOW // 8)


def test_two_pieces_are_not_joined_and_second_may_begin_a_range(library: ctypes.CDLL) -> None:
    bits = sum(1 << granule for granule in (0, 100, 110, 120, 130, 500, 900))
    pages = (Page * 1)(Page(key(0, READ, 1, BASE), 0))
    ranges = read_ranges(library, pages, bits.to_bytes(BITMAP_BYTES, "little"), 1)
    assert [(accessed.lo - BASE, accessed.stride, accessed.count) for accessed in ranges] == [
        (0, 0, 1),
        (100, 10, 4),
        (500, 0, 1),
        (900, 0, 1),
    ]


def test_pieces_of_range_do_not_touch(library: ctypes.CDLL) -> None:
    contents: list[Content] = [(0, READ, 1, i, "noise", i) for i in range(4)]
    ranges = read_ranges(library, *pages_of(contents), 4)
    pieces = sorted(piece for accessed in ranges for piece in accessed.pieces())
    assert all(end < begin for (_, end), (begin, _) in pairwise(pieces))


def test_page_without_key_is_skipped(library: ctypes.CDLL) -> None:
    pages = (Page * 1)()
    empty: list[Range] = read_ranges(library, pages, b"\xff" * BITMAP_BYTES, 1)
    assert empty == []
