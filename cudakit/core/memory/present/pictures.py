"""The pictures of the memory report: curves over time, and the layout of the segments."""

from __future__ import annotations

import numpy as np

from cudakit.core.memory.present.layout import memory_layout
from cudakit.core.memory.present.rows import pool_name
from cudakit.core.memory.result import DeviceMemory
from cudakit.core.memory.snapshot import SegmentKind
from cudakit.document import Bytes, Chart, Column, Columns, Count, Marker, Series, Table, Text, View


def curves(device: DeviceMemory) -> Chart | None:
    """Draw requested, allocated and reserved bytes from event to event, with what ran out.

    Events, not seconds: a program's pauses hold no memory, and ``--at`` takes an event.
    """
    line = device.timeline
    if len(line.event) < 2:
        return None
    return Chart(
        kind="line",
        title="Memory along the trace",
        x=np.maximum(np.array(line.event, np.float64), 0),
        series=(
            Series("reserved", np.array(line.reserved_bytes, np.int64)),
            Series("allocated", np.array(line.allocated_bytes, np.int64)),
            Series("requested", np.array(line.requested_bytes, np.int64)),
        ),
        x_label="event",
        markers=tuple(Marker(float(oom.event), "out of memory", "error") for oom in device.ooms),
    )


def layout_columns(device: DeviceMemory) -> tuple[Columns, Columns]:
    """Give the segments and blocks of the end as columns, for the layout view."""
    found = device.layout
    segments = found.segments
    blocks = Columns(
        "blocks",
        {
            "segment": found.block_segment,
            "offset": found.block_offset,
            "size": found.block_size,
            "requested": found.block_requested,
            "state": np.where(found.block_pending, 2, 1),
        },
    )
    table = Columns(
        "segments",
        {
            "address": segments.address,
            "size": segments.size,
            "stream": segments.stream,
            "pool": segments.pool,
            "kind": segments.kind,
        },
        text={
            "pool": tuple(pool_name(pool) for pool in device.snapshot.pools),
            "kind": tuple(kind.name.lower() for kind in SegmentKind),
        },
    )
    return table, blocks


def layout(device: DeviceMemory) -> View:
    """Draw each segment with its blocks; in words, the segments with most free memory."""
    fallback = _emptiest_segments(device)
    return View("memory-layout", ("segments", "blocks"), memory_layout, fallback)


def _emptiest_segments(device: DeviceMemory) -> Table:
    found = device.layout
    free, used = found.free_by_segment(), found.used_by_segment()
    blocks = np.bincount(found.block_segment, minlength=len(free))
    order = np.argsort(-free, kind="stable")[:5]
    return Table(
        columns=(
            Column("segment", "text"),
            Column("size", "number"),
            Column("in use", "number"),
            Column("free", "number"),
            Column("blocks", "number"),
        ),
        rows=tuple(
            (
                Text(f"0x{int(found.segments.address[i]):x}"),
                Bytes(int(found.segments.size[i])),
                Bytes(int(used[i])),
                Bytes(int(free[i])),
                Count(int(blocks[i])),
            )
            for i in order.tolist()
        ),
        caption="the segments with most free memory",
    )
