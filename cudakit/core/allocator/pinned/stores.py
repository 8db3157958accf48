"""Where free blocks are kept, and how large blocks are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from cudakit.core.allocator.pinned.blocks import HostBlock, HostSegment, Kind
from cudakit.torch_rules.settings import Settings


class Store(Protocol):
    """Free blocks; which of them serves a request, and what is taken for it from the driver."""

    divides: bool

    def configure(self, settings: Settings) -> None: ...

    def rounded(self, size_bytes: int) -> int:
        """Round a request up to the size of its block."""
        ...

    def segment(self, size: int) -> tuple[int, Kind]:
        """Say how much is taken from the driver for a block, and for what."""
        ...

    def take(self, size: int) -> HostBlock | None:
        """Take out a free block that serves a request."""
        ...

    def set_aside(self, segment: HostSegment | None) -> None:
        """Serve from a reserve what no free block serves; from none any more."""
        ...

    def carve(self, size: int) -> HostBlock | None:
        """Make a block of the reserve that was none before."""
        ...

    def cut(self, block: HostBlock, size: int) -> None:
        """Keep what a block, which was taken out, has beyond a size."""
        ...

    def put(self, block: HostBlock) -> HostBlock:
        """Take a block in, and return what it is a part of now."""
        ...

    def discard(self, block: HostBlock) -> None:
        """Forget a free block."""
        ...

    def __iter__(self) -> Iterator[HostBlock]: ...
