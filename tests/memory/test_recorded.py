"""Snapshots recorded on a GPU, compared with PyTorch's counters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cudakit.memory.history import History, reconstruct
from cudakit.memory.lifetimes import Contradictions
from cudakit.memory.load import load
from cudakit.memory.snapshot import BlockState, DeviceTrace

DATA = Path(__file__).parents[1] / "data"
SNAPSHOTS = sorted(path.with_suffix("").with_suffix("") for path in DATA.glob("*.pkl.gz"))
RECORDINGS = [path for path in SNAPSHOTS if path.with_suffix(".json").exists()]
COUNTERS = ("requested", "allocated", "active", "reserved")


@pytest.fixture(scope="module", params=RECORDINGS, ids=lambda path: path.name)
def recording(request: pytest.FixtureRequest) -> Path:
    """Return the path of a recording without the suffixes of its two files."""
    path = request.param
    assert isinstance(path, Path)
    return path


@pytest.fixture(scope="module")
def found(recording: Path) -> tuple[DeviceTrace, History]:
    snapshot = load(str(recording.with_suffix(".pkl.gz")))
    (trace,) = snapshot.devices
    return trace, reconstruct(snapshot, trace)


@pytest.fixture(scope="module")
def counters(recording: Path) -> dict[str, dict[str, int]]:
    kept: dict[str, dict[str, int]] = json.loads(recording.with_suffix(".json").read_text())
    return kept


def test_recordings_cover_each_kind_of_program() -> None:
    expected = {"expandable", "fragmented_oom", "leak", "pools", "streams", "train"}
    assert expected == {path.name for path in RECORDINGS}


@pytest.mark.parametrize("counter", COUNTERS)
def test_peak_and_end_equal_pytorchs_counters(
    found: tuple[DeviceTrace, History], counters: dict[str, dict[str, int]], counter: str
) -> None:
    curve = getattr(found[1].curves, counter)
    assert int(curve.max()) == counters["peak"][f"{counter}_bytes"]
    assert int(curve[-1]) == counters["end"][f"{counter}_bytes"]


def test_recorded_trace_and_final_state_agree(found: tuple[DeviceTrace, History]) -> None:
    trace, replayed = found
    assert replayed.inconsistencies == Contradictions()
    assert replayed.begins_complete
    assert trace.warnings == ()


def test_every_recorded_event_is_read(
    found: tuple[DeviceTrace, History], counters: dict[str, int]
) -> None:
    assert len(found[0].events) == counters["events"]


def test_final_layout_has_the_blocks_of_the_file(found: tuple[DeviceTrace, History]) -> None:
    trace, replayed = found
    layout = replayed.layout_at(replayed.n_events)
    active = trace.blocks.state != BlockState.INACTIVE
    addresses = layout.segments.address[layout.block_segment]
    addresses = addresses + layout.block_offset.astype(np.uint64)
    assert layout.segments.address.tolist() == trace.segments.address.tolist()
    assert sorted(addresses.tolist()) == sorted(trace.blocks.address[active].tolist())
    assert layout.free_block_size.sum() == trace.blocks.size[~active].sum()


def test_layout_at_every_moment_sums_to_the_curves(
    found: tuple[DeviceTrace, History],
) -> None:
    _, replayed = found
    curves, n = replayed.curves, replayed.n_events
    for moment in np.unique(np.linspace(0, n, 60).astype(np.int64)).tolist():
        layout = replayed.layout_at(moment)
        assert layout.segments.size.sum() == curves.reserved[moment]
        assert layout.block_size.sum() == curves.active[moment]
