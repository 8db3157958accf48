"""Tests that the patch records exactly the accessed bytes. The patch runs on the host."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record.on_host import (
    BITMAP_BYTES,
    MAX_BOXES,
    MAX_MAPS,
    PAGE_SHIFTS,
    Box,
    TensorMap,
    build_patch,
    read_ranges,
)

SYNC, READ, WRITE, ATOMIC = range(4)
# Sanitizer_DeviceMemoryFlags, and the mode of an access with them.
FLAGS = {
    1: READ,
    2: WRITE,
    3: ATOMIC,
    1 | 1 << 6: READ,  # a strong access at GPU scope
    2 | 1 << 8: ATOMIC,
    3 | 1 << 8: ATOMIC,
    3 | 1 << 2: SYNC,
    1 | 1 << 7: SYNC,
    2 | 1 << 7: SYNC,
}
PREFETCH = 1 | 1 << 3
BY_GRID = 1 << 22
SUMMARY_BYTES = BITMAP_BYTES // 32  # summary with a bit for each word of 32 bits
CHUNK_PAGES = 3968
PAGE = 1 << PAGE_SHIFTS[0]
ALL_WORDS = (1 << SUMMARY_BYTES * 8) - 1
ALL_LANES = (1 << 32) - 1
ADDRESSES = (0x7F12_3400_0000, 0x7F12_3400_0000 + PAGE, 0x200_0000, (1 << 57) - PAGE)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_patch(tmp_path_factory.mktemp("patch"))


@dataclass
class Arena:
    """An arena, and the functions that write to it and read it."""

    library: ctypes.CDLL
    address: int
    log2: int

    def userdata(self, launch: int) -> ctypes.c_uint64:
        return ctypes.c_uint64(
            self.library.userdata_of(ctypes.c_void_p(self.address), self.log2, launch)
        )

    def access(self, launch: int, address: int, size: int, flags: int) -> None:
        self.library.ck_memory_access(
            self.userdata(launch), ctypes.c_uint64(7), ctypes.c_uint64(address), size, flags, None
        )

    def header(self) -> tuple[int, ...]:
        return tuple((ctypes.c_uint32 * 6).from_address(self.address))

    @property
    def lost(self) -> int:
        return self.header()[3]

    def maps(self) -> list[TensorMap]:
        address = self.library.maps_of(ctypes.c_void_p(self.address), self.log2)
        return list((TensorMap * min(self.header()[4], MAX_MAPS)).from_address(address))

    def boxes(self) -> list[Box]:
        address = self.library.boxes_of(ctypes.c_void_p(self.address), self.log2)
        return list((Box * min(self.header()[5], MAX_BOXES)).from_address(address))

    def lost_launches(self) -> set[int]:
        bits = int.from_bytes(ctypes.string_at(self.address + 4096, 16384), "little")
        return {launch for launch in range(bits.bit_length()) if bits >> launch & 1}

    def bitmap(self, page: int) -> bytes:
        address = self.library.bitmap_in(ctypes.c_void_p(self.address), self.log2, page)
        return ctypes.string_at(address, BITMAP_BYTES)

    def summary(self, page: int) -> int:
        """Return one bit per word of a page's bitmap, set if the whole word was set at once."""
        address = self.library.summary_in(ctypes.c_void_p(self.address), self.log2, page)
        return int.from_bytes(ctypes.string_at(address, SUMMARY_BYTES), "little")

    def bytes(self) -> dict[tuple[int, int], set[int]]:
        """Return the accessed bytes by launch and mode."""
        arena_address = ctypes.c_void_p(self.address)
        pages = ctypes.c_void_p(self.library.pages_of(arena_address, self.log2))
        count = self.library.claimed_page_count(arena_address)
        bitmaps = b"".join(map(self.bitmap, range(count)))
        bytes_by_access: dict[tuple[int, int], set[int]] = {}
        for accessed in read_ranges(self.library, pages, bitmaps, count):
            for begin, end in accessed.pieces():
                bytes_by_access.setdefault((accessed.launch, accessed.mode), set()).update(
                    range(begin, end)
                )
        return bytes_by_access


@contextmanager
def arena(library: ctypes.CDLL, log2: int = 8, pages: int = 64) -> Iterator[Arena]:
    arena_address = library.new_arena(log2, pages)
    try:
        yield Arena(library, arena_address, log2)
    finally:
        library.free_arena(ctypes.c_void_p(arena_address), log2)


ACCESSES = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 131071]),
        st.sampled_from(ADDRESSES),
        st.integers(0, PAGE - 1) | st.integers(0, 64),
        st.sampled_from([1, 2, 4, 8, 16, 32]) | st.integers(1, 32),
        st.sampled_from(sorted(FLAGS)),
        st.integers(1, 30),  # adjacent accesses follow, as in a warp that streams memory
    ),
    max_size=15,
)


@given(accesses=ACCESSES, log2=st.integers(8, 10), fraction=st.floats(0.05, 1))
def test_every_byte_is_recorded_or_launch_is_lost(
    library: ctypes.CDLL,
    accesses: list[tuple[int, int, int, int, int, int]],
    log2: int,
    fraction: float,
) -> None:
    expected: dict[tuple[int, int], set[int]] = {}
    with arena(library, log2, max(1, int(fraction * 2 ** (log2 - 2)))) as used_arena:
        for launch, base, offset, size, flags, repetitions in accesses:
            # Accesses are aligned to their size (CUDA C++ Programming Guide, "Size and Alignment").
            step = 1 << (size - 1).bit_length()
            for i in range(repetitions):
                address = base + (offset // step + i) * step % PAGE
                used_arena.access(launch, address, size, flags)
                accessed = expected.setdefault((launch, FLAGS[flags]), set())
                accessed.update(range(address, address + size))
        recorded_bytes, lost = used_arena.bytes(), used_arena.lost_launches()
        assert used_arena.lost == len(lost)
    for name, accessed in expected.items():
        if name[0] in lost:
            assert recorded_bytes.get(name, set()) <= accessed
        else:
            assert recorded_bytes[name] == accessed
    assert recorded_bytes.keys() <= expected.keys()


class WarpAccess(ctypes.Structure):
    """``warp_access`` of patch_on_host.h: the accesses of all lanes by one instruction."""

    _fields_ = (
        ("userdata", ctypes.c_uint64),
        ("address", ctypes.c_uint64 * 32),
        ("lanes", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("copy", ctypes.c_uint32),
        ("zeros", ctypes.c_uint32 * 32),
    )


def warp_access(
    used_arena: Arena, launch: int, addresses: list[int], lanes: int, size: int, flags: int
) -> set[int]:
    """Access with all lanes of a warp at once; return the bytes."""
    warp = WarpAccess(
        used_arena.userdata(launch).value, (ctypes.c_uint64 * 32)(*addresses), lanes, size, flags
    )
    used_arena.library.access_in_warp(ctypes.byref(warp))
    return {
        address + i
        for lane, address in enumerate(addresses)
        if lanes >> lane & 1
        for i in range(size)
    }


def pattern(kind: str, base: int, start: int, size: int, seed: int) -> list[int]:
    """Return an address for each lane, in patterns of real kernels."""
    rng = random.Random(seed)
    first = base + start * size
    return {
        "row": lambda: [first + lane * size for lane in range(32)],
        "backwards": lambda: [first + (31 - lane) * size for lane in range(32)],
        "same": lambda: [first] * 32,
        "pairs": lambda: [first + lane // 2 * size for lane in range(32)],
        "tile": lambda: [first + lane // 8 * PAGE + lane % 8 * size for lane in range(32)],
        "column": lambda: [first + lane * 16384 for lane in range(32)],
        "near": lambda: [first + rng.randrange(40) * size for _ in range(32)],
        "far": lambda: [first + rng.randrange(1 << 9) * (size << 4) for _ in range(32)],
    }[kind]()


WARPS = st.lists(
    st.tuples(
        st.sampled_from(["row", "backwards", "same", "pairs", "tile", "column", "near", "far"]),
        st.sampled_from([0, 131071]),
        st.integers(0, 100) | st.integers(4000, 4096),
        st.sampled_from([1, 2, 4, 8, 16, 32]),
        st.just((1 << 32) - 1) | st.integers(1, (1 << 32) - 1),
        st.sampled_from(sorted(FLAGS)),
        st.integers(0, 1 << 20),
    ),
    max_size=8,
)


@given(warps=WARPS)
def test_every_byte_of_a_warp_is_recorded(
    library: ctypes.CDLL, warps: list[tuple[str, int, int, int, int, int, int]]
) -> None:
    expected: dict[tuple[int, int], set[int]] = {}
    with arena(library, 11, 512) as used_arena:
        for kind, launch, start, size, lanes, flags, seed in warps:
            addresses = pattern(kind, ADDRESSES[0], start, size, seed)
            accessed = warp_access(used_arena, launch, addresses, lanes, size, flags)
            expected.setdefault((launch, FLAGS[flags]), set()).update(accessed)
        assert used_arena.lost == 0
        assert used_arena.bytes() == expected


@given(
    kind=st.sampled_from(["row", "backwards", "same", "pairs", "tile", "near"]),
    start=st.integers(0, 100),
    size=st.sampled_from([4, 8, 16]),
    zeros=st.lists(st.just(0) | st.integers(0, 16), min_size=32, max_size=32),
    lanes=st.just((1 << 32) - 1) | st.integers(1, (1 << 32) - 1),
)
def test_warp_copy_reads_all_but_zero_filled_bytes(
    library: ctypes.CDLL, kind: str, start: int, size: int, zeros: list[int], lanes: int
) -> None:
    addresses = pattern(kind, ADDRESSES[0], start, size, start)
    copied_sizes = [size - min(zero, size) for zero in zeros]
    warp = WarpAccess(
        address=(ctypes.c_uint64 * 32)(*addresses),
        lanes=lanes,
        bytes=size,
        copy=True,
        zeros=(ctypes.c_uint32 * 32)(*(size - copied_bytes for copied_bytes in copied_sizes)),
    )
    with arena(library) as used_arena:
        warp.userdata = used_arena.userdata(5).value
        library.access_in_warp(ctypes.byref(warp))
        read = {
            address + i
            for lane, address in enumerate(addresses)
            if lanes >> lane & 1
            for i in range(copied_sizes[lane])
        }
        assert used_arena.bytes() == ({(5, READ): read} if read else {})


@pytest.mark.parametrize(("size", "words"), [(4, 1), (8, 2), (16, 4), (1, 1), (2, 2)])
def test_streaming_warp_sets_each_word_and_summary_bit_once(
    library: ctypes.CDLL, size: int, words: int
) -> None:
    with arena(library) as used_arena:
        used_arena.access(0, PAGE + 0x1000, size, 1)
        atomics_before = library.atomic_count()
        warp_access(used_arena, 0, pattern("row", PAGE, 0, size, 0), ALL_LANES, size, 1)
        assert library.atomic_count() == atomics_before + words + 1
        assert used_arena.summary(0) == (1 << words) - 1


def test_unaligned_run_is_not_in_summary(library: ctypes.CDLL) -> None:
    with arena(library) as used_arena:
        warp_access(used_arena, 0, pattern("row", PAGE, 1, 8, 0), ALL_LANES, 8, 2)
        assert used_arena.summary(0) == 0
        assert used_arena.bytes() == {(0, WRITE): set(range(PAGE + 8, PAGE + 0x108))}


def test_complete_words_of_each_run_are_in_summary(library: ctypes.CDLL) -> None:
    """Access two rows of 160 bytes and one of 64, like a tile of a matrix."""
    starts = [PAGE, PAGE + 0x400, PAGE + 0x800]
    with arena(library) as used_arena:
        lanes = [starts[lane // 10 if lane < 20 else 2] + lane % 10 * 16 for lane in range(24)]
        lanes[20:] = [starts[2] + i * 16 for i in range(4)]
        warp_access(used_arena, 0, lanes + [0] * 8, (1 << 24) - 1, 16, 1)
        assert used_arena.summary(0) == 1 << 0 | 1 << 8
        rows = zip(starts, (160, 160, 64), strict=True)
        assert used_arena.bytes() == {
            (0, READ): {address + i for address, size in rows for i in range(size)}
        }


def test_repeated_access_makes_no_atomics(library: ctypes.CDLL) -> None:
    with arena(library) as used_arena:
        used_arena.access(3, 0x10000, 16, 1)
        atomics_before = library.atomic_count()
        for _ in range(10):
            used_arena.access(3, 0x10000, 16, 1)
            used_arena.access(3, 0x10004, 4, 1)
        assert library.atomic_count() == atomics_before


def test_full_arena_claims_each_page_once(library: ctypes.CDLL) -> None:
    with arena(library, 8, 1) as used_arena:
        for _ in range(2):
            atomics_before = library.atomic_count()
            for i in range(1000):
                used_arena.access(3, PAGE * i, 4, 1)
        assert library.atomic_count() == atomics_before, "the table is full"
        assert used_arena.lost_launches() == {3}
        used_arena.access(4, PAGE * 9, 4, 1)
        assert used_arena.lost_launches() == {3, 4}
        assert used_arena.lost == 2


def test_summary_of_streamed_page_is_full(library: ctypes.CDLL) -> None:
    with arena(library) as used_arena:
        for address in range(PAGE, 3 * PAGE, 512):
            warp_access(used_arena, 0, pattern("row", address, 0, 16, 0), ALL_LANES, 16, 2)
        assert used_arena.header()[2] == 2
        assert [used_arena.summary(page) for page in range(3)] == [ALL_WORDS, ALL_WORDS, 0]
        assert [used_arena.bitmap(page) for page in range(2)] == [b"\xff" * BITMAP_BYTES] * 2


def test_words_set_bit_by_bit_are_not_in_summary(library: ctypes.CDLL) -> None:
    with arena(library) as used_arena:
        for address in range(PAGE, 2 * PAGE, 4):
            used_arena.access(0, address, 4, 2)
        assert used_arena.bitmap(0) == b"\xff" * BITMAP_BYTES
        assert used_arena.summary(0) == 0


def test_each_page_of_every_chunk_has_its_bitmap_and_summary(
    library: ctypes.CDLL,
) -> None:
    count = 2 * CHUNK_PAGES + 3
    with arena(library, 16, count) as used_arena:
        for page in range(count):
            used_arena.access(0, (page + 1) * PAGE, 4, 1)
        for page in (0, CHUNK_PAGES - 1, CHUNK_PAGES, 2 * CHUNK_PAGES, count - 1):
            row = pattern("row", (page + 1) * PAGE, 8 * (page % 50), 16, 0)
            warp_access(used_arena, 0, row, ALL_LANES, 16, 1)
        for page in range(count):
            word = 0b1 if used_arena.summary(page) == 0 or page % 50 else (1 << 128) - 1
            assert int.from_bytes(used_arena.bitmap(page), "little") & 0b11 == word & 0b11
        streamed = {page for page in range(count) if used_arena.summary(page)}
        assert streamed == {0, CHUNK_PAGES - 1, CHUNK_PAGES, 2 * CHUNK_PAGES, count - 1}
        assert used_arena.lost == 0


@pytest.mark.parametrize("size", [2, 8])
def test_concurrent_threads_claim_each_page_once(library: ctypes.CDLL, size: int) -> None:
    begin, span = PAGE, 5 * PAGE // 2
    for _ in range(5):
        with arena(library) as used_arena:
            library.touch_in_threads(
                used_arena.userdata(9), ctypes.c_uint64(begin), span // size, size, 1 | 2
            )
            assert used_arena.bytes() == {(9, ATOMIC): set(range(begin, begin + span))}
            assert used_arena.header()[2] == (3 if size == 8 else 10)


def test_prefetches_and_launches_without_user_data_are_ignored(library: ctypes.CDLL) -> None:
    with arena(library) as used_arena:
        used_arena.access(0, 0x10000, 4, PREFETCH)
        library.ck_memory_access(
            ctypes.c_uint64(0), ctypes.c_uint64(7), ctypes.c_uint64(0x10000), 4, 1, None
        )
        assert used_arena.header()[2:] == (0, 0, 0, 0)


def test_shared_user_data_is_distinguished_by_grid(library: ctypes.CDLL) -> None:
    pc, address = ctypes.c_uint64(7), 0x10000
    with arena(library) as used_arena:
        shared = ctypes.c_uint64(used_arena.userdata(131070).value | BY_GRID)
        for grid in (1, 3, (1 << 40) + 5):
            library.set_grid_id(ctypes.c_uint64(grid))
            library.ck_memory_access(
                shared, pc, ctypes.c_uint64(address + grid % 64 * 4), 4, 1, None
            )
            library.ck_copy_async(shared, pc, ctypes.c_uint64(address + 4096), 64, 16, 0)
            library.ck_bulk_store(shared, pc, ctypes.c_uint64(address + 8192), 0, 1, 0)
        library.set_grid_id(ctypes.c_uint64(77))
        used_arena.access(131070, address, 4, 1)
        expected = {(131070, READ): set(range(address, address + 4))}
        for grid, launch in ((1, 131071), (3, 1), (5, 3)):
            word = set(range(address + grid * 4, address + grid * 4 + 4))
            expected[launch, READ] = word | set(range(address + 4096, address + 4112))
            expected[launch, WRITE] = set(range(address + 8192, address + 8208))
        assert used_arena.bytes() == expected


def test_async_copy_reads_all_but_zero_filled_bytes(library: ctypes.CDLL) -> None:
    with arena(library) as used_arena:
        pc = ctypes.c_uint64(7)
        library.ck_copy_async(used_arena.userdata(0), pc, ctypes.c_uint64(0x10000), 64, 16, 0)
        library.ck_copy_async(used_arena.userdata(0), pc, ctypes.c_uint64(0x10010), 64, 16, 13)
        library.ck_copy_async(used_arena.userdata(0), pc, ctypes.c_uint64(0), 64, 16, 16)
        assert used_arena.bytes() == {(0, READ): set(range(0x10000, 0x10013))}


def test_bulk_copies_access_masked_bytes(library: ctypes.CDLL) -> None:
    with arena(library) as used_arena:
        pc = ctypes.c_uint64(7)
        source = 0x1FFF0
        library.ck_bulk_load(used_arena.userdata(0), pc, ctypes.c_uint64(source), 0, 0, 5000, 0)
        library.ck_bulk_load(
            used_arena.userdata(1), pc, ctypes.c_uint64(source), 0, 0, 9 << 16 | 7, 1
        )
        library.ck_bulk_store(
            used_arena.userdata(2), pc, ctypes.c_uint64(source), 0, 0x8001 << 16 | 3, 1
        )
        library.ck_bulk_store(used_arena.userdata(3), pc, ctypes.c_uint64(source), 0, 3, 0)
        library.ck_bulk_reduction(used_arena.userdata(4), pc, ctypes.c_uint64(source), 0, 3)
        assert used_arena.bytes() == {
            (0, READ): set(range(source, source + 80000)),
            (1, READ): set(range(source, source + 112)),
            (2, WRITE): {source + i * 16 + byte for i in range(3) for byte in (0, 15)},
            (3, WRITE): set(range(source, source + 48)),
            (4, ATOMIC): set(range(source, source + 48)),
        }


def tensor_load(
    used_arena: Arena, launch: int, map_address: ctypes.c_uint64, stage: int, coordinate: int
) -> None:
    words = (stage, stage, coordinate, 1, 2, 3, 4, 2, 0, 0, 0)
    used_arena.library.ck_tensor_load(
        used_arena.userdata(launch), ctypes.c_uint64(7), map_address, *words
    )


def address_of(content: ctypes.Array[ctypes.c_uint64]) -> ctypes.c_uint64:
    return ctypes.c_uint64(ctypes.addressof(content))


def test_box_is_recorded_once(library: ctypes.CDLL) -> None:
    content = (ctypes.c_uint64 * 8)(*range(100, 108))
    equal_content = (ctypes.c_uint64 * 8)(*content)
    with arena(library) as used_arena:
        for stage in range(3):
            for coordinate in (0, 64, -64):
                tensor_load(used_arena, 5, address_of(content), stage, coordinate)
        tensor_load(used_arena, 6, address_of(equal_content), 0, 64)
        library.ck_tensor_store(
            used_arena.userdata(5), ctypes.c_uint64(7), address_of(content), 9, *range(7)
        )
        assert used_arena.header()[2:] == (0, 0, 1, 5)
        content[0] = 99  # a tensor map that the kernel changes is recorded again
        library.ck_tensor_store(
            used_arena.userdata(5), ctypes.c_uint64(7), address_of(content), 9, *range(7)
        )
        assert used_arena.header()[2:] == (0, 0, 2, 6)
        maps, boxes = used_arena.maps(), used_arena.boxes()
        assert [list(recorded_map.content) for recorded_map in maps] == [
            list(equal_content),
            list(content),
        ]
        first, second = (recorded_map.place for recorded_map in maps)
        assert [(box.launch, box.map, box.mode) for box in boxes] == [
            *[(5, first, READ)] * 3,
            (6, first, READ),
            (5, first, WRITE),
            (5, second, WRITE),
        ]
        assert [ctypes.c_int32(box.word[2]).value for box in boxes[:4]] == [0, 64, -64, 64]
        assert list(boxes[3].word) == [0, 0, 64, 1, 2, 3, 4, 2, 0, 0, 0, 0]
        assert list(boxes[5].word) == [9, 0, 1, 2, 3, 4, 5, 6, 0, 0, 0, 0]


def test_boxes_with_shared_user_data_belong_to_their_launches(
    library: ctypes.CDLL,
) -> None:
    content = (ctypes.c_uint64 * 8)()
    with arena(library) as used_arena:
        shared = ctypes.c_uint64(used_arena.userdata(131070).value | BY_GRID)
        for grid in (1, 5):
            library.set_grid_id(ctypes.c_uint64(grid))
            library.ck_tensor_store(shared, ctypes.c_uint64(7), address_of(content), *range(8))
        assert [box.launch for box in used_arena.boxes()] == [131071, 3]


def test_arena_holds_maximum_number_of_boxes(library: ctypes.CDLL) -> None:
    content = (ctypes.c_uint64 * 8)()
    with arena(library) as used_arena:
        for coordinate in range(MAX_BOXES):
            tensor_load(used_arena, 5, address_of(content), 0, coordinate)
        assert used_arena.header()[3:] == (0, 1, MAX_BOXES)
        assert {box.word[2] for box in used_arena.boxes()} == set(range(MAX_BOXES))
        tensor_load(used_arena, 6, address_of(content), 0, 7)
        tensor_load(used_arena, 5, address_of(content), 1, 7)
        assert used_arena.lost_launches() == {6}
        atomics_before = library.atomic_count()
        for coordinate in range(100):
            tensor_load(used_arena, 6, address_of(content), 0, coordinate)
        assert library.atomic_count() == atomics_before


def test_box_is_recorded_without_tensor_map_that_did_not_fit(library: ctypes.CDLL) -> None:
    content = (ctypes.c_uint64 * 8)()
    with arena(library) as used_arena:
        for number in range(MAX_MAPS + 1):
            content[0] = number
            tensor_load(used_arena, 5 + (number == MAX_MAPS), address_of(content), 0, 0)
        slots = {recorded_map.place for recorded_map in used_arena.maps()}
        assert len(slots) == MAX_MAPS
        assert [box.launch for box in used_arena.boxes() if box.map not in slots] == [6]
