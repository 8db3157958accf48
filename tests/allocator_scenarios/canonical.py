"""Snapshots in a canonical form, without addresses, handles, pool numbers and times.

The name of a segment is its position in the order in which the trace allocates segments from the device. A
canonical address is the name of a segment and an offset in the segment. A reservation of virtual memory
counts as one segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias

from allocator_scenarios.scenario import DEFAULT

CanonicalAddress: TypeAlias = (
    "tuple[str, int]"  # The name of a segment, and an offset in the segment.
)
PAGE = 2 << 20
SEGMENT_BEGIN_ACTIONS = ("segment_alloc", "segment_map")

COMPARED_SEGMENT_KEYS = (
    "total_size",
    "allocated_size",
    "active_size",
    "requested_size",
    "segment_type",
    "is_expandable",
    "device",
)
BY_POOL = "reserved_bytes_by_private_pools."
# PyTorch records the last configuration string, cudakit all settings that are not the default.
UNCOMPARED_SETTING = "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(slots=True)
class Names:
    """The names of streams and pools."""

    streams: Mapping[int, str]
    pools: Mapping[tuple[int, int], str]
    reservation_bytes: int  # The address range that an expandable segment reserves.

    def stream(self, handle: int) -> str:
        return DEFAULT if handle == 0 else self.streams.get(handle, "unknown")

    def pool(self, number: Any) -> str:
        return "default" if tuple(number) == (0, 0) else self.pools.get(tuple(number), "unknown")


@dataclass(slots=True)
class CanonicalSnapshot:
    """A snapshot in canonical form."""

    segments: list[dict[str, Any]]  # Segments in order of allocation.
    trace: list[dict[str, Any]]
    settings: dict[str, Any]
    keys: dict[str, set[str]]
    addresses: Addresses


@dataclass(slots=True)
class Addresses:
    """The addresses of segments and reserved ranges in order of allocation."""

    segments: list[int] = field(default_factory=list)
    reservations: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        """Return the number of addresses."""
        return len(self.segments) + len(self.reservations)


@dataclass(slots=True)
class _SegmentMap:
    """The addresses of segments while a trace is followed."""

    reservation_bytes: int
    # Name and end address of each segment or reservation, by its begin address.
    segments: dict[int, tuple[str, int]] = field(default_factory=dict)
    # Number of mapped bytes of each reservation, by its begin address.
    mapped_bytes: dict[int, int] = field(default_factory=dict)
    addresses: Addresses = field(default_factory=Addresses)

    def add_earlier_segments(
        self, segments: list[dict[str, Any]], entries: list[dict[str, Any]]
    ) -> None:
        """Add the segments that existed before the trace."""
        begin_addresses = {
            entry.get("addr") for entry in entries if entry["action"] in SEGMENT_BEGIN_ACTIONS
        }
        for number, segment in enumerate(segments):
            begin = segment["address"]
            if begin not in begin_addresses and not (segment["is_expandable"] and begin_addresses):
                self.segments[begin] = f"segment ? {number}", begin + segment["total_size"]

    def canonical_address(self, address: int) -> CanonicalAddress:
        containing = [
            (end - begin, begin, name)
            for begin, (name, end) in self.segments.items()
            if begin <= address < end
        ]
        if not containing:
            return "?", address % PAGE
        _, begin, name = min(containing)
        return name, address - begin

    def follow(self, entry: Mapping[str, Any]) -> CanonicalAddress:
        """Return the canonical address of a trace entry."""
        action, address = entry["action"], entry.get("addr", 0)
        if action in ("snapshot", "oom"):
            return "", 0
        if action == "segment_alloc":
            self._add(address, entry["size"], "segment")
            self.addresses.segments.append(address)
        elif action == "segment_map":
            self._map(address, entry["size"])
        canonical_address = self.canonical_address(address)
        if action == "segment_free":
            self.segments.pop(address, None)
        elif action == "segment_unmap":
            self._unmap(address - canonical_address[1], entry["size"])
        return canonical_address

    def _add(self, address: int, size: int, kind: str) -> None:
        self.segments[address] = f"{kind} {len(self.addresses)}", address + size

    def _map(self, address: int, size: int) -> None:
        name, offset = self.canonical_address(address)
        if name == "?":
            offset = 0
            self._add(address, self.reservation_bytes, "reservation")
            self.addresses.reservations.append(address)
        self.mapped_bytes[address - offset] = self.mapped_bytes.get(address - offset, 0) + size

    def _unmap(self, begin: int, size: int) -> None:
        """Remove a reserved range without mapped pages."""
        self.mapped_bytes[begin] = self.mapped_bytes.get(begin, 0) - size
        if not self.mapped_bytes[begin]:
            self.segments.pop(begin, None)


def name_pools(statistics: Mapping[str, int], names: Names) -> dict[str, int]:
    """Replace private pool ids in statistics by names; omit the pools of earlier scenarios."""
    ids = {f"{BY_POOL}{a}_{b}.": f"{BY_POOL}{name}." for (a, b), name in names.pools.items()}
    named_statistics = {}
    for name, value in statistics.items():
        if name.startswith(BY_POOL):
            begin, kind, part = name.rsplit(".", 2)
            if f"{begin}." in ids:
                named_statistics[f"{ids[f'{begin}.']}{kind}.{part}"] = value
        else:
            named_statistics[name] = value
    return named_statistics


def canonical(snapshot: Mapping[str, Any], names: Names, device: int = 0) -> CanonicalSnapshot:
    """Return a snapshot in a form that is equal for equal behaviour."""
    segment_map = _SegmentMap(names.reservation_bytes)
    entries = snapshot["device_traces"][device] if snapshot["device_traces"] else []
    device_segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
    segment_map.add_earlier_segments(device_segments, entries)
    trace = [_entry(entry, segment_map.follow(entry), names) for entry in entries]
    segments = [_segment(segment, segment_map, names) for segment in device_segments]
    settings = dict(snapshot["allocator_settings"])
    settings.pop(UNCOMPARED_SETTING, None)
    return CanonicalSnapshot(
        sorted(segments, key=lambda segment: _segment_order(segment["at"])),
        list(_completed_in_any_order(trace)),
        settings,
        _keys(snapshot, device_segments, entries),
        segment_map.addresses,
    )


def _segment_order(canonical_address: CanonicalAddress) -> tuple[int, int]:
    number = canonical_address[0].rsplit(" ", 1)[-1]
    return int(number) if number.isdigit() else -1, canonical_address[1]


def _segment(segment: Mapping[str, Any], segment_map: _SegmentMap, names: Names) -> dict[str, Any]:
    begin = segment["address"]
    return {
        "at": segment_map.canonical_address(begin),
        **{key: segment[key] for key in COMPARED_SEGMENT_KEYS},
        "stream": names.stream(segment["stream"]),
        "pool": names.pool(segment["segment_pool_id"]),
        "frames": bool(segment["frames"]),
        "blocks": [
            {
                "offset": block["address"] - begin,
                "size": block["size"],
                "requested_size": block["requested_size"],
                "state": block["state"],
                "frames": bool(block["frames"]),
            }
            for block in segment["blocks"]
        ],
    }


def _entry(
    entry: Mapping[str, Any], canonical_address: CanonicalAddress, names: Names
) -> dict[str, Any]:
    canonical_entry = {
        "action": entry["action"],
        "at": canonical_address,
        "size": entry["size"],
        "stream": names.stream(entry["stream"]),
        "frames": bool(entry.get("frames")),
        "metadata": entry.get("user_metadata", ""),
    }
    if "pool_id" in entry:
        canonical_entry["pool"] = names.pool(entry["pool_id"])
    return canonical_entry


def _completed_in_any_order(trace: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Sort frees that completed together: PyTorch iterates over streams in a hash map."""
    for action, entries in groupby(trace, key=lambda entry: entry["action"]):
        if action == "free_completed":
            yield from sorted(entries, key=lambda entry: entry["at"])
        else:
            yield from entries


def sort_by_segment(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort the entries of a restore by segment: first the frees, then the splits.

    PyTorch iterates over a hash set of pointers to blocks (c10/cuda/CUDACachingAllocator.cpp,
    get_private_pool_head_blocks), so the order of segments differs from process to process. The entries of
    one segment have a fixed order.
    """
    return [
        entry
        for _, same_kind in groupby(entries, key=lambda entry: entry["action"] == "snapshot")
        for part in _frees_and_splits(list(same_kind))
        for entry in sorted(part, key=lambda entry: entry["at"][0])
    ]


def _frees_and_splits(entries: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Split the entries of a restore: all blocks are freed before the first segment is split."""
    first_splits = (number for number, entry in enumerate(entries) if entry["action"] == "alloc")
    first_split = next(first_splits, len(entries))
    yield entries[:first_split]
    yield entries[first_split:]


def _keys(
    snapshot: Mapping[str, Any], segments: list[dict[str, Any]], entries: list[dict[str, Any]]
) -> dict[str, set[str]]:
    """Return the keys of segments, blocks and entries, except those of some trace entries only."""
    blocks = [block for segment in segments for block in segment["blocks"]]
    return {
        "snapshot": set(snapshot),
        "segment": {key for segment in segments for key in segment},
        "block": {key for block in blocks for key in block},
        "trace": {key for entry in entries for key in entry} - {"frames"},
    }
