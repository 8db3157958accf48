from __future__ import annotations

from typing import Any

import pytest
from memory.load.files import LARGE, MIB, STEP, event
from memory.load.reading import Loader, stack

from cudakit.memory.snapshot import HOST, BlockState
from cudakit.torch_rules.actions import Action


@pytest.mark.parametrize(
    "keys",
    [
        {"size": MIB, "allocated": 1, "active": 1},
        {"size": MIB, "allocated": True, "active": True},
        {"size": MIB, "allocated": MIB, "active": MIB},
        {"total_size": MIB, "allocated_size": MIB, "active_size": MIB},
        {"total_size": MIB, "is_allocated": True},
    ],
)
def test_host_segment_values_are_read_under_all_known_keys(
    loaded: Loader, keys: dict[str, Any]
) -> None:
    segment = {"address": LARGE, "segment_pool_id": (0, 0), "frames": STEP} | keys
    snapshot = loaded({"segments": [], "device_traces": [], "host_segments": [segment]})
    host = snapshot.devices[-1]
    assert host.device == HOST
    assert (host.segments.address.tolist(), host.segments.size.tolist()) == ([LARGE], [MIB])
    assert host.blocks.state.tolist() == [BlockState.ALLOCATED]
    assert stack(snapshot, int(host.blocks.stack[0])) == ["forward", "step", "main"]
    assert host.warnings == ()


def test_host_segments_are_in_use_pending_or_free(loaded: Loader) -> None:
    states = ((1, 1), (0, 1), (0, 0))
    segments = [
        {"addr": LARGE + i * MIB, "size": MIB, "allocated": used, "active": active}
        for i, (used, active) in enumerate(states)
    ]
    found = loaded({"host_segments": segments, "host_traces": []}).devices[-1].blocks
    assert found.state.tolist() == [
        BlockState.ALLOCATED,
        BlockState.PENDING_FREE,
        BlockState.INACTIVE,
    ]
    assert found.requested.tolist() == [MIB, MIB, 0]


def test_host_segments_without_a_state_count_as_in_use(loaded: Loader) -> None:
    segments = [{"address": LARGE, "size": MIB}, {"address": "none", "size": MIB}]
    host = loaded({"host_segments": segments}).devices[-1]
    assert host.blocks.state.tolist() == [BlockState.ALLOCATED]
    assert host.warnings == (
        "1 host segments without a valid address or size were skipped",
        "1 host segments without a state count as in use",
    )


@pytest.mark.parametrize("nested", [False, True])
def test_host_trace_is_a_list_of_entries_or_of_lists(loaded: Loader, *, nested: bool) -> None:
    entries = [event("alloc", LARGE, 512), event("free_requested", LARGE, 512)]
    traces = [[], entries] if nested else entries
    snapshot = loaded({"device_traces": [[]], "host_traces": traces})
    assert snapshot.devices[-1].device == HOST
    assert snapshot.devices[-1].events.action.tolist() == [Action.ALLOC, Action.FREE_REQUESTED]
    assert snapshot.has_times
