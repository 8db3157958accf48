"""Snapshots in PyTorch's format, as files of every kind, and files that are not snapshots."""

from __future__ import annotations

import copy
import functools
import gzip
import io
import json
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SMALL, LARGE = 0x7F00_0000_0000, 0x7F00_4000_0000  # bases of the two segments
SIDE_STREAM = 0x5581_0000_1230  # a raw handle
USER_POOL = (0, 1)


def frame(name: str, line: int = 1, filename: str = "train.py") -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


MAIN = frame("main", 90)
LOAD = [frame("__init__", 12, "model.py"), MAIN]
STEP = [frame("forward", 30, "model.py"), frame("step", 44), MAIN]


def event(action: str, address: int, size: int, **more: Any) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": 1_700_000_000_000_000,
        "compile_context": "N/A",
        "user_metadata": "",
        "frames": STEP,
    } | more


def block(address: int, size: int, requested: int, state: str, **more: Any) -> dict[str, Any]:
    made = {"address": address, "size": size, "requested_size": requested, "state": state}
    return made | {"frames": [] if state == "inactive" else STEP} | more


def segment(address: int, size: int, blocks: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    active = [b for b in blocks if b["state"] != "inactive"]
    allocated = [b for b in active if b["state"] == "active_allocated"]
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": sum(b["size"] for b in allocated),
        "active_size": sum(b["size"] for b in active),
        "requested_size": sum(b.get("requested_size", 0) for b in active),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": LOAD,
        "blocks": blocks,
    } | more


def snapshot(**more: Any) -> dict[str, Any]:
    """Return a consistent snapshot with two pools, a pending free and an OOM."""
    made = {
        "segments": segments(),
        "device_traces": [numbered(trace())],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": False,
            "roundup_power2_divisions": {"1": 0, "2": 0, "4": 0},
        },
        "external_annotations": [
            {"name": "step 1", "stage": "START", "device": 0, "time_us": 1_700_000_000_000_001},
            {"name": "step 1", "stage": "END", "device": 0, "time_us": 1_700_000_000_000_008},
        ],
    }
    return copy.deepcopy(made | more)


def segments() -> list[dict[str, Any]]:
    small = [
        block(SMALL, KIB, 1000, "active_allocated", frames=LOAD),
        block(SMALL + KIB, 2 * MIB - KIB, 0, "inactive"),
    ]
    large = [
        block(LARGE, 20 * MIB, 20 * MIB, "active_allocated"),
        block(LARGE + 20 * MIB, 10 * MIB, 10 * MIB, "active_pending_free"),
        block(LARGE + 30 * MIB, 10 * MIB, 0, "inactive"),
    ]
    expected_changes = {"stream": SIDE_STREAM, "segment_pool_id": USER_POOL, "is_expandable": True}
    return [
        segment(SMALL, 2 * MIB, small, segment_type="small"),
        segment(LARGE, 40 * MIB, large, **expected_changes),
    ]


def trace() -> list[dict[str, Any]]:
    expected_changes = {"stream": SIDE_STREAM, "pool_id": USER_POOL}
    return [
        event("segment_alloc", SMALL, 2 * MIB, frames=LOAD),
        event("alloc", SMALL, 1000, frames=LOAD),
        event("alloc", SMALL + KIB, 512),
        event("free_requested", SMALL + KIB, 512),
        event("free_completed", SMALL + KIB, 512),
        event("segment_map", LARGE, 40 * MIB, **expected_changes),
        event("alloc", LARGE, 20 * MIB, **expected_changes, compile_context="0/0"),
        event("alloc", LARGE + 20 * MIB, 10 * MIB, **expected_changes, user_metadata='{"layer":1}'),
        event("free_requested", LARGE + 20 * MIB, 10 * MIB, **expected_changes),
        event("annotate", LARGE, 20 * MIB, user_metadata="weights"),
        event("snapshot", 0, 0),
        failed(GIB, device_free=5 * MIB),
    ]


def failed(size: int, *, device_free: int) -> dict[str, Any]:
    made = event("oom", 0, size) | {"device_free": device_free}
    del made["addr"]
    return made


def numbered(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry | {"time_us": entry["time_us"] + i} for i, entry in enumerate(events)]


def changed(root: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of nested containers with one node replaced."""
    if not place:
        return value
    first, *rest = place
    if isinstance(root, dict):
        return {**root, first: changed(root[first], tuple(rest), value)}
    items = list(root)
    items[first] = changed(items[first], tuple(rest), value)
    return type(root)(items)


def places(root: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path to every node, containers before their items."""
    yield at
    inner = root.items() if isinstance(root, dict) else ()
    for key, value in enumerate(root) if isinstance(root, (list, tuple)) else inner:
        yield from places(value, (*at, key))


def without(root: Any, *keys: str) -> Any:
    """Return a copy of nested containers without the given keys."""
    if isinstance(root, dict):
        return {key: without(value, *keys) for key, value in root.items() if key not in keys}
    if isinstance(root, (list, tuple)):
        return type(root)(without(item, *keys) for item in root)
    return root


def pickled(root: Any, protocol: int = 4, *, memo: bool = True) -> bytes:
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol)
    pickler.fast = not memo
    pickler.dump(root)
    return stream.getvalue()


# Every file format.
FORMS: Mapping[str, Callable[[Any], bytes]] = {
    **{f"protocol-{n}.pkl": functools.partial(pickled, protocol=n) for n in range(6)},
    "no-memo.pkl": functools.partial(pickled, memo=False),
    "gzip.pkl.gz": lambda root: gzip.compress(pickled(root)),
    "members.pkl.gz": lambda root: _in_two(gzip.compress, pickled(root)),
    "zstandard.pkl.zst": lambda root: zstd.compress(pickled(root)),
    "frames.pkl.zst": lambda root: _in_two(zstd.compress, pickled(root)),
    "plain.json": lambda root: json.dumps(root).encode(),
    "indented.json": lambda root: b"\n " + json.dumps(root, indent=2).encode(),
    "utf-16.json": lambda root: json.dumps(root, ensure_ascii=False).encode("utf-16"),
    "marked.json": lambda root: json.dumps(root, ensure_ascii=False).encode("utf-8-sig"),
    "gzip.json.gz": lambda root: gzip.compress(json.dumps(root).encode()),
    "zstandard.json.zst": lambda root: zstd.compress(json.dumps(root).encode()),
}


def _in_two(compress: Callable[[bytes], bytes], content: bytes) -> bytes:
    half = len(content) // 2
    return compress(content[:half]) + compress(content[half:])
