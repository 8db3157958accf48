"""Tests that boxes of tensor maps are expanded to the bytes that they move."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record.on_host import (
    BITMAP_BYTES,
    MAP_KEYS,
    NO_MAP,
    PAGE_SHIFTS,
    Box,
    Page,
    PageSet,
    TensorMap,
    build_patch,
    read_ranges,
)

SYNC, READ, WRITE, ATOMIC = range(4)
TILED, IM2COL = 0, 1
# CUtensorMapDataType: the type in the map, whose upper bit means TF32, and its size in bytes.
TYPES = {0: (0, 1), 1: (1, 2), 2: (2, 4), 3: (3, 4), 4: (4, 8), 5: (5, 8), 6: (6, 2), 7: (7, 4)}
TYPES |= {8: (9, 8), 9: (10, 2), 10: (8, 4), 11: (7 | 1 << 9, 4), 12: (8 | 1 << 9, 4)}
PACKED = 13  # a type in the map whose elements are smaller than a byte
RECORDED = json.loads(
    (Path(__file__).parents[1] / "data/tensor_maps.json").read_text(encoding="utf-8")
)
Pieces = dict[tuple[int, int], list[tuple[int, int]]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_patch(tmp_path_factory.mktemp("patch"))


@dataclass(frozen=True)
class Tensor:
    """The arguments of cuTensorMapEncodeTiled that matter in global memory."""

    type: int
    address: int
    dims: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    steps: Sequence[int]
    interleave: int = 0

    def encoded(self, extra: int = 0) -> bytes:
        """Return the half of a map that the device reads, with extra bits in the type's word."""
        code = TYPES[self.type][0] if self.type in TYPES else self.type
        words = [0] * 16
        words[0:2] = self.address & 0xFFFFFFFF, self.address >> 32
        words[2] = (len(self.dims) - 1) << 4 | code << 7 | self.interleave << 11 | extra
        for i, stride in enumerate(self.strides):
            words[3 + i] = stride >> 4 & 0xFFFFFFFF
            words[7] |= stride >> 36 << 4 * i
        for i, (dim, box, step) in enumerate(zip(self.dims, self.box, self.steps, strict=True)):
            words[8 + i] = dim - 1
            words[13] |= (step - 1) << 3 * i
            words[13 + (3 + i) // 4] |= (box - 1) << (3 + i) % 4 * 8
        return b"".join(word.to_bytes(4, "little") for word in words)

    def rows(self, coordinates: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the start and end address of each element of the box."""
        size = TYPES[self.type][1]
        inside = [
            [coordinate for coordinate in range(first, first + box, step) if 0 <= coordinate < dim]
            for first, box, step, dim in zip(
                coordinates, self.box, self.steps, self.dims, strict=True
            )
        ]
        for indices in product(*reversed(inside[1:])):
            row = self.address + sum(
                coordinate * stride
                for coordinate, stride in zip(reversed(indices), self.strides, strict=True)
            )
            for coordinate in inside[0]:
                yield row + coordinate * size, row + (coordinate + 1) * size


def recorded(description: dict[str, object]) -> Tensor:
    fields = {name: description[name] for name in Tensor.__dataclass_fields__}
    return Tensor(**fields)  # type: ignore[arg-type]


def tensor_map(encoded: bytes, slot: int) -> TensorMap:
    created = TensorMap(place=slot)
    ctypes.memmove(created.content, encoded, 64)
    return created


def load_box(
    launch: int, slot: int, coordinates: Sequence[int], rank: int = 0, mode: int = TILED
) -> Box:
    """Return a box as the patch writes it for a load; its shared memory fields vary."""
    padded = [*coordinates, 0, 0, 0, 0, 0][:5]
    words = (launch * 16, 77, *padded, rank or len(coordinates), 1, 3 << 16, mode, 0)
    return Box(
        launch,
        slot,
        READ,
        (ctypes.c_uint32 * 12)(*(word_value & 0xFFFFFFFF for word_value in words)),
    )


def store(launch: int, slot: int, coordinates: Sequence[int], mode: int = WRITE) -> Box:
    padded = [*coordinates, 0, 0, 0, 0, 0][:5]
    words = (launch * 16, *padded, len(coordinates), TILED, 0, 0, 0, 0)
    return Box(
        launch,
        slot,
        mode,
        (ctypes.c_uint32 * 12)(*(word_value & 0xFFFFFFFF for word_value in words)),
    )


@dataclass
class Expansion:
    """The pages of boxes, added to existing pages."""

    library: ctypes.CDLL
    pages: PageSet = field(default_factory=PageSet)
    lost: set[int] = field(default_factory=set)

    def add_page(self, key: int, bits: int, full: int = 0) -> None:
        index = self.pages.count
        assert self.library.page_set_reserve(ctypes.byref(self.pages), ctypes.c_size_t(index + 1))
        self.pages.pages[index] = Page(key, full)
        content = bits.to_bytes(BITMAP_BYTES, "little")
        ctypes.memmove(
            ctypes.addressof(self.pages.bitmaps.contents) + index * BITMAP_BYTES,
            content,
            BITMAP_BYTES,
        )
        self.pages.count += 1

    def expand(self, maps: Sequence[TensorMap], boxes: Sequence[Box]) -> None:
        report_lost = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32)(
            lambda _, launch: self.lost.add(launch)
        )
        assert self.library.tma_boxes_expand(
            (TensorMap * len(maps))(*maps),
            ctypes.c_size_t(len(maps)),
            (Box * len(boxes))(*boxes),
            ctypes.c_size_t(len(boxes)),
            ctypes.byref(self.pages),
            report_lost,
            None,
        )

    def pieces(self) -> Pieces:
        pieces: Pieces = {}
        if self.pages.count:
            for accessed in read_ranges(
                self.library, self.pages.pages, self.pages.bitmaps, self.pages.count
            ):
                pieces.setdefault((accessed.launch, accessed.mode), []).extend(accessed.pieces())
        self.library.page_set_free(ctypes.byref(self.pages))
        return pieces


def expand(
    library: ctypes.CDLL, maps: Sequence[TensorMap], boxes: Sequence[Box]
) -> tuple[Pieces, set[int]]:
    expansion = Expansion(library)
    expansion.expand(maps, boxes)
    return expansion.pieces(), expansion.lost


def joined(rows: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(rows):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


class DecodedTensorMap(ctypes.Structure):
    """tensor_map of tensor_maps.h."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 5),
        ("box", ctypes.c_uint32 * 5),
        ("steps", ctypes.c_uint32 * 5),
        ("rank", ctypes.c_uint),
        ("interleave", ctypes.c_uint),
        ("is_im2col", ctypes.c_bool),
        ("lower", ctypes.c_int32 * 3),
        ("upper", ctypes.c_int32 * 3),
        ("pixels", ctypes.c_uint32),
    )


def decode(library: ctypes.CDLL, encoded: bytes) -> DecodedTensorMap | None:
    decoded = DecodedTensorMap()
    is_known = library.tensor_map_decode(
        (ctypes.c_uint64 * 8).from_buffer_copy(encoded), ctypes.byref(decoded)
    )
    return decoded if is_known & 1 else None


@pytest.mark.parametrize("number", range(len(RECORDED["encoded"])))
def test_recorded_map_is_decoded_as_encoded(library: ctypes.CDLL, number: int) -> None:
    encoded = RECORDED["encoded"][number]
    tensor, content = recorded(encoded), bytes.fromhex(encoded["map"])
    decoded = decode(library, content)
    assert decoded is not None
    rank = len(tensor.dims)
    assert (decoded.rank, decoded.interleave, decoded.address) == (
        rank,
        tensor.interleave,
        tensor.address,
    )
    assert list(decoded.dims)[:rank] == tensor.dims
    assert list(decoded.strides)[:rank] == [TYPES[tensor.type][1], *tensor.strides]
    assert list(decoded.box)[:rank] == tensor.box
    assert list(decoded.steps)[:rank] == tensor.steps
    other_bits = encoded["fill"] << 15 | encoded["swizzle"] << 13 | encoded["cache"] << 17
    assert tensor.encoded(other_bits) == content, (
        "the encoder of the other tests agrees with the driver"
    )


def test_boxes_of_gemm_cover_its_matrices(library: ctypes.CDLL) -> None:
    """A GEMM of cuBLAS in bfloat16, with m = n = k = 2048, loads each tile of A and of B once."""
    boxes, expected = [], []
    for slot, (rows, encoded) in enumerate(zip((32, 128), RECORDED["product"], strict=True)):
        grid = product(range(0, 2048, 64), range(0, 2048, rows))
        boxes += [load_box(7, slot, (column, row, 0)) for column, row in grid]
        expected.append((encoded["matrix"], encoded["matrix"] + 2048 * 2048 * 2))
    maps = [
        tensor_map(bytes.fromhex(encoded["map"]), slot)
        for slot, encoded in enumerate(RECORDED["product"])
    ]
    assert expand(library, maps, boxes) == ({(7, READ): joined(iter(expected))}, set())
    pieces, _ = expand(library, maps, boxes[:-1])
    assert sum(end - begin for begin, end in pieces[7, READ]) == 2 * 2048 * 2048 * 2 - 128 * 128


def test_boxes_of_tensor_at_lower_address_than_first_tensor_are_kept(
    library: ctypes.CDLL,
) -> None:
    """Two matrices of the same shape, of which the first map has the one at the higher address."""
    matrices = [
        Tensor(6, address, (64, 32), (128,), (64, 8), (1, 1)) for address in (0x9000, 0x1000)
    ]
    maps = [tensor_map(matrix.encoded(), slot) for slot, matrix in enumerate(matrices)]
    boxes = [load_box(7, slot, (0, row)) for slot in (0, 1) for row in range(0, 32, 8)]
    expected = [(matrix.address, matrix.address + 32 * 128) for matrix in matrices]
    assert expand(library, maps, boxes) == ({(7, READ): joined(iter(expected))}, set())


@dataclass(frozen=True)
class Im2col:
    """The arguments of cuTensorMapEncodeIm2col that matter in global memory; elements of two bytes."""

    dims: Sequence[int]  # sizes: channels, spatial dimensions from the width on, images
    strides: Sequence[int]
    lower: Sequence[int]
    upper: Sequence[int]
    channels: int
    pixels: int
    steps: Sequence[int]  # steps of the spatial dimensions

    ADDRESS = 0x7F12_3400_0000

    def encoded(self) -> bytes:
        spatial = len(self.lower)
        bits = 16 // spatial
        words = [0] * 16
        words[0:2] = self.ADDRESS & 0xFFFFFFFF, self.ADDRESS >> 32
        words[2] = 1 | (len(self.dims) - 1) << 4 | TYPES[6][0] << 7
        for i, stride in enumerate(self.strides):
            words[3 + i] = stride >> 4
        for i, dim in enumerate(self.dims):
            words[8 + i] = dim - 1
        words[13] = (self.channels - 1) << 24
        for i, step in enumerate(self.steps):
            words[13] |= (step - 1) << 3 * (1 + i)
        for i, (lower, upper) in enumerate(zip(self.lower, self.upper, strict=True)):
            words[14] |= (lower & (1 << bits) - 1) << i * bits
            words[14] |= (upper & (1 << bits) - 1) << 16 + i * bits
        words[15] = self.pixels - 1
        return b"".join(word.to_bytes(4, "little") for word in words)

    def traversal(self) -> list[tuple[int, ...]]:
        """List the spatial coordinates and the image of each pixel of the bounding box, in order."""
        axes = [
            range(low, dim + high, step)
            for low, dim, high, step in zip(
                self.lower, self.dims[1:-1], self.upper, self.steps, strict=True
            )
        ]
        return [position[::-1] for position in product(range(self.dims[-1]), *axes[::-1])]

    def rows(self, pixel: int, channel: int, offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the addresses of the rows that a load reads if it begins at this pixel of the traversal."""
        end = min(channel + self.channels, self.dims[0])
        for *spatial, image in self.traversal()[pixel : pixel + self.pixels]:
            position = [
                pixel_coordinate + offset
                for pixel_coordinate, offset in zip(spatial, offsets, strict=True)
            ]
            if all(
                0 <= pixel_coordinate < dim
                for pixel_coordinate, dim in zip(position, self.dims[1:-1], strict=True)
            ):
                begin = self.ADDRESS + sum(
                    pixel_coordinate * stride
                    for pixel_coordinate, stride in zip(
                        [*position, image], self.strides, strict=True
                    )
                )
                yield begin + channel * 2, begin + end * 2


@st.composite
def im2col_maps(draw: st.DrawFn) -> Im2col:
    spatial = draw(st.integers(1, 3))
    dims = [draw(st.sampled_from([8, 16, 24]))]
    dims += [draw(st.integers(2, 6)) for _ in range(spatial)] + [draw(st.integers(1, 3))]
    lower = [draw(st.integers(-2, 1)) for _ in range(spatial)]
    upper = [draw(st.integers(-2, 1)) for _ in range(spatial)]
    upper = [
        max(high, low - dim + 1) for low, high, dim in zip(lower, upper, dims[1:], strict=False)
    ]
    strides, min_stride = [], dims[0] * 2
    for dim in dims[1:]:
        strides.append(-(-min_stride // 16) * 16 + draw(st.sampled_from([0, 0, 32])))
        min_stride = strides[-1] * dim
    steps = [draw(st.sampled_from([1, 1, 2])) for _ in range(spatial)]
    channels, pixels = draw(st.sampled_from([8, 16])), draw(st.integers(1, 40))
    return Im2col(dims, strides, lower, upper, channels, pixels, steps)


@settings(max_examples=150, deadline=None)
@given(im2col_map=im2col_maps(), data=st.data())
def test_im2col_loads_read_pixels_of_the_bounding_box(
    library: ctypes.CDLL, im2col_map: Im2col, data: st.DataObject
) -> None:
    pixels, bits = im2col_map.traversal(), 16 // len(im2col_map.lower)
    boxes, rows = [], []
    for _ in range(data.draw(st.integers(1, 12))):
        first = data.draw(st.integers(0, len(pixels) - 1))
        channel = data.draw(st.sampled_from([0, 0, 8]))
        offsets = [data.draw(st.integers(0, 3)) for _ in im2col_map.lower]
        box = load_box(2, 5, (channel, *pixels[first]), rank=len(im2col_map.dims), mode=IM2COL)
        box.word[9] = sum(offset << i * bits for i, offset in enumerate(offsets))
        boxes.append(box)
        if channel < im2col_map.dims[0]:
            rows += im2col_map.rows(first, channel, offsets)
    pieces, lost = expand(library, [tensor_map(im2col_map.encoded(), 5)], boxes)
    assert not lost
    assert pieces == ({(2, READ): joined(iter(rows))} if rows else {})


POSITIONS = st.integers(-70, 70) | st.sampled_from([-(1 << 31), (1 << 31) - 1, 1000])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    rank = draw(st.integers(1, 5))
    steps = [1, *(draw(st.sampled_from([1, 1, 2, 3, 8])) for _ in range(rank - 1))]
    counts = [draw(st.integers(1, 40)), *(draw(st.integers(1, 4)) for _ in range(rank - 1))]
    kind = draw(st.sampled_from(sorted(TYPES)))
    dims = [draw(st.integers(1, 60)) for _ in range(rank)]
    strides, min_stride = [], dims[0] * TYPES[kind][1]
    for dim in dims[1:]:
        stride = -(-min_stride // 16) * 16 + 16 * draw(st.sampled_from([0, 0, 1, 3, 300, 4096]))
        strides.append(stride)
        min_stride = stride * dim
    address = draw(st.sampled_from([0x7F12_3400_0000, 0x7F12_3400_FFF0, 0x7F12_3400_3FF0]))
    # A load moves ceil(box / step) elements (cuTensorMapEncodeTiled).
    box = [
        count * step - draw(st.integers(0, step - 1))
        for count, step in zip(counts, steps, strict=True)
    ]
    return Tensor(kind, address, dims, strides, box, steps)


@settings(max_examples=150, deadline=None)
@given(
    tensor=tensors(),
    boxes_used=st.lists(st.tuples(st.tuples(*[POSITIONS] * 5), st.integers(0, 2), st.booleans())),
)
def test_box_covers_its_elements_inside_the_tensor(
    library: ctypes.CDLL,
    tensor: Tensor,
    boxes_used: list[tuple[tuple[int, ...], int, bool]],
) -> None:
    rank, boxes = len(tensor.dims), []
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for coordinates, launch, reads in boxes_used:
        boxes.append((load_box if reads else store)(launch, 5, coordinates[:rank]))
        rows.setdefault((launch, READ if reads else WRITE), []).extend(
            tensor.rows(coordinates[:rank])
        )
    pieces, lost = expand(library, [tensor_map(tensor.encoded(), 5)], boxes)
    assert pieces == {
        name: joined(iter(pieces_of_name))
        for name, pieces_of_name in rows.items()
        if pieces_of_name
    }
    assert not lost


PLAIN = Tensor(7, 0x7F12_3400_0000, (64, 64), (256,), (32, 8), (1, 1))


SIX = replace(PLAIN, dims=(64,) * 6, strides=(256,) * 4 + (0,), box=(1,) * 6, steps=(1,) * 6)
HUGE = replace(PLAIN, dims=(1,) * 3, strides=(16, 16), box=(256,) * 3, steps=(1,) * 3)
UNKNOWN_MAPS = {
    "interleaved": replace(PLAIN, interleave=1).encoded(),
    "steps in the first dimension": replace(PLAIN, steps=(2, 1)).encoded(),
    "elements of less than a byte": replace(PLAIN, type=PACKED).encoded(),
    "an address beyond 57 bits": replace(PLAIN, address=(1 << 57) - 1024).encoded(),
    "six dimensions": SIX.encoded(),
    "a box larger than shared memory": HUGE.encoded(),
    "another form": PLAIN.encoded(1),
    "a reserved bit": PLAIN.encoded(1 << 23),
    "the last reserved bit": PLAIN.encoded(1 << 31),
}


@pytest.mark.parametrize("encoded", UNKNOWN_MAPS.values(), ids=UNKNOWN_MAPS.keys())
def test_launch_with_unknown_tensor_map_is_lost(library: ctypes.CDLL, encoded: bytes) -> None:
    maps = [tensor_map(encoded, 0), tensor_map(PLAIN.encoded(), 1)]
    rank = (encoded[8] >> 4 & 7) + 1
    boxes = [load_box(3, 0, (0,) * min(rank, 5)), load_box(4, 1, (0, 0))]
    pieces, lost = expand(library, maps, boxes)
    assert lost == {3}
    assert (4, READ) in pieces


UNKNOWN_BOXES = {
    "im2col": load_box(3, 1, (0, 0), mode=IM2COL),
    "of another rank": load_box(3, 1, (0, 0), rank=3),
    "a coordinate too many": load_box(3, 1, (0, 0, 1), rank=2),
    "a map that was not recorded": load_box(3, 2, (0, 0)),
    "an invalid slot": load_box(3, MAP_KEYS, (0, 0)),
    "no map": load_box(3, NO_MAP, (0, 0)),
    "a store of another rank": store(3, 1, (0,)),
    "a synchronization mode": store(3, 1, (0, 0), mode=SYNC),
}


@pytest.mark.parametrize("box", UNKNOWN_BOXES.values(), ids=UNKNOWN_BOXES.keys())
def test_launch_with_unknown_box_is_lost(library: ctypes.CDLL, box: Box) -> None:
    maps = [tensor_map(PLAIN.encoded(), 1)]
    pieces, lost = expand(library, maps, [load_box(5, 1, (0, 0)), box, store(4, 1, (0, 0), ATOMIC)])
    assert lost == {3}
    assert pieces.keys() == {(4, ATOMIC), (5, READ)}


def test_adjacent_boxes_are_joined(library: ctypes.CDLL) -> None:
    """Boxes with a gap between them, adjacent boxes of different heights, and a box within another box."""
    for origins in [((0, 0), (36, 0)), ((0, -4), (32, 0)), ((0, 0), (32, -4)), ((0, 0), (8, 0))]:
        rows = joined(piece for coordinates in origins for piece in PLAIN.rows(coordinates))
        boxes = [load_box(1, 0, coordinates) for coordinates in origins]
        pieces, _ = expand(library, [tensor_map(PLAIN.encoded(), 0)], boxes)
        assert pieces == {(1, READ): rows}


@pytest.mark.parametrize("full", [0, 1])
def test_pages_of_device_and_boxes_are_merged(library: ctypes.CDLL, full: int) -> None:
    """The bitmap of a full page is not copied to the host, so its content is ignored."""
    tensor = Tensor(7, 0x7F12_3400_0000, (16384,), (), (256,), (1,))
    key = 1 << 63 | 9 << 46 | WRITE << 44 | tensor.address >> PAGE_SHIFTS[0]
    for is_before in (True, False):
        expansion = Expansion(library)
        for page in (True, False) if is_before else (False, True):
            if page:
                expansion.add_page(key, 0 if full else 0b1011, full)
            else:
                expansion.expand([tensor_map(tensor.encoded(), 0)], [store(9, 0, (3,))])
        assert expansion.pages.count == 2
        address = tensor.address
        written_bytes = (
            [(address, address + (1 << PAGE_SHIFTS[0]))]
            if full
            else [(address, address + 8), (address + 12, address + 259 * 4)]
        )
        assert expansion.pieces() == {(9, WRITE): written_bytes}


def test_expanding_no_boxes_leaves_pages_unchanged(library: ctypes.CDLL) -> None:
    assert expand(library, [], []) == ({}, set())
