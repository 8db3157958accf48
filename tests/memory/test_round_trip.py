"""Snapshots that the builders write and the loader reads."""

from __future__ import annotations

import pickle
from typing import Any

from hypothesis import given
from memory import builders
from memory.builders import MIB, START_US, Block, Segment, alloc, annotated, oom, torch_dict
from memory.simulated_history import SimulatedHistory
from memory.strategies import LAW, recordings

from cudakit.memory import load
from cudakit.memory.history import reconstruct
from cudakit.memory.load import pickled
from cudakit.memory.snapshot import Snapshot

BASE = 0x7F00_0000_0000


def read(written: dict[str, Any]) -> Snapshot:
    content = pickle.dumps(written)
    tree = pickled.read(content)
    return load.build(tree, source="snapshot.pkl", file_format="pickle", size_bytes=len(content))


@LAW
@given(recordings(pools=3))
def test_simulated_recording_survives_a_round_trip(history: SimulatedHistory) -> None:
    written = torch_dict(history.snapshot())
    found = read(written)
    assert torch_dict(found) == written
    assert found.devices[0].warnings == ()


@LAW
@given(recordings(pools=3))
def test_replay_is_equal_after_a_round_trip(history: SimulatedHistory) -> None:
    snapshot = read(torch_dict(history.snapshot()))
    found, expected = reconstruct(snapshot, snapshot.devices[0]), history.reconstruct()
    assert found.inconsistencies == expected.inconsistencies
    for curve in ("requested", "allocated", "active", "reserved"):
        assert getattr(found.curves, curve).tolist() == getattr(expected.curves, curve).tolist()


def test_written_snapshot_has_all_parts() -> None:
    words = ("", "0/0", '{"layer":1}', "parameter")
    entries = [
        alloc(BASE, 100, compile_context=1, user_metadata=2, category=3, stack=1, pool=2),
        oom(64 * MIB, device_free=5 * MIB, stream=1),
    ]
    final = [Segment(BASE, 20 * MIB, [Block(BASE, 512, 100)], pool=2, expandable=True)]
    devices = (builders.trace(entries, final), builders.trace([], final, device=2))
    ranges = annotated("step 1", START_US, START_US + 5)
    written = torch_dict(builders.snapshot(*devices, texts=words, annotations=ranges))
    assert len(written["device_traces"]) == 3
    assert torch_dict(read(written)) == written
