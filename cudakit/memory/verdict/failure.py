"""A failed allocation, with the memory at this moment and the events before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.memory.call_sites import StackTable
from cudakit.memory.growth import StepHistory
from cudakit.memory.history import History, Layout
from cudakit.memory.snapshot import POOL_NAMES, DeviceTrace, Ints, Mask, SegmentKind, Snapshot
from cudakit.torch_rules.oom_verdict import FailedRequest
from cudakit.torch_rules.sizes import MAX_SMALL_BYTES


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
    trace_replay: History
    steps: StepHistory
    stacks: StackTable

    @property
    def needed_bytes(self) -> int:
        """Sum of the requested bytes in use at the failure and the failed request."""
        return int(self.trace_replay.curves.requested[self.event]) + self.request.size_bytes

    @property
    def earlier_peaks(self) -> Ints:
        """The peaks of the steps that ended before the failure."""
        return self.steps.peak_bytes[: max(self.steps.number_at(self.event), 0)]

    @property
    def available_bytes(self) -> int:
        """Largest memory that the allocator could reserve if nothing else used the device."""
        library_bytes = sum(reserved_bytes for _, reserved_bytes in self.libraries)
        reachable_bytes = (
            self.request.reserved_bytes + self.request.device_free_bytes + library_bytes
        )
        return (
            reachable_bytes
            if self.device_total_bytes is None
            else max(self.device_total_bytes, reachable_bytes)
        )

    @property
    def outside_bytes(self) -> int:
        """Device memory in use outside this allocator; a lower bound if the device size is not recorded."""
        return self.available_bytes - self.request.reserved_bytes - self.request.device_free_bytes


def failure_at(
    event_index: int,
    *,
    snapshot: Snapshot,
    trace: DeviceTrace,
    trace_replay: History,
    steps: StepHistory,
    stacks: StackTable,
) -> Failure:
    """Return the failed allocation of an OOM event."""
    layout = trace_replay.layout_at(event_index)
    is_library = np.isin(layout.segments.pool, _library_pool_ids(snapshot))
    is_usable = _usable_segments(trace, layout, event_index)
    pool = int(trace.events.pool[event_index])
    if pool < 0:  # torch before 2.12 records no pool
        pool = int(layout.segments.pool[is_usable].max(initial=0))
    total_bytes = setting_of_device(snapshot.settings, "device_total_bytes", trace.device)
    memory_fraction = setting_of_device(snapshot.settings, "memory_fraction", trace.device)
    return Failure(
        request=_failed_request(snapshot, trace, layout, is_usable, is_library, event_index),
        event=event_index,
        stream=int(trace.events.stream[event_index]),
        pool=snapshot.pools[pool],
        stack=int(trace.events.stack[event_index]),
        device_total_bytes=int(total_bytes) if total_bytes else None,
        libraries=_library_sizes(snapshot, layout, is_library),
        memory_fraction=memory_fraction,
        layout=layout,
        trace_replay=trace_replay,
        steps=steps,
        stacks=stacks,
    )


def setting_of_device(settings: Mapping[str, Any], setting_name: str, device: int) -> float | None:
    """Return the value of a device from a recorded setting with a value per device; None: not recorded."""
    recorded_value = settings.get(setting_name)
    if not isinstance(recorded_value, list) or not 0 <= device < len(recorded_value):
        return None
    device_value = recorded_value[device]
    is_number = isinstance(device_value, int | float) and not isinstance(device_value, bool)
    return device_value if is_number and 0 < device_value < 1 << 62 else None


def _library_pool_ids(snapshot: Snapshot) -> list[int]:
    """Return the indices of the pools of libraries other than PyTorch, which run --memory records."""
    return [index for index, pool in enumerate(snapshot.pools) if pool in POOL_NAMES]


def _library_sizes(
    snapshot: Snapshot, layout: Layout, is_library: Mask
) -> tuple[tuple[str, int], ...]:
    pool_ids, sizes = layout.segments.pool[is_library], layout.segments.size[is_library]
    bytes_by_pool = np.bincount(pool_ids, weights=sizes)
    pools_by_size = np.argsort(-bytes_by_pool, kind="stable").tolist()
    return tuple(
        (POOL_NAMES[snapshot.pools[pool]], int(bytes_by_pool[pool]))
        for pool in pools_by_size
        if bytes_by_pool[pool]
    )


def _failed_request(
    snapshot: Snapshot,
    trace: DeviceTrace,
    layout: Layout,
    is_usable_segment: Mask,
    is_library: Mask,
    event_index: int,
) -> FailedRequest:
    """Return the request, and the memory of its allocator without the memory of other libraries."""
    events, segments = trace.events, layout.segments
    is_usable = is_usable_segment[layout.free_block_segment]
    is_empty = (layout.used_by_segment() == 0) & ~is_library
    # Masks of the free blocks and the blocks in use that are not in pools of libraries.
    is_allocator_free = ~is_library[layout.free_block_segment]
    is_allocator_block = ~is_library[layout.block_segment]
    return FailedRequest(
        size_bytes=int(events.size[event_index]),
        device_free_bytes=int(events.address[event_index]),
        reserved_bytes=int(segments.size[~is_library].sum()),
        active_bytes=int(layout.block_size[is_allocator_block].sum()),
        free_bytes=int(layout.free_block_size[is_allocator_free].sum()),
        own_free_bytes=int(layout.free_block_size[is_usable].sum()),
        own_largest_bytes=_largest_size(layout.free_block_size[is_usable]),
        later_largest_bytes=_largest_after_pending(layout, is_usable_segment),
        other_largest_bytes=_largest_size(layout.free_block_size[~is_usable & is_allocator_free]),
        releasable_bytes=int(segments.size[is_empty].sum()),
        releasable_private_bytes=int(segments.size[is_empty & (segments.pool != 0)].sum()),
        pending_bytes=int(layout.block_size[layout.block_pending].sum()),
        is_expandable=bool(segments.expandable.any()),
        is_split_limited=snapshot.settings.get("max_split_size", -1) not in (-1, None),
        calls=snapshot.calls,
    )


def _usable_segments(trace: DeviceTrace, layout: Layout, event_index: int) -> Mask:
    """Return a mask of the segments that can serve the request: its stream, pool and size class."""
    events, segments = trace.events, layout.segments
    request_bytes, pool_id = int(events.size[event_index]), int(events.pool[event_index])
    segment_kind = SegmentKind.SMALL if request_bytes <= MAX_SMALL_BYTES else SegmentKind.LARGE
    has_fitting_kind = (segments.kind == segment_kind) | (segments.kind == SegmentKind.UNKNOWN)
    is_usable: Mask = has_fitting_kind & (segments.stream == events.stream[event_index])
    is_private: Mask = segments.pool != 0
    if pool_id >= 0:
        is_usable &= segments.pool == pool_id
        return is_usable
    # Before torch 2.12 events do not name the pool. If a free block of the default pool is large enough, the
    # request was made in a private pool.
    is_in_default_pool = is_usable & ~is_private
    fits_in_default_pool = (
        _largest_size(layout.free_block_size[is_in_default_pool[layout.free_block_segment]])
        >= request_bytes
    )
    return (
        is_usable & is_private if fits_in_default_pool and is_private.any() else is_in_default_pool
    )


def _largest_after_pending(layout: Layout, is_usable_segment: Mask) -> int:
    """Return the largest free block after all pending frees, merged with adjacent free blocks.

    This includes blocks that were free already: PyTorch does not search those again after it has waited for
    pending frees (pytorch issue 189504).
    """
    is_pending_block = layout.block_pending & is_usable_segment[layout.block_segment]
    is_usable = is_usable_segment[layout.free_block_segment]
    segment_indices = np.concatenate(
        (layout.block_segment[is_pending_block], layout.free_block_segment[is_usable])
    )
    offsets = np.concatenate(
        (layout.block_offset[is_pending_block], layout.free_block_offset[is_usable])
    )
    range_bytes = np.concatenate(
        (layout.block_size[is_pending_block], layout.free_block_size[is_usable])
    )
    address_order = np.lexsort((offsets, segment_indices))
    segment_indices, offsets, range_bytes = (
        segment_indices[address_order],
        offsets[address_order],
        range_bytes[address_order],
    )
    is_adjacent = np.zeros(len(address_order), np.bool_)
    is_adjacent[1:] = (segment_indices[1:] == segment_indices[:-1]) & (
        offsets[1:] == (offsets + range_bytes)[:-1]
    )
    return _largest_size(np.bincount(np.cumsum(~is_adjacent), weights=range_bytes))


def _largest_size(sizes: npt.NDArray[np.generic]) -> int:
    return int(sizes.max(initial=0)) if len(sizes) else 0
