"""The facts of a failed request, and the single changes that would have let it succeed. Sizes are in bytes.

A request is tried as in c10/cuda/CUDACachingAllocator.cpp (DeviceCachingAllocator::malloc): a free block of
its pool, size class and stream; a new segment; a new segment once cached segments are released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from cudakit.units import Unavailable

PoolId: TypeAlias = tuple[int, int]
DEFAULT_POOL: PoolId = (0, 0)
Frames: TypeAlias = "list[dict[str, str | int]]"

_NOT_QUERIED = Unavailable("not queried")


@dataclass(frozen=True, slots=True)
class Fit:
    """The single changes that would have let a failed request succeed."""

    without_cache: bool  # whether the request fits once empty segments are released
    without_holes: (
        bool  # whether the free bytes of the request's pool and stream suffice as one block
    )
    in_another_pool: bool  # whether a free block of another pool or stream is large enough
    after_pending_frees: bool  # whether the request fits once pending frees complete


def fit_of(
    *,
    block_bytes: int,
    segment_bytes: int,
    usable_bytes: int,
    releasable_bytes: int,
    own_free_bytes: int,
    largest_other_bytes: int,
    largest_later_bytes: int,
) -> Fit:
    """Return the single changes that would have let a failed request succeed.

    A block of ``block_bytes`` was requested, which needed a new segment of ``segment_bytes``. The device had
    ``usable_bytes`` left. ``releasable_bytes`` are cached in empty segments; ``own_free_bytes`` are free in
    the pool, size class and stream of the request. ``largest_other_bytes`` is the largest free block of other
    pools and streams, ``largest_later_bytes`` the largest one of the request's own pool once pending frees
    are complete.
    """
    return Fit(
        without_cache=usable_bytes + releasable_bytes >= segment_bytes,
        without_holes=own_free_bytes + usable_bytes >= block_bytes,
        in_another_pool=largest_other_bytes >= block_bytes,
        after_pending_frees=largest_later_bytes >= block_bytes,
    )


@dataclass(frozen=True, slots=True)
class StreamPool:
    """The memory for requests of one pool, one size class and one stream; no other request can use it."""

    pool: PoolId
    is_small: bool
    stream: int
    reserved_bytes: int
    free_bytes: int
    largest_free_bytes: int
    # Bytes in whole segments and pages of the default pool, which empty_cache releases.
    releasable_bytes: int = 0
    pending_bytes: int = 0  # Bytes that were freed but are used by other streams.


@dataclass(frozen=True, slots=True)
class Pin:
    """A block in use that keeps a mostly free segment from being released."""

    address: int
    size_bytes: int
    requested_bytes: int
    segment_bytes: int
    segment_free_bytes: int
    frames: Frames  # Call stack of the block's allocation; empty if not recorded.


class Process(Protocol):
    """A process that uses the device."""

    @property
    def pid(self) -> int: ...
    @property
    def used_bytes(self) -> int | Unavailable: ...


@dataclass(frozen=True, slots=True)
class OomReport:
    """A request that failed, and the memory at that moment."""

    device: int
    requested_bytes: int
    block_bytes: int  # Size of the block: the request after rounding.
    segment_bytes: int  # Size of the segment that was requested from the device.
    stream: int
    pool: PoolId
    is_small: bool
    device_free_bytes: int
    device_total_bytes: int
    limit_bytes: int | None  # Maximum of reserved bytes; None: no limit.
    allocated_bytes: int
    reserved_bytes: int
    private_free_bytes: int  # Free bytes in private pools.
    pending_bytes: int  # Bytes that were freed but are used by other streams.
    max_split_size_bytes: int | None
    expandable_segments: bool
    stream_pools: tuple[StreamPool, ...]  # Sorted by free bytes, the most first.
    pins: tuple[Pin, ...]  # Sorted by free bytes of the segment, the most first.
    # Pairs of a stream and the bytes of freed blocks that wait for it.
    bytes_by_awaited_stream: tuple[tuple[int, int], ...] = ()
    is_capturing: bool = False  # Whether a capture prevented waiting and releasing memory.
    is_rejected: bool = False  # Whether throw_on_cudamalloc_oom rejected the request.
    # The bytes of the address range of an expandable segment; None: segments are not expandable.
    range_bytes: int | None = None
    reserve_class: str = ""  # Class of the stream, which selects the size of the address range.
    processes: Sequence[Process] | Unavailable = _NOT_QUERIED  # Processes that use the device.

    @property
    def elsewhere_bytes(self) -> int:
        """Bytes of the device that are used outside of this allocator: contexts, other processes."""
        device_used_bytes = self.device_total_bytes - self.device_free_bytes
        return max(device_used_bytes - self.reserved_bytes, 0)

    @property
    def unallocated_bytes(self) -> int:
        """Bytes that are reserved and free in the default pool."""
        unallocated_bytes = self.reserved_bytes - self.allocated_bytes - self.private_free_bytes
        return max(unallocated_bytes - self.pending_bytes, 0)

    @property
    def is_limited(self) -> bool:
        """Whether the limit rejected the request although the device had enough memory."""
        return self.limit_bytes is not None and self.device_free_bytes >= self.segment_bytes

    @property
    def own_pool(self) -> StreamPool:
        """The stream pool that can serve the request."""
        key = self.pool, self.is_small, self.stream
        for stream_pool in self.stream_pools:
            if (stream_pool.pool, stream_pool.is_small, stream_pool.stream) == key:
                return stream_pool
        return StreamPool(*key, 0, 0, 0)

    @property
    def best_other_pool(self) -> StreamPool | None:
        """The stream pool with the largest free block, except ``own_pool``."""
        other_pools = [
            stream_pool for stream_pool in self.stream_pools if stream_pool != self.own_pool
        ]
        return max(
            other_pools, key=lambda stream_pool: stream_pool.largest_free_bytes, default=None
        )

    def fit(self) -> Fit:
        """Return the single changes that would have let the request succeed without new segments."""
        own_pool, other_pool = self.own_pool, self.best_other_pool
        return fit_of(
            block_bytes=self.block_bytes,
            segment_bytes=self.segment_bytes,
            usable_bytes=0,
            releasable_bytes=sum(stream_pool.releasable_bytes for stream_pool in self.stream_pools),
            own_free_bytes=own_pool.free_bytes,
            largest_other_bytes=other_pool.largest_free_bytes if other_pool else 0,
            # Pending frees are complete now: a large enough block became free after the last search.
            largest_later_bytes=own_pool.largest_free_bytes,
        )

    def used_by_process(self) -> dict[int, int]:
        """Return the device memory of each process, most bytes first; empty if unknown."""
        if isinstance(self.processes, Unavailable):
            return {}
        bytes_by_process: dict[int, int] = {}
        for process in self.processes:
            if not isinstance(process.used_bytes, Unavailable):
                # A process with a compute and a graphics context is listed twice.
                bytes_by_process[process.pid] = max(
                    bytes_by_process.get(process.pid, 0), process.used_bytes
                )
        return dict(sorted(bytes_by_process.items(), key=lambda pair: -pair[1]))
