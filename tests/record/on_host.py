"""The device patch and the arena decoder, built for the host."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CAPTURE = HERE.parents[1] / "cudakit/record"
SOURCES = (
    "containers.c", "decode/byte_set_hash.c", "decode/pages.c", "decode/tma_boxes.c", "decode/tensor_maps.c",
    "exact/machine_code.c",
)  # fmt: skip
BITMAP_BYTES = 4096
PAGE_SHIFTS = 17, 15  # log2 of the bytes of memory per page, by level
MAP_KEYS, NO_MAP = 8192, 0xFFFF
MAX_MAPS, MAX_BOXES = 4096, 1 << 18


class Range(ctypes.Structure):
    """access_range of pages.h."""

    _fields_ = (
        ("lo", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("launch", ctypes.c_uint32),
        ("mode", ctypes.c_uint32),
    )

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the start and end address of each piece."""
        for i in range(self.count):
            begin = self.lo + i * self.stride
            yield begin, begin + self.bytes


class Page(ctypes.Structure):
    """ck_page of arena.h."""

    _fields_ = (
        ("key", ctypes.c_uint64),
        ("full", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class TensorMap(ctypes.Structure):
    """ck_map of arena.h."""

    _fields_ = (
        ("content", ctypes.c_uint64 * 8),
        ("place", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 3),
    )


class Box(ctypes.Structure):
    """ck_box of arena.h."""

    _fields_ = (
        ("launch", ctypes.c_uint32),
        ("map", ctypes.c_uint16),
        ("mode", ctypes.c_uint16),
        ("word", ctypes.c_uint32 * 12),
    )


class PageSet(ctypes.Structure):
    """The struct page_set of pages.h, for ctypes."""

    _fields_ = (
        ("pages", ctypes.POINTER(Page)),
        ("bitmaps", ctypes.POINTER(ctypes.c_ubyte)),
        ("count", ctypes.c_size_t),
        ("capacity", ctypes.c_size_t),
    )


def build_patch(directory: Path) -> ctypes.CDLL:
    """Build the patch and the decoder for the host; skip the test without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("there is no C compiler")
    library = directory / "libpatch_on_host.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror",
         "-Wno-unknown-pragmas", *shlex.split(os.environ.get("CFLAGS", "")),
         f"-I{CAPTURE}", f"-I{CAPTURE / 'patch'}", f"-I{CAPTURE / 'native/recorder'}",
         str(HERE / "patch_on_host.c"), *(str(CAPTURE / "native/recorder" / name) for name in SOURCES),
         "-lpthread", "-o", str(library)],
        check=True,
    )  # fmt: skip
    built = ctypes.CDLL(str(library))
    for name in ("new_arena", "pages_of", "bitmap_in", "summary_in", "maps_of", "boxes_of"):
        getattr(built, name).restype = ctypes.c_void_p
    for name in ("userdata_of", "read_ranges", "byte_set_hash", "byte_set_hash_of_union"):
        getattr(built, name).restype = ctypes.c_uint64
    built.atomic_count.restype = ctypes.c_long
    built.free_arena.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
    return built


def read_ranges(library: ctypes.CDLL, pages: object, bitmaps: object, count: int) -> list[Range]:
    """Return the ranges of pages; arguments are addresses or arrays."""
    arguments = (pages, bitmaps, ctypes.c_size_t(count))
    number = library.read_ranges(*arguments, None, ctypes.c_size_t(0))
    ranges = (Range * number)()
    assert library.read_ranges(*arguments, ranges, ctypes.c_size_t(number)) == number
    return list(ranges)
