"""From a tree of builtin containers to a Snapshot.

Together with ``entries`` and ``pieces`` the one place that knows torch's keys. Their history:
torch/csrc/cuda/memory_snapshot.cpp and c10/cuda/CUDACachingAllocator.h of torch 1.13 to 2.15. Whatever a
file lacks gets the meaning it had in the version that wrote it; unknown keys and actions are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cudakit.core.memory.load.entries import read_events
from cudakit.core.memory.load.pieces import read_host_pieces, read_pieces, segment_devices
from cudakit.core.memory.load.tables import StreamNumbers, Tables
from cudakit.core.memory.load.tree import Handles, Tree
from cudakit.core.memory.snapshot import HOST, Annotation, DeviceTrace, Snapshot
from cudakit.errors import SnapshotError

_HINT = "write one with torch.cuda.memory._dump_snapshot('snapshot.pkl')"
_PARTS = ("segments", "device_traces", "host_segments", "host_traces")


def build(tree: Tree, *, source: str, form: str, size_bytes: int) -> Snapshot:
    """Read the columns of a snapshot out of a tree.

    Raises SnapshotError when the tree is not a snapshot, or holds sizes that cannot be.
    """
    parts = _parts(tree)
    tables = Tables(tree)
    settings = _settings(tree, parts)
    devices = _devices(tree, tables, parts, _overflow(tree, parts, settings))
    host = _host(tree, tables, parts)
    annotations = _annotations(tree, tables, parts)
    return Snapshot(
        source=source,
        format=form,
        size_bytes=size_bytes,
        devices=(*devices, *host),
        frames=tables.frames,
        stacks=tables.stacks,
        texts=tables.texts,
        pools=tables.pools,
        annotations=annotations,
        settings=settings,
        has_times=any(bool(device.events.time_us.any()) for device in devices),
        has_traces=any(len(device.events) > 0 for device in (*devices, *host)),
    )


def _parts(tree: Tree) -> dict[str, int]:
    # torch.cuda.memory_snapshot() and MemPool.snapshot() give the bare list of segments.
    if tree.is_list(tree.root):
        parts = {"segments": tree.root}
        _, first = tree.children(_handles(tree.root))
        if len(first) == 0 or not tree.column(first[:1], "total_size")[0]:
            raise SnapshotError("the file holds a list, but not of memory segments", hint=_HINT)
        return parts
    parts = tree.members(tree.root)
    if not any(name in parts for name in _PARTS):
        keys = ", ".join(sorted(parts)[:4]) or "none"
        raise SnapshotError(
            f"the file holds a dictionary, but not a memory snapshot (its keys: {keys[:80]})",
            hint=_HINT,
        )
    return parts


def _devices(
    tree: Tree, tables: Tables, parts: Mapping[str, int], overflow: object
) -> list[DeviceTrace]:
    traces = _list(tree, parts, "device_traces")
    # All traces in one call, so that a list shared by many of them is counted once for each.
    counts, entries = tree.children(traces)
    bounds = np.cumsum(counts)
    segments = _list(tree, parts, "segments")
    owner = segment_devices(tree, segments)
    ordinals = set(np.flatnonzero(counts).tolist()) | set(np.unique(owner).tolist())
    devices = []
    for ordinal in sorted(ordinals) or [0]:
        streams = StreamNumbers()
        own = _slice(entries, bounds, counts, ordinal)
        events, warnings = read_events(tree, tables, streams, own)
        pieces = read_pieces(tree, tables, streams, segments[owner == ordinal])
        devices.append(
            DeviceTrace(
                device=ordinal,
                events=events,
                segments=pieces.segments,
                blocks=pieces.blocks,
                streams=streams.raw,
                overflowed=_overflowed(overflow, ordinal),
                warnings=warnings,
            )
        )
    return devices


def _slice(entries: Handles, bounds: Any, counts: Any, ordinal: int) -> Handles:
    if not 0 <= ordinal < len(counts):
        return entries[:0]
    return entries[bounds[ordinal] - counts[ordinal] : bounds[ordinal]]


def _host(tree: Tree, tables: Tables, parts: Mapping[str, int]) -> list[DeviceTrace]:
    traces = _list(tree, parts, "host_traces")
    # A list of entries, or as for devices a list of such lists.
    if len(traces) and tree.is_list(int(traces[0])):
        _, traces = tree.children(traces)
    segments = _list(tree, parts, "host_segments")
    if not len(traces) and not len(segments):
        return []
    streams = StreamNumbers()
    events, warnings = read_events(tree, tables, streams, traces)
    pieces = read_host_pieces(tree, tables, streams, segments)
    return [
        DeviceTrace(
            device=HOST,
            events=events,
            segments=pieces.segments,
            blocks=pieces.blocks,
            streams=streams.raw,
            warnings=warnings,
        )
    ]


def _annotations(tree: Tree, tables: Tables, parts: Mapping[str, int]) -> tuple[Annotation, ...]:
    handles = _list(tree, parts, "external_annotations")
    names = tables.text_ids(tree.column(handles, "name")).tolist()
    stages = tables.text_ids(tree.column(handles, "stage")).tolist()
    devices, _ = tree.integers(tree.column(handles, "device"))
    times, _ = tree.integers(tree.column(handles, "time_us"))
    texts = tables.texts
    return tuple(
        Annotation(texts[name], texts[stage] == "START", device, time)
        for name, stage, device, time in zip(
            names, stages, devices.tolist(), times.tolist(), strict=True
        )
    )


def _settings(tree: Tree, parts: Mapping[str, int]) -> dict[str, Any]:
    found = tree.plain(parts["allocator_settings"]) if "allocator_settings" in parts else {}
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


def _overflow(tree: Tree, parts: Mapping[str, int], settings: Mapping[str, Any]) -> object:
    """Find the flag, not in every build, that says whether old events were dropped."""
    key = "trace_alloc_overflowed"
    return tree.plain(parts[key]) if key in parts else settings.get(key)


def _overflowed(flag: object, ordinal: int) -> bool | None:
    if isinstance(flag, (list, tuple)):
        flag = flag[ordinal] if 0 <= ordinal < len(flag) else None
    return flag if isinstance(flag, bool) else None


def _list(tree: Tree, parts: Mapping[str, int], key: str) -> Handles:
    return tree.children(_handles(parts.get(key, 0)))[1]


def _handles(handle: int) -> Handles:
    return np.array([handle], np.uint64)
