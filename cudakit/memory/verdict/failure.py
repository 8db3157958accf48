"""A failed allocation: the request, the memory at this moment, and what kept the request from fitting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.memory.history import History, Layout
from cudakit.memory.snapshot import (
    POOL_NAMES,
    PYTORCH_CALLS,
    AllocatorCalls,
    CallSite,
    DeviceTrace,
    Ints,
    Mask,
    SegmentKind,
    StackTable,
)
from cudakit.memory.steps import StepHistory
from cudakit.torch_rules.oom import Fit, fit_of
from cudakit.torch_rules.settings import MAX_SMALL_BYTES, segment_size
from cudakit.units import format_bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed allocation: the input of every cause. Sizes are in bytes."""

    request: FailedRequest
    event: int  # index of the out-of-memory event, and of the moment before this event
    stream: int  # stream number
    pool: tuple[int, int]  # id of the pool of the request
    stack: int  # index of the call stack of the request
    device_total_bytes: int | None  # memory of the device; None if not recorded
    # Names of other libraries of this process, and the bytes that they have reserved; most bytes first.
    libraries: tuple[tuple[str, int], ...]
    # Limit of the process as a fraction of the device; None if not recorded.
    memory_fraction: float | None
    layout: Layout  # segments and blocks before the request
    trace: DeviceTrace
    history: History
    steps: StepHistory
    stacks: StackTable

    @property
    def call_site(self) -> CallSite:
        """The call stack of the request."""
        return self.stacks.call_site(self.stack)

    @property
    def needed_bytes(self) -> int:
        """Sum of the requested bytes in use at the failure and the failed request."""
        return int(self.history.curves.requested[self.event]) + self.request.size_bytes

    @property
    def highest_reserved_bytes(self) -> int:
        """The most reserved memory until the failure: the process was allowed to reserve as much."""
        return int(self.history.curves.reserved[: self.event + 1].max())

    @property
    def earlier_peaks(self) -> Ints:
        """The peaks of the steps that ended before the failure."""
        return self.steps.peak_bytes[: max(self.steps.number_at(self.event), 0)]

    @property
    def library_bytes(self) -> int:
        """Memory that other libraries of this process have reserved."""
        return sum(reserved_bytes for _, reserved_bytes in self.libraries)

    @property
    def available_bytes(self) -> int:
        """Largest memory that the allocator could reserve if nothing else used the device."""
        request = self.request
        reachable_bytes = request.reserved_bytes + request.device_free_bytes + self.library_bytes
        return max(self.device_total_bytes or 0, reachable_bytes)

    @property
    def outside_bytes(self) -> int:
        """Device memory in use outside this allocator; a lower bound if the device size is not recorded."""
        return self.available_bytes - self.request.reserved_bytes - self.request.device_free_bytes


def failure_at(
    event: int, *, trace: DeviceTrace, history: History, steps: StepHistory, stacks: StackTable
) -> Failure:
    """Return the failed allocation of an OOM event."""
    snapshot, layout = stacks.snapshot, history.layout_at(event)
    events, segments = trace.events, layout.segments
    # The pools of libraries other than PyTorch, which run --memory records.
    library_pools = [index for index, pool in enumerate(snapshot.pools) if pool in POOL_NAMES]
    is_library = np.isin(segments.pool, library_pools)
    library_bytes = np.bincount(segments.pool[is_library], weights=segments.size[is_library])
    is_usable = _usable_segments(trace, layout, event)
    pool = int(events.pool[event])
    if pool < 0:  # torch before 2.12 records no pool
        pool = int(segments.pool[is_usable].max(initial=0))
    total_bytes = _setting_of_device(snapshot.settings, "device_total_bytes", trace.device)
    # Masks of the free blocks.
    is_usable_free = is_usable[layout.free_block_segment]
    is_own_free = ~is_library[layout.free_block_segment]
    is_empty = (layout.used_by_segment() == 0) & ~is_library
    return Failure(
        request=FailedRequest(
            size_bytes=int(events.size[event]),
            device_free_bytes=int(events.address[event]),
            reserved_bytes=int(segments.size[~is_library].sum()),
            active_bytes=int(layout.block_size[~is_library[layout.block_segment]].sum()),
            free_bytes=int(layout.free_block_size[is_own_free].sum()),
            own_free_bytes=int(layout.free_block_size[is_usable_free].sum()),
            own_largest_bytes=_largest(layout.free_block_size[is_usable_free]),
            later_largest_bytes=_largest_after_pending(layout, is_usable),
            other_largest_bytes=_largest(layout.free_block_size[~is_usable_free & is_own_free]),
            releasable_bytes=int(segments.size[is_empty].sum()),
            releasable_private_bytes=int(segments.size[is_empty & (segments.pool != 0)].sum()),
            pending_bytes=int(layout.block_size[layout.block_pending].sum()),
            calls=snapshot.calls,
        ),
        event=event,
        stream=int(events.stream[event]),
        pool=snapshot.pools[pool],
        stack=int(events.stack[event]),
        device_total_bytes=int(total_bytes) if total_bytes else None,
        libraries=tuple(
            (POOL_NAMES[snapshot.pools[index]], int(library_bytes[index]))
            for index in np.argsort(-library_bytes, kind="stable").tolist()
            if library_bytes[index]
        ),
        memory_fraction=_setting_of_device(snapshot.settings, "memory_fraction", trace.device),
        layout=layout,
        trace=trace,
        history=history,
        steps=steps,
        stacks=stacks,
    )


def _setting_of_device(settings: Mapping[str, Any], name: str, device: int) -> float | None:
    """Return the value of a device from a recorded setting with a value per device; None: not recorded."""
    values = settings.get(name)
    if not isinstance(values, list) or not 0 <= device < len(values):
        return None
    value = values[device]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 < value < 1 << 62 else None


def _usable_segments(trace: DeviceTrace, layout: Layout, event: int) -> Mask:
    """Return a mask of the segments that can serve the request: its stream, pool and size class."""
    events, segments = trace.events, layout.segments
    request_bytes, pool_id = int(events.size[event]), int(events.pool[event])
    kind = SegmentKind.SMALL if request_bytes <= MAX_SMALL_BYTES else SegmentKind.LARGE
    is_usable: Mask = np.isin(segments.kind, (kind, SegmentKind.UNKNOWN))
    is_usable &= segments.stream == events.stream[event]
    is_private: Mask = segments.pool != 0
    if pool_id >= 0:
        is_usable &= segments.pool == pool_id
        return is_usable
    # Before torch 2.12 events do not name the pool. If a free block of the default pool is large enough, the
    # request was made in a private pool.
    is_default = is_usable & ~is_private
    free_sizes = layout.free_block_size[is_default[layout.free_block_segment]]
    fits_in_default_pool = _largest(free_sizes) >= request_bytes
    return is_usable & is_private if fits_in_default_pool and is_private.any() else is_default


def _largest_after_pending(layout: Layout, is_usable_segment: Mask) -> int:
    """Return the largest free block after all pending frees, merged with adjacent free blocks.

    This includes blocks that were free already: PyTorch does not search those again after it has waited for
    pending frees (pytorch issue 189504).
    """
    is_pending = layout.block_pending & is_usable_segment[layout.block_segment]
    is_free = is_usable_segment[layout.free_block_segment]
    segments, offsets, sizes = (
        np.concatenate((of_blocks[is_pending], of_free_blocks[is_free]))
        for of_blocks, of_free_blocks in (
            (layout.block_segment, layout.free_block_segment),
            (layout.block_offset, layout.free_block_offset),
            (layout.block_size, layout.free_block_size),
        )
    )
    order = np.lexsort((offsets, segments))
    segments, offsets, sizes = segments[order], offsets[order], sizes[order]
    is_adjacent = np.zeros(len(order), np.bool_)
    is_adjacent[1:] = (segments[1:] == segments[:-1]) & (offsets[1:] == (offsets + sizes)[:-1])
    return _largest(np.bincount(np.cumsum(~is_adjacent), weights=sizes))


def _largest(sizes: npt.NDArray[np.generic]) -> int:
    return int(sizes.max(initial=0)) if len(sizes) else 0


# --- The obstacle: the single change that would have let the request succeed -----------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """A request that failed, and the memory at that moment; in bytes.

    "Own" free blocks are those in the request's pool, size class and stream, which can serve the request.
    """

    size_bytes: int
    device_free_bytes: int
    reserved_bytes: int
    active_bytes: int  # bytes in blocks in use or pending free
    free_bytes: int  # bytes in free blocks of all pools
    own_free_bytes: int  # bytes in own free blocks
    own_largest_bytes: int  # size of the largest own free block
    later_largest_bytes: int  # size of the largest own free block once pending frees are complete
    # size of the largest free block of other pools, size classes and streams
    other_largest_bytes: int
    releasable_bytes: int  # bytes in segments without a block in use
    releasable_private_bytes: int  # the part of ``releasable_bytes`` in private pools
    pending_bytes: int  # bytes in blocks that are pending free
    calls: AllocatorCalls = PYTORCH_CALLS

    @property
    def needed_bytes(self) -> int:
        """The size of the new segment that the request needed."""
        return segment_size(self.size_bytes)

    @property
    def is_limited(self) -> bool:
        """Whether a limit of the process rejected the request although the device had enough memory."""
        return self.device_free_bytes >= self.needed_bytes

    @property
    def usable_bytes(self) -> int:
        """Bytes that the process could still get from the device."""
        return 0 if self.is_limited else self.device_free_bytes

    @property
    def short_bytes(self) -> int:
        """Bytes that are missing even if all free memory could be used."""
        return max(self.size_bytes - self.free_bytes - self.usable_bytes, 0)

    @property
    def fit(self) -> Fit:
        """The single changes that would each have let the request succeed."""
        return fit_of(
            block_bytes=self.size_bytes,
            segment_bytes=self.needed_bytes,
            usable_bytes=self.usable_bytes,
            releasable_bytes=self.releasable_bytes,
            own_free_bytes=self.own_free_bytes,
            largest_other_bytes=self.other_largest_bytes,
            largest_later_bytes=self.later_largest_bytes,
        )


_FREE_BLOCKS = "free the long-lived blocks that keep segments in use, or allocate them first"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What alone kept a request from fitting: a code, the reason, and the action that removes it."""

    code: str  # "cache", "pending", "fragmentation", "pool", "limit" or "capacity"
    reason: str = ""  # a clause without a period; empty for "limit" and "capacity"
    remedy: str = _FREE_BLOCKS


def obstacle_of(request: FailedRequest) -> Obstacle:
    """Return the first change that helps: cache, pending frees, fragmentation, pools, limit, capacity."""
    fit = request.fit
    if fit.without_cache:
        return _cache_obstacle(request)
    if fit.after_pending_frees:
        if request.own_largest_bytes < request.size_bytes:
            reason = f"{format_bytes(request.pending_bytes)} was freed, but other streams may still use it"
        else:
            reason = (
                f"a block of {format_bytes(request.own_largest_bytes)} became free only after the search for"
                " a free block, when other streams had finished with it"
            )
        return Obstacle(
            "pending",
            f"{reason} (pending free)",
            "wait for the side stream before the memory is freed:"
            f" {request.calls.wait_for_stream}; or call {request.calls.synchronize} before this allocation",
        )
    if fit.without_holes:
        device_text = ""
        if not request.is_limited and request.own_free_bytes < request.size_bytes:
            device_text = f" and {format_bytes(request.device_free_bytes)} on the device"
        return Obstacle(
            "fragmentation",
            f"{format_bytes(request.own_free_bytes)} is free in the segments that can serve the request"
            f"{device_text}, but the largest free block is {format_bytes(request.own_largest_bytes)}"
            " (fragmentation)",
        )
    if fit.in_another_pool or not request.short_bytes:
        return Obstacle(
            "pool",
            f"{format_bytes(request.free_bytes - request.own_free_bytes)} is free in segments of other pools,"
            " streams or size classes, which cannot serve the request (pool)",
            "allocate on the stream that has the free memory, let CUDA graphs share one pool, and delete"
            " graphs and MemPools that are no longer used",
        )
    return Obstacle("limit" if request.is_limited else "capacity")


def _cache_obstacle(request: FailedRequest) -> Obstacle:
    remedies = []
    if request.releasable_private_bytes:
        remedies.append(
            "delete CUDA graphs and MemPools that are no longer used: the empty segments of a private"
            " pool are released only with the pool"
        )
    if request.releasable_bytes > request.releasable_private_bytes:
        remedies.append(
            f"call {request.calls.empty_cache} before this allocation; during graph capture no memory"
            " can be released"
        )
    return Obstacle(
        "cache",
        f"{format_bytes(request.releasable_bytes)} is in empty segments that were not released to the device"
        " (cache)",
        "; ".join(remedies) or _FREE_BLOCKS,
    )
