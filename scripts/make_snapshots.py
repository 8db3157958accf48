"""Generate snapshots of a million events in PyTorch's format, without a GPU.

    python scripts/make_snapshots.py FOLDER [EVENTS]

Writes few_stacks.pkl (30 call stacks, one stream), few_stacks_fails.pkl (the same events, and then a failed
allocation), and many_stacks.pkl (6,000 call stacks, four streams, pending frees). As in PyTorch's files, call
stacks share frames, and each event has a separate list of frames.
scripts/record_snapshots.py records such files with PyTorch.
"""

from __future__ import annotations

import pickle
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SLOT_BYTES = 4 << 20  # The size of a segment; each segment has at most one allocation.
_BASE = 0x7F00_0000_0000
_STACK_FRAMES = 14
_MAX_LIVE = 1_500  # The maximum number of live allocations.
_SLOT_COUNT = 2_000


@dataclass
class Program:
    """A simulated program that allocates and frees memory at random."""

    stacks: list[list[dict[str, Any]]]
    streams: int
    rng: random.Random
    time_us: int = 1_795_000_000_000_000
    trace: list[dict[str, Any]] = field(default_factory=list)
    live: list[dict[str, Any]] = field(default_factory=list)
    pending: list[dict[str, Any]] = field(default_factory=list)  # Requested frees that wait.
    free_slots: list[int] = field(default_factory=lambda: list(range(_SLOT_COUNT)))

    def run(self, events: int) -> None:
        """Allocate and free until the trace has ``events`` events."""
        while len(self.trace) < events:
            if len(self.live) < _MAX_LIVE or (self.free_slots and self.rng.random() < 0.5):
                self._allocate()
            else:
                allocation = self.live.pop(self.rng.randrange(len(self.live)))
                self._record("free_requested", allocation)
                if self.streams > 1 and self.rng.random() < 0.05:
                    self.pending.append(allocation)
                else:
                    self._complete(allocation)
            if len(self.pending) > 20:
                self._complete(self.pending.pop(0))

    def _allocate(self) -> None:
        if not self.free_slots:
            self._complete(self.pending.pop(0))
        allocation = {
            "addr": _BASE
            + self.free_slots.pop(self.rng.randrange(len(self.free_slots))) * _SLOT_BYTES,
            "size": self.rng.randrange(1, _SLOT_BYTES),
            "stream": 0xA000_0000 * self.rng.randrange(self.streams),
            "stack": self.rng.choice(self.stacks),
        }
        self.live.append(allocation)
        self._record("alloc", allocation)

    def _complete(self, allocation: dict[str, Any]) -> None:
        self._record("free_completed", allocation)
        self.free_slots.append((allocation["addr"] - _BASE) // _SLOT_BYTES)

    def _record(self, action: str, allocation: dict[str, Any]) -> None:
        self.time_us += self.rng.randrange(1, 9)
        self.trace.append(
            {
                "action": action,
                "addr": allocation["addr"],
                "size": allocation["size"],
                "stream": allocation["stream"],
                "time_us": self.time_us,
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": list(allocation["stack"]),
            }
        )


def segments(program: Program) -> list[dict[str, Any]]:
    """Return the segments at the end of the program."""
    states = {allocation["addr"]: (allocation, "active_allocated") for allocation in program.live}
    states |= {
        allocation["addr"]: (allocation, "active_pending_free") for allocation in program.pending
    }
    return [_segment(_BASE + slot * _SLOT_BYTES, states) for slot in range(_SLOT_COUNT)]


def _segment(address: int, states: dict[int, tuple[dict[str, Any], str]]) -> dict[str, Any]:
    allocation, state = states.get(address, ({"size": 0, "stream": 0, "stack": []}, "inactive"))
    used = -(-allocation["size"] // 512) * 512
    if _SLOT_BYTES - used <= 1 << 20 and used:
        used = _SLOT_BYTES  # PyTorch splits a large block only if more than 1 MiB remains.
    blocks = [
        _block(address, used, allocation["size"], state, allocation["stack"]),
        _block(address + used, _SLOT_BYTES - used, 0, "inactive", []),
    ]
    return {
        "device": 0,
        "address": address,
        "total_size": _SLOT_BYTES,
        "allocated_size": used if state == "active_allocated" else 0,
        "active_size": used,
        "requested_size": allocation["size"],
        "stream": allocation["stream"],
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
    """Write a snapshot; with ``fails`` the last event is a failed allocation."""
    rng = random.Random(stacks)
    frames = [
        {"name": f"function_{i}", "filename": f"project/module_{i % 97}.py", "line": i}
        for i in range(max(200, stacks // 2))
    ]
    program = Program(
        stacks=[rng.choices(frames, k=_STACK_FRAMES) for _ in range(stacks)],
        streams=streams,
        rng=rng,
    )
    program.run(events)
    if fails:
        size, last = _SLOT_COUNT * _SLOT_BYTES, program.trace[-1]
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
    """Write the snapshots into the folder that the command line names."""
    folder, events = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
    make(folder / "few_stacks.pkl", events=events, stacks=30, streams=1)
    make(folder / "few_stacks_fails.pkl", events=events, stacks=30, streams=1, fails=True)
    make(folder / "many_stacks.pkl", events=events, stacks=6_000, streams=4)


if __name__ == "__main__":
    main()
