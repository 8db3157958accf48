"""Objects that hold private pools, and let go of them at their end.

MemPool is torch.cuda.MemPool (torch/cuda/memory.py, c10/cuda/CUDACachingAllocator.cpp: MemPool).
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Protocol, Self

from cudakit.core.allocator.pool_stats import PoolId
from cudakit.core.allocator.pools import SegmentSource


class PoolOwner(Protocol):
    """The calls of an allocator that these objects use."""

    def create_pool(
        self,
        *,
        source: SegmentSource | None = None,
        use_on_oom: bool = False,
        splits: bool = True,
    ) -> PoolId: ...
    def abandon_pool(self, pool_id: PoolId, empties: bool) -> None: ...
    def release_pool(self, pool_id: PoolId, *, unrouted: bool = False) -> None: ...
    def empty_pool(self, pool_id: PoolId) -> None: ...
    def pool_uses(self, pool_id: PoolId) -> int: ...
    def snapshot(self) -> dict[str, Any]: ...


class HeldPool:
    """A private pool that is held until ``close``, the end of a with block, or the end of this object."""

    _empties = False  # whether the cached memory is released at once

    def __init__(self, allocator: PoolOwner, pool_id: PoolId) -> None:
        self.id = pool_id
        self._allocator = allocator
        self._finalizer = weakref.finalize(self, allocator.abandon_pool, pool_id, self._empties)
        self._finalizer.atexit = False  # the device may be gone by then

    @property
    def uses(self) -> int:
        """The number of holders of the pool, this object included: 0 once all have let go."""
        return self._allocator.pool_uses(self.id)

    @property
    def closed(self) -> bool:
        """Whether this object has let go of the pool."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Let go of the pool; what of it is still allocated stays so. A second time does nothing.

        Raises PoolError while requests go there, CudaError where the driver refuses.
        """
        if self._finalizer.alive:
            self._allocator.release_pool(self.id, unrouted=self._empties)
            self._finalizer.detach()
            if self._empties:
                self._allocator.empty_pool(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class GraphMemory(HeldPool):
    """The pool of a captured graph: held as long as the graph may run.

    What it caches is given back by ``empty_cache`` after that, as when a torch.cuda.CUDAGraph is deleted.
    """


class MemPool(HeldPool):
    """A pool of a user's own, for what is allocated within ``allocator.use_pool(pool)``.

    ``upstream`` gives it its segments and takes them back, and lives until the last is gone; it is called
    with the allocator locked, and may not ask it for anything. ``use_on_oom`` lets requests for the default
    pool have what it caches before memory is said to be out. ``no_split`` gives every block a segment of its
    own. When it is closed, or nobody has it any more, what it caches is given back.
    """

    _empties = True

    def __init__(
        self,
        allocator: PoolOwner,
        *,
        upstream: SegmentSource | None = None,
        use_on_oom: bool = False,
        no_split: bool = False,
    ) -> None:
        pool_id = allocator.create_pool(source=upstream, use_on_oom=use_on_oom, splits=not no_split)
        super().__init__(allocator, pool_id)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return its segments, in PyTorch's format."""
        segments = self._allocator.snapshot()["segments"]
        return [segment for segment in segments if segment["segment_pool_id"] == self.id]
