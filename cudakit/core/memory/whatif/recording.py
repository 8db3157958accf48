"""The recording of one device: its snapshot, trace and reconstructed history."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cudakit.core.memory.replay import Replay, replay
from cudakit.core.memory.snapshot import DeviceTrace, Snapshot
from cudakit.torch_rules.actions import Action


@dataclass(frozen=True, slots=True)
class Recording:
    """One device of a snapshot; settings are those at the time of the snapshot."""

    snapshot: Snapshot
    trace: DeviceTrace
    history: Replay

    def has(self, action: Action) -> bool:
        """Return whether an action occurs in the trace."""
        return bool((self.trace.events.action == action).any())

    def count(self, *actions: Action) -> int:
        """Return the number of events with one of these actions."""
        return int(np.isin(self.trace.events.action, actions).sum())

    def failed_requests(self) -> list[int]:
        """Return the events of failed allocations."""
        return np.flatnonzero(self.trace.events.action == Action.OOM).tolist()

    def segment_addresses(self) -> Iterator[tuple[int, int]]:
        """Yield the addresses and sizes of the segments in the order of their allocation."""
        segments = self.history.segments.plain
        order = np.argsort(segments.begin, kind="stable")
        return zip(segments.address[order].tolist(), segments.size[order].tolist(), strict=True)


def recording_of(snapshot: Snapshot, trace: DeviceTrace) -> Recording:
    """Return the recording of a device of a snapshot."""
    return Recording(snapshot, trace, replay(snapshot, trace))
