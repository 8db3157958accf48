"""One device's recorded trace, with what its walk backwards found, as a program to replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cudakit.core.memory.replay import Replay, replay
from cudakit.core.memory.snapshot import DeviceTrace, Snapshot
from cudakit.torch_rules.actions import Action


@dataclass(frozen=True, slots=True)
class Recording:
    """What one device did, and the settings that were in force when the snapshot was taken."""

    snapshot: Snapshot
    trace: DeviceTrace
    history: Replay

    def has(self, action: Action) -> bool:
        """Return whether an action occurs in the trace."""
        return bool((self.trace.events.action == action).any())

    def count(self, *actions: Action) -> int:
        """Return how often any of some actions occurs in the trace."""
        return int(np.isin(self.trace.events.action, actions).sum())

    def failed_requests(self) -> list[int]:
        """Return the events at which memory ran out."""
        return np.flatnonzero(self.trace.events.action == Action.OOM).tolist()

    def segment_addresses(self) -> Iterator[tuple[int, int]]:
        """Return addresses and sizes of the segments, in the order in which they were allocated."""
        segments = self.history.segments.whole
        order = np.argsort(segments.begin, kind="stable")
        return zip(segments.address[order].tolist(), segments.size[order].tolist(), strict=True)


def recording_of(snapshot: Snapshot, trace: DeviceTrace) -> Recording:
    """Return the recording of a device of a snapshot."""
    return Recording(snapshot, trace, replay(snapshot, trace))
