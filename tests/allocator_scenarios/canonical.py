"""Snapshots in a canonical form, without addresses, handles, pool numbers and times.

A segment is called by its place in the order in which segments were taken from the device, as the trace tells
it; an address is a segment and an offset in it. A reservation of virtual memory is one such segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias

from allocator_scenarios.scenario import DEFAULT

Place: TypeAlias = "tuple[str, int]"  # The name of a segment, and an offset in the segment.
PAGE = 2 << 20
BEGINNINGS = ("segment_alloc", "segment_map")

SEGMENT = (
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
class Seen:
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
class _Places:
    """The addresses of segments while a trace is followed."""

    reservation_bytes: int
    held: dict[int, tuple[str, int]] = field(default_factory=dict)  # begin: name, end
    mapped: dict[int, int] = field(default_factory=dict)  # bytes of reservations
    addresses: Addresses = field(default_factory=Addresses)

    def know(self, segments: list[dict[str, Any]], entries: list[dict[str, Any]]) -> None:
        """Add the segments that existed before the trace."""
        told = {entry.get("addr") for entry in entries if entry["action"] in BEGINNINGS}
        for number, segment in enumerate(segments):
            begin = segment["address"]
            if begin not in told and not (segment["is_expandable"] and told):
                self.held[begin] = f"segment ? {number}", begin + segment["total_size"]

    def of(self, address: int) -> Place:
        holding = [
            (end - begin, begin, name)
            for begin, (name, end) in self.held.items()
            if begin <= address < end
        ]
        if not holding:
            return "?", address % PAGE
        _, begin, name = min(holding)
        return name, address - begin

    def follow(self, entry: Mapping[str, Any]) -> Place:
        """Return the canonical address of a trace entry."""
        action, address = entry["action"], entry.get("addr", 0)
        if action in ("snapshot", "oom"):
            return "", 0
        if action == "segment_alloc":
            self._take(address, entry["size"], "segment")
            self.addresses.segments.append(address)
        elif action == "segment_map":
            self._map(address, entry["size"])
        place = self.of(address)
        if action == "segment_free":
            self.held.pop(address, None)
        elif action == "segment_unmap":
            self._unmap(address - place[1], entry["size"])
        return place

    def _take(self, address: int, size: int, kind: str) -> None:
        self.held[address] = f"{kind} {len(self.addresses)}", address + size

    def _map(self, address: int, size: int) -> None:
        name, offset = self.of(address)
        if name == "?":
            offset = 0
            self._take(address, self.reservation_bytes, "reservation")
            self.addresses.reservations.append(address)
        self.mapped[address - offset] = self.mapped.get(address - offset, 0) + size

    def _unmap(self, begin: int, size: int) -> None:
        """Remove a reserved range without mapped pages."""
        self.mapped[begin] = self.mapped.get(begin, 0) - size
        if not self.mapped[begin]:
            self.held.pop(begin, None)


def named(statistics: Mapping[str, int], names: Names) -> dict[str, int]:
    """Replace private pool ids in statistics by names; omit the pools of earlier scenarios."""
    ids = {f"{BY_POOL}{a}_{b}.": f"{BY_POOL}{name}." for (a, b), name in names.pools.items()}
    found = {}
    for name, number in statistics.items():
        if name.startswith(BY_POOL):
            begin, kind, part = name.rsplit(".", 2)
            if f"{begin}." in ids:
                found[f"{ids[f'{begin}.']}{kind}.{part}"] = number
        else:
            found[name] = number
    return found


def canonical(snapshot: Mapping[str, Any], names: Names, device: int = 0) -> Seen:
    """Return a snapshot in a form that is equal for equal behaviour."""
    places = _Places(names.reservation_bytes)
    entries = snapshot["device_traces"][device] if snapshot["device_traces"] else []
    own = [segment for segment in snapshot["segments"] if segment["device"] == device]
    places.know(own, entries)
    trace = [_entry(entry, places.follow(entry), names) for entry in entries]
    segments = [_segment(segment, places, names) for segment in own]
    settings = dict(snapshot["allocator_settings"])
    settings.pop(UNCOMPARED_SETTING, None)
    return Seen(
        sorted(segments, key=lambda segment: _by_number(segment["at"])),
        list(_completed_in_any_order(trace)),
        settings,
        _keys(snapshot, own, entries),
        places.addresses,
    )


def _by_number(place: Place) -> tuple[int, int]:
    number = place[0].rsplit(" ", 1)[-1]
    return int(number) if number.isdigit() else -1, place[1]


def _segment(segment: Mapping[str, Any], places: _Places, names: Names) -> dict[str, Any]:
    begin = segment["address"]
    return {
        "at": places.of(begin),
        **{key: segment[key] for key in SEGMENT},
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


def _entry(entry: Mapping[str, Any], place: Place, names: Names) -> dict[str, Any]:
    found = {
        "action": entry["action"],
        "at": place,
        "size": entry["size"],
        "stream": names.stream(entry["stream"]),
        "frames": bool(entry.get("frames")),
        "metadata": entry.get("user_metadata", ""),
    }
    if "pool_id" in entry:
        found["pool"] = names.pool(entry["pool_id"])
    return found


def _completed_in_any_order(trace: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Sort frees that completed together: PyTorch iterates over streams in a hash map."""
    for action, entries in groupby(trace, key=lambda entry: entry["action"]):
        if action == "free_completed":
            yield from sorted(entries, key=lambda entry: entry["at"])
        else:
            yield from entries


def segment_by_segment(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort the entries of a restore by segment: first the frees, then the splits.

    In which order PyTorch does either is that of a hash set of pointers to its own blocks, and so another one
    in every process (c10/cuda/CUDACachingAllocator.cpp, get_private_pool_head_blocks). What happens to one
    segment has an order.
    """
    return [
        entry
        for _, run in groupby(entries, key=lambda entry: entry["action"] == "snapshot")
        for part in _freed_and_divided(list(run))
        for entry in sorted(part, key=lambda entry: entry["at"][0])
    ]


def _freed_and_divided(entries: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Split the entries of a restore: all blocks are freed before the first segment is split."""
    divided = (number for number, entry in enumerate(entries) if entry["action"] == "alloc")
    first = next(divided, len(entries))
    yield entries[:first]
    yield entries[first:]


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
