"""Generate snapshots of a million events in PyTorch's format, without a GPU.

    python scripts/make_snapshots.py FOLDER [EVENTS]

Writes few_stacks.pkl (30 call stacks, one stream), the same with a failed allocation at its end, and
many_stacks.pkl (6,000 call stacks, four streams, pending frees). As in PyTorch's files, call stacks share
frames and every event has its own list.
scripts/record_snapshots.py records such files with PyTorch.
"""

from __future__ import annotations

import pickle
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SLOT = 4 << 20  # each allocation has its own segment of this size
_BASE = 0x7F00_0000_0000
_DEPTH = 14
_LIVE = 1_500
_SLOTS = 2_000


@dataclass
class Program:
    """A program that allocates and frees at random."""

    stacks: list[list[dict[str, Any]]]
    streams: int
    rng: random.Random
    time_us: int = 1_795_000_000_000_000
    trace: list[dict[str, Any]] = field(default_factory=list)
    live: list[dict[str, Any]] = field(default_factory=list)
    pending: list[dict[str, Any]] = field(default_factory=list)
    free: list[int] = field(default_factory=lambda: list(range(_SLOTS)))

    def run(self, events: int) -> None:
        """Allocate and free until the trace has ``events`` events."""
        while len(self.trace) < events:
            if len(self.live) < _LIVE or (self.free and self.rng.random() < 0.5):
                self._allocate()
            else:
                self._free()
            if len(self.pending) > 20:
                self._complete(self.pending.pop(0))

    def _allocate(self) -> None:
        if not self.free:
            self._complete(self.pending.pop(0))
        entry = {
            "addr": _BASE + self.free.pop(self.rng.randrange(len(self.free))) * _SLOT,
            "size": self.rng.randrange(1, _SLOT),
            "stream": 0xA000_0000 * self.rng.randrange(self.streams),
            "stack": self.rng.choice(self.stacks),
        }
        self.live.append(entry)
        self._record("alloc", entry)

    def _free(self) -> None:
        entry = self.live.pop(self.rng.randrange(len(self.live)))
        self._record("free_requested", entry)
        if self.streams > 1 and self.rng.random() < 0.05:
            self.pending.append(entry)
        else:
            self._complete(entry)

    def _complete(self, entry: dict[str, Any]) -> None:
        self._record("free_completed", entry)
        self.free.append((entry["addr"] - _BASE) // _SLOT)

    def _record(self, action: str, entry: dict[str, Any]) -> None:
        self.time_us += self.rng.randrange(1, 9)
        self.trace.append(
            {
                "action": action,
                "addr": entry["addr"],
                "size": entry["size"],
                "stream": entry["stream"],
                "time_us": self.time_us,
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": list(entry["stack"]),
            }
        )


def segments(program: Program) -> list[dict[str, Any]]:
    """Return the final segments; each has at most one block in use."""
    states = {entry["addr"]: (entry, "active_allocated") for entry in program.live}
    states |= {entry["addr"]: (entry, "active_pending_free") for entry in program.pending}
    return [_segment(_BASE + slot * _SLOT, states) for slot in range(_SLOTS)]


def _segment(address: int, states: dict[int, tuple[dict[str, Any], str]]) -> dict[str, Any]:
    entry, state = states.get(address, ({"size": 0, "stream": 0, "stack": []}, "inactive"))
    used = -(-entry["size"] // 512) * 512
    if _SLOT - used <= 1 << 20 and used:
        used = _SLOT  # PyTorch splits a large block only if more than 1 MiB remains
    blocks = [
        _block(address, used, entry["size"], state, entry["stack"]),
        _block(address + used, _SLOT - used, 0, "inactive", []),
    ]
    return {
        "device": 0,
        "address": address,
        "total_size": _SLOT,
        "allocated_size": used if state == "active_allocated" else 0,
        "active_size": used,
        "requested_size": entry["size"],
        "stream": entry["stream"],
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [block for block in blocks if block["size"]],
    }


def _block(
    address: int, size: int, requested: int, state: str, frames: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": list(frames),
    }


def make(path: Path, *, events: int, stacks: int, streams: int, fails: bool = False) -> None:
    """Write one snapshot; with ``fails`` the last event is a failed allocation."""
    rng = random.Random(stacks)
    frames = [
        {"name": f"function_{i}", "filename": f"project/module_{i % 97}.py", "line": i}
        for i in range(max(200, stacks // 2))
    ]
    program = Program(
        stacks=[rng.choices(frames, k=_DEPTH) for _ in range(stacks)], streams=streams, rng=rng
    )
    program.run(events)
    if fails:
        size, last = _SLOTS * _SLOT, program.trace[-1]
        program.trace.append(last | {"action": "oom", "device_free": 0, "size": size})
    snapshot = {
        "segments": segments(program),
        "device_traces": [program.trace],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1},
        "external_annotations": [],
    }
    with path.open("wb") as file:
        pickle.dump(snapshot, file, protocol=4)


def main() -> None:
    """Write the snapshots into a folder."""
    folder, events = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
    make(folder / "few_stacks.pkl", events=events, stacks=30, streams=1)
    make(folder / "few_stacks_fails.pkl", events=events, stacks=30, streams=1, fails=True)
    make(folder / "many_stacks.pkl", events=events, stacks=6_000, streams=4)


if __name__ == "__main__":
    main()
