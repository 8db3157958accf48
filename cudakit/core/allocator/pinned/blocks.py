"""Blocks of pinned memory, and what they are pieces of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from cudakit.core.allocator.blocks import RawStack
    from cudakit.core.allocator.pinned.pools import HostPool

# Whose requests it serves: those of at most 1 MiB, larger ones, or any.
Kind: TypeAlias = Literal["small", "large", "reserve"]


@dataclass(frozen=True, slots=True)
class HostSegment:
    """Memory that the driver gave in one piece; of a reserve, it is given back at the end only."""

    ptr: int
    size: int
    kind: Kind = "large"


class HostBlock:
    """A piece of pinned memory: free, handed out, or freed while streams still use it."""

    __slots__ = (
        "allocated",
        "captured",
        "free",
        "next",
        "pool",
        "previous",
        "ptr",
        "requested",
        "segment",
        "size",
        "stack",
        "streams",
        "waits",
    )

    def __init__(self, ptr: int, size: int, segment: HostSegment) -> None:
        self.ptr = ptr
        self.size = size
        self.segment = segment
        self.pool: HostPool | None = None  # that it was handed out from last
        self.requested = 0  # bytes of the last request that it served
        self.free = self.allocated = False
        self.captured = False  # handed out during a capture: a graph may use it whenever it runs
        self.previous: HostBlock | None = None
        self.next: HostBlock | None = None
        self.streams: dict[int, None] = {}  # that use it, no event recorded yet
        self.waits = 0  # events recorded that it waits for
        self.stack: RawStack | None = None

    @property
    def whole(self) -> bool:
        """Whether it is the whole of what the driver gave."""
        return self.size == self.segment.size
