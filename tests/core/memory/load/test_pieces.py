from __future__ import annotations

import pytest
from core.memory.load import files
from core.memory.load.files import LARGE, MIB, SIDE_STREAM, SMALL, STEP, frame
from core.memory.load.reading import Loader, only, said, stack

from cudakit.core.memory.snapshot import BlockState, SegmentKind


def test_every_column_of_segments_is_what_the_file_says(loaded: Loader) -> None:
    snapshot = loaded(files.snapshot())
    segments, raw = only(snapshot).segments, files.segments()
    assert segments.address.tolist() == [SMALL, LARGE]
    assert segments.size.tolist() == [2 * MIB, 40 * MIB]
    assert [only(snapshot).streams[i] for i in segments.stream] == [0, SIDE_STREAM]
    assert segments.kind.tolist() == [SegmentKind.SMALL, SegmentKind.LARGE]
    assert [snapshot.pools[i] for i in segments.pool] == [(0, 0), (0, 1)]
    assert segments.expandable.tolist() == [False, True]
    assert [stack(snapshot, i) for i in segments.stack] == [
        [f["name"] for f in s["frames"]] for s in raw
    ]


def test_every_column_of_blocks_is_what_the_file_says(loaded: Loader) -> None:
    snapshot = loaded(files.snapshot())
    blocks = only(snapshot).blocks
    raw = [block for segment in files.segments() for block in segment["blocks"]]
    assert blocks.segment.tolist() == [0, 0, 1, 1, 1]
    for column, key in (("address", "address"), ("size", "size"), ("requested", "requested_size")):
        assert getattr(blocks, column).tolist() == [block[key] for block in raw]
    assert [BlockState(s).name for s in blocks.state] == [
        "ALLOCATED",
        "INACTIVE",
        "ALLOCATED",
        "PENDING_FREE",
        "INACTIVE",
    ]
    assert [stack(snapshot, i) for i in blocks.stack] == [
        [f["name"] for f in block["frames"]] for block in raw
    ]


def test_files_from_before_torch_2_1_say_sizes_and_stacks_in_a_history(loaded: Loader) -> None:
    newest = {"addr": SMALL, "real_size": 1000, "frames": STEP}
    older = {"addr": SMALL, "real_size": 77, "frames": [frame("older")]}
    blocks = [
        {"size": 1024, "state": "active_allocated", "history": [newest, older]},
        {"size": 512, "state": "active_allocated"},
        {"size": 512, "state": "inactive", "history": [older]},
        {"size": 2 * MIB - 2048, "state": "inactive"},
    ]
    keys = ("device", "address", "total_size", "stream", "segment_type")
    segment = {key: files.segment(SMALL, 2 * MIB, [])[key] for key in keys} | {"blocks": blocks}
    snapshot = loaded([segment])
    found = only(snapshot).blocks
    assert found.address.tolist() == [SMALL, SMALL + 1024, SMALL + 1536, SMALL + 2048]
    assert found.requested.tolist() == [1000, 512, 0, 0]
    assert [stack(snapshot, i) for i in found.stack] == [
        ["forward", "step", "main"],
        [],
        ["older"],
        [],
    ]
    assert only(snapshot).segments.pool.tolist() == [0]


def test_addresses_are_counted_from_the_start_of_each_segment(loaded: Loader) -> None:
    root = files.without(files.segments(), "requested_size")
    for segment in root:
        segment["blocks"] = files.without(segment["blocks"], "address")
    assert only(loaded(root)).blocks.address.tolist() == [
        block["address"] for segment in files.segments() for block in segment["blocks"]
    ]


@pytest.mark.parametrize("word", ["active_pending_free", "active_awaiting_free"])
def test_both_words_for_a_pending_free_are_known(loaded: Loader, word: str) -> None:
    block = files.block(LARGE, MIB, 1000, word)
    found = only(loaded([files.segment(LARGE, MIB, [block])])).blocks
    assert found.state.tolist() == [BlockState.PENDING_FREE]
    assert found.requested.tolist() == [1000]


def test_a_block_in_an_unknown_state_counts_as_free_and_is_reported(loaded: Loader) -> None:
    block = files.block(LARGE, MIB, 1000, "moved_elsewhere")
    device = only(loaded([files.segment(LARGE, MIB, [block])]))
    assert device.blocks.state.tolist() == [BlockState.INACTIVE]
    assert device.warnings == ("1 blocks are in a state that is not known and count as free",)


def test_blocks_that_do_not_tile_their_segment_are_taken_as_they_are(loaded: Loader) -> None:
    blocks = [
        files.block(LARGE + 5000, 700, 700, "active_allocated"),
        files.block(LARGE + 100, 300, 300, "active_allocated"),
    ]
    found = only(loaded([files.segment(LARGE, MIB, blocks)])).blocks
    assert found.address.tolist() == [LARGE + 100, LARGE + 5000]
    assert found.size.tolist() == [300, 700]


def test_segments_are_put_in_order_of_their_addresses(loaded: Loader) -> None:
    assert said(loaded(files.segments()[::-1])) == said(loaded(files.segments()))


def test_a_request_larger_than_its_block_is_cut_to_the_block(loaded: Loader) -> None:
    block = files.block(LARGE, MIB, 2 * MIB, "active_allocated")
    assert only(loaded([files.segment(LARGE, MIB, [block])])).blocks.requested.tolist() == [MIB]
