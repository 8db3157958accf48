"""Segments: totals by group, fragmentation, and their layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from cudakit.memory.present.rows import limited_table, stack_value, table
from cudakit.memory.record.pools import DRIVER, JAX, MANAGED, POOL_NAMES, pool_name
from cudakit.memory.result import DeviceMemory, SegmentGroup
from cudakit.report.document import Bytes, Count, Facts, Node, Note, Table, Text
from cudakit.units import format_bytes, format_ratio

_MAX_LISTED_SEGMENTS = 5  # maximum number of segments that a terminal shows


def segments(device: DeviceMemory, top: int) -> Table:
    """List the groups of segments: one per pool, stream and kind."""
    return limited_table(
        (
            ("pool", "text", lambda group: Text(pool_name(group.pool))),
            ("stream", "number", lambda group: Count(group.stream)),
            ("kind", "text", _segment_kind),
            ("segments", "number", lambda group: Count(group.segments)),
            ("reserved", "number", lambda group: Bytes(group.reserved_bytes)),
            ("in use", "number", lambda group: Bytes(group.used_bytes)),
            ("free", "number", lambda group: Bytes(group.free_bytes)),
            ("largest free block", "number", lambda group: Bytes(group.largest_hole_bytes)),
        ),
        device.segments,
        top,
        ("group", "groups"),
        caption=_pools_caption([POOL_NAMES.get(group.pool, "") for group in device.segments]),
    )


_POOL_CAPTIONS = {
    DRIVER: "memory from calls of the driver, such as cudaMalloc, outside any library's pool",
    MANAGED: "memory of cudaMallocManaged, which GPU and host share",
    JAX: "the pool of JAX",
}


def _pools_caption(names: Collection[str]) -> str:
    """Explain the pools that are not PyTorch's, and their kind "-"."""
    texts = [f"Pool {name}: {text}." for name, text in _POOL_CAPTIONS.items() if name in names]
    if any(names):
        texts.append('Kind "-": only segments of PyTorch are small or large.')
    return " ".join(texts)


def _segment_kind(group: SegmentGroup) -> Text:
    if group.pool in POOL_NAMES:  # Only PyTorch's pools have small and large segments.
        return Text("-")
    return Text(f"{group.kind}, expandable" if group.expandable else group.kind)


def fragmentation(device: DeviceMemory, top: int) -> Iterator[Node]:
    """Show the free memory in segments, and the blocks that keep these segments in use."""
    summary = device.fragmentation
    yield Facts(
        (
            (
                "free in segments",
                _with_share(summary.free_bytes, summary.free_share, "of reserved"),
            ),
            ("largest free block", Bytes(summary.largest_hole_bytes)),
            ("free blocks", Count(summary.holes)),
            ("free in segments in use", Bytes(summary.stranded_bytes)),
            ("free in empty segments", Bytes(summary.releasable_bytes)),
            (
                "lost to rounding",
                _with_share(summary.rounding_bytes, summary.rounding_share, "of the blocks in use"),
            ),
        )
    )
    if (
        device.at.name == "peak"
        and device.ooms
        and device.ooms[-1].free_bytes != summary.free_bytes
    ):
        yield Note("info", "At the failed allocation these figures differ: --at oom shows them.")
    if summary.pins:
        yield limited_table(
            (
                ("free", "number", lambda pin: Bytes(pin.pinned_bytes)),
                ("unshared", "number", lambda pin: Bytes(pin.alone_bytes)),
                ("segments", "number", lambda pin: Count(pin.segments)),
                ("blocks", "number", lambda pin: Count(pin.blocks)),
                ("block bytes", "number", lambda pin: Bytes(pin.bytes)),
                ("call stack of the blocks", "stack", lambda pin: stack_value(pin.stack, pin.site)),
            ),
            summary.pins,
            top,
            caption="Free: free memory in the segments that contain these blocks. Unshared: free"
            " memory in segments that contain no blocks of other call stacks.",
        )


def _with_share(size_bytes: int, share: float, reference: str) -> Text:
    return Text(f"{format_bytes(size_bytes)} ({format_ratio(share)} {reference})")


def emptiest_segments(device: DeviceMemory) -> Table:
    """Return the segments at the end with the most free memory; the page draws all segments."""
    layout = device.layout
    free_by_segment, used_by_segment = layout.free_by_segment(), layout.used_by_segment()
    block_counts = np.bincount(layout.block_segment, minlength=len(free_by_segment))
    return table(
        (
            ("segment", "text", lambda i: Text(f"0x{int(layout.segments.address[i]):x}")),
            ("size", "number", lambda i: Bytes(int(layout.segments.size[i]))),
            ("in use", "number", lambda i: Bytes(int(used_by_segment[i]))),
            ("free", "number", lambda i: Bytes(int(free_by_segment[i]))),
            ("blocks in use", "number", lambda i: Count(int(block_counts[i]))),
        ),
        np.argsort(-free_by_segment, kind="stable")[:_MAX_LISTED_SEGMENTS].tolist(),
        f"The {_MAX_LISTED_SEGMENTS} segments with the most free memory are listed."
        if len(free_by_segment) > _MAX_LISTED_SEGMENTS
        else "",
    )
