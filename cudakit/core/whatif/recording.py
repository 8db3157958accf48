"""One device's recorded trace as whatif reads it: arrays and plain facts that the caller hands over.

Sizes are bytes. An event index counts from 0; BEFORE is before the trace, n (the number of events) after it.
Moment 0 is before the first event, moment ``i + 1`` after event ``i``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.torch_rules.actions import Action

BEFORE = -1

Longs: TypeAlias = npt.NDArray[np.int64]
Ints: TypeAlias = npt.NDArray[np.int32]
Addresses: TypeAlias = npt.NDArray[np.uint64]


class Events(Protocol):
    """The events of a trace, oldest first; arrays of one item an event."""

    @property
    def action(self) -> npt.NDArray[np.uint8]: ...  # torch_rules.actions.Action
    @property
    def address(self) -> Addresses: ...  # of an OOM: bytes free on the device
    @property
    def size(self) -> Longs: ...
    @property
    def stream(self) -> Ints: ...
    @property
    def stack(self) -> Ints: ...  # equal numbers are equal call stacks; 0: none
    @property
    def pool(self) -> Ints: ...  # 0: the default pool; -1: not recorded
    def __len__(self) -> int: ...


class Allocations(Protocol):
    """The allocations of a trace; arrays of one item an allocation."""

    @property
    def address(self) -> Addresses: ...
    @property
    def requested(self) -> Longs: ...
    @property
    def begin(self) -> Longs: ...  # event indices, as are the next two
    @property
    def free_requested(self) -> Longs: ...
    @property
    def end(self) -> Longs: ...
    @property
    def stream(self) -> Ints: ...
    @property
    def pool(self) -> Ints: ...
    def __len__(self) -> int: ...


class Curves(Protocol):
    """Bytes at every moment, named as in torch.cuda.memory_stats(); arrays of n + 1 items."""

    @property
    def requested(self) -> Longs: ...
    @property
    def allocated(self) -> Longs: ...
    @property
    def active(self) -> Longs: ...
    @property
    def reserved(self) -> Longs: ...


class Segments(Protocol):
    """The segments that were allocated in one piece; arrays of one item a segment."""

    @property
    def address(self) -> Addresses: ...
    @property
    def size(self) -> Longs: ...
    @property
    def begin(self) -> Longs: ...


@dataclass(frozen=True, slots=True)
class Recording:
    """What one device did, and the settings that were in force when the snapshot was taken."""

    source: str  # the name of the file
    device: int
    events: Events
    allocations: Allocations
    curves: Curves
    segments: Segments
    settings: Mapping[str, Any]  # as the snapshot has them
    pool_count: int
    begins_complete: bool  # nothing was allocated before the trace
    is_consistent: bool  # the trace and the state at its end agree

    def peak_moment(self) -> int:
        """Return the first moment at which most was requested."""
        return int(self.curves.requested.argmax())

    def has(self, action: Action) -> bool:
        """Return whether an action occurs in the trace."""
        return bool((self.events.action == action).any())

    def count(self, *actions: Action) -> int:
        """Return how often any of some actions occurs in the trace."""
        return int(np.isin(self.events.action, actions).sum())

    def failed_requests(self) -> list[int]:
        """Return the events at which memory ran out."""
        return [int(event) for event in np.flatnonzero(self.events.action == Action.OOM)]

    def segment_addresses(self) -> Iterator[tuple[int, int]]:
        """Return addresses and sizes of the segments, in the order in which they were allocated."""
        order = np.argsort(self.segments.begin, kind="stable")
        addresses, sizes = self.segments.address[order], self.segments.size[order]
        return zip(addresses.tolist(), sizes.tolist(), strict=True)
