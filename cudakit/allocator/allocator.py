"""The caching allocator of one device; ``cudakit.CachingAllocator`` adds the device (api/allocator.py).

The methods alloc and free handle every case. If the native fast path was compiled, it replaces them on each
object, and calls them for the cases that it does not handle: see ``fast/fast_path.c``. The search for memory
follows PyTorch's c10/cuda/CUDACachingAllocator.cpp (DeviceCachingAllocator::malloc).
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from operator import index
from types import ModuleType
from typing import Any

from cudakit.allocator.blocks import Block, BlockPool, RawStack, Request
from cudakit.allocator.expandable import AddressSpace
from cudakit.allocator.guard import Callback, Direction, Monitor, MonitoredMetric, Monitors
from cudakit.allocator.history import OOM, Context, Level, Recorded, Stage, gather_stack
from cudakit.allocator.memory import DeviceMemory
from cudakit.allocator.oom import (
    Fragmentation,
    Observer,
    OutOfMemory,
    ProcessQuery,
    fragmentation_of,
    out_of_memory_error,
    query_or_reason,
    report_of,
)
from cudakit.allocator.snapshot import HasSnapshot, checked_path, save_snapshot, snapshot_of
from cudakit.allocator.upstream import OUT_OF_MEMORY, Upstream, stream_number
from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import Ptr
from cudakit.torch_rules.setting_keys import is_class_name
from cudakit.torch_rules.settings import (
    MAX_SMALL_BYTES,
    TOO_MANY_BYTES,
    Settings,
    rounded,
    segment_size,
)
from cudakit.units import format_bytes

_MAX_INVALID_FREES = 1000


class InvalidPointer(UsageError):
    """No live allocation begins at this address: it was freed before, or never allocated here."""


class InvalidSize(UsageError, ValueError):
    """The size of a request is negative."""


@dataclass(frozen=True, slots=True)
class InvalidFree:
    """A free of an address at which no live allocation begins."""

    ptr: int
    reason: str
    stack: RawStack | None


class DeviceCachingAllocator(DeviceMemory):
    """Allocates memory of one device in stream order, and caches freed memory.

    The same operations give the same blocks, statistics and snapshots as in PyTorch's allocator. Streams are
    handles; 0 is the default stream. Any thread may call any method, and finalizers may call ``free``.

    With ``search_again`` the free blocks are searched once more after the wait for pending frees, before a
    request fails, unlike in PyTorch (PyTorch issue 189504). ``native`` selects the native types, or the
    plain types in Python, which have no fast path; None selects the native types if they were compiled.
    """

    def __init__(
        self,
        upstream: Upstream,
        settings: Settings | None = None,
        *,
        device: int = 0,
        search_again: bool = True,
        native: bool | None = None,
    ) -> None:
        super().__init__(upstream, settings or Settings(), device=device, native=native)
        self._search_again = search_again
        self._uncached_sizes: dict[int, int] = {}  # Allocations made while caching was off.
        # Once the allocator is closed or its process was forked, this returns the error of allocations.
        self._new_refusal: Callable[[], Exception] | None = None
        self._invalid_frees: deque[InvalidFree] = deque(maxlen=_MAX_INVALID_FREES)
        self._invalid_free_numbers = count(1)  # Invalid frees are counted without the guard.
        self._monitors = Monitors(device, self._engine.stats.current_total)
        self._cache_limit_bytes: int | None = None
        self._shortage_helpers: list[Callable[[], bool]] = []
        self._oom_observers: list[Observer] = []
        self._rejection_observers: list[Observer] = []
        self._snapshot_saver: Observer | None = None
        self._query_processes: ProcessQuery | None = None
        self._pinned_allocator: HasSnapshot | None = None
        self._fast_path = self._new_fast_path(self._native_module) if self._native_module else None

    def _new_fast_path(self, native_module: ModuleType) -> Any:
        """Replace ``alloc`` and ``free`` of this object by those of a native fast path."""
        pools, stats = self._engine.default_pools, self._engine.stats
        fast_path = native_module.FastPath(
            self._guard.gate,
            self._live_blocks,
            pools.small.by_stream,
            pools.large.by_stream,
            stats.small.block_counters,
            stats.large.block_counters,
            stats.peaks.block_counters,
            self.alloc,
            self.free,
        )
        self.__dict__.update(alloc=fast_path.alloc, free=fast_path.free)
        return fast_path

    # Methods that allocate and free memory.

    def alloc(self, size_bytes: int, stream: int = 0) -> Ptr:
        """Allocate memory for the work of a stream. A request of 0 bytes returns the address 0.

        Raises OutOfMemory, InvalidSize for a negative size, CudaError for every other failure of the driver.
        """
        if self._new_refusal is not None:
            raise self._new_refusal()
        size_bytes = checked_size(size_bytes)
        if size_bytes == 0:
            return Ptr(0)
        if size_bytes >= TOO_MANY_BYTES:
            raise OutOfMemory("Tried to allocate more than 1EB memory.", hint="request less")
        stream = stream_number(stream)
        if "uncached" in self._slow_reasons:
            return self._alloc_uncached(size_bytes, stream)
        engine = self._engine
        stack = gather_stack() if self._history.level else None
        with self._guard:
            if self._pending_frees:
                self._pending_frees.process_events(stack, stream)
            block_bytes = rounded(size_bytes, engine.divisions)
            pools = engine.private_pools.pool_for_request(stream) or engine.default_pools
            pool = pools.small if block_bytes <= MAX_SMALL_BYTES else pools.large
            block = engine.get_free_block(pool, block_bytes, stream)
            if block is None:
                block = self._obtain_block(pool, block_bytes, size_bytes, stream, stack)
            should_split = engine.should_split(block, block_bytes, pool)
            engine.alloc_found_block(block, block_bytes, size_bytes, stack, splits=should_split)
            self._live_blocks[block.ptr] = block
        return block.ptr

    def free(self, ptr: int, stream: int | None = None) -> None:
        """Free an allocation; if ``stream`` is not the stream of the allocation, its use is recorded first.

        If the allocator is in use, by another thread or by this one, the free is queued and performed at the
        end of that call. Raises InvalidPointer if no allocation begins at ``ptr``, CudaError if an event
        cannot be recorded on a stream that used the memory; the memory then stays pending until the stream
        has finished.
        """
        if "retired" in self._slow_reasons:
            return
        block = self._live_blocks.pop(ptr, None)
        if block is None:
            if ptr == 0:
                return
            if self._uncached_sizes.pop(ptr, None) is not None:
                self._upstream.free(ptr)
                return
            raise self._refuse_free(ptr, gather_stack() if self._history.level else None)
        stack = gather_stack() if self._history.level >= Level.ALL else None
        if not self._guard.try_enter():
            self._guard.queue_free(block, stack, stream)
            return
        try:
            self._free_block(block, stack, stream)
        finally:
            self._guard.exit()

    def _alloc_uncached(self, size_bytes: int, stream: int) -> Ptr:
        with self._guard:
            pool = self._engine.private_pools.pool_for_request(stream)
            if self._captures.capture_count and pool is not None:
                raise UsageError(
                    f"caching is off, and the graph of stream {stream:#x} could not keep the memory",
                    hint="call enable_caching(enabled=True) before the capture",
                )
        try:
            ptr = self._upstream.malloc(size_bytes, stream)
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise OutOfMemory(f"Not cached: {error.message}", hint=error.hint) from error
        self._uncached_sizes[ptr] = size_bytes
        return Ptr(ptr)

    def _refuse_free(self, ptr: int, stack: RawStack | None) -> InvalidPointer:
        """Record an invalid free, and return the error to raise."""
        reason = "it was freed from within the allocator"
        if self._guard.try_enter():
            try:
                reason = self._describe_invalid_pointer(ptr)
            finally:
                self._guard.leave()
        self._invalid_frees.append(InvalidFree(ptr, reason, stack))
        self._engine.stats.num_invalid_frees = next(self._invalid_free_numbers)
        return InvalidPointer(
            f"nothing is allocated at {ptr:#x}: {reason}",
            hint="free each allocation once, by the address that alloc returned",
        )

    def _describe_invalid_pointer(self, ptr: int) -> str:
        """Describe an address at which no live allocation begins. The caller holds the guard."""
        block = self._engine.segments.block_at(ptr)
        if block is None:
            return "it belongs to no segment of this allocator, or its segment was released"
        if not block.is_allocated or ptr == block.ptr:
            waiting_clause = "" if block.is_free else ", and other streams still use it"
            return f"it was freed before{waiting_clause}"
        return (
            f"it lies {ptr - block.ptr} bytes into the allocation of {format_bytes(block.requested)}"
            f" at {block.ptr:#x}"
        )

    # The search for memory, if no free block serves a request. The caller holds the guard.

    def _obtain_block(
        self, pool: BlockPool, size: int, requested_bytes: int, stream: int, stack: RawStack | None
    ) -> Block:
        """Return a block for a request that no free block serves; it is in no list. Raises OutOfMemory."""
        engine = self._engine
        if self._shortage_helpers:
            with self._guard.unlocked():
                results = [helper() for helper in self._shortage_helpers]  # Every helper is called.
            self._guard.perform_queued()
            if any(results) and (block := engine.get_free_block(pool, size, stream)) is not None:
                return block
        segment_bytes = segment_size(size, engine.settings.large_segment_size_bytes)
        request = Request(size, requested_bytes, segment_bytes, stream, pool, stack)
        if engine.collects_garbage:
            engine.garbage_collect_cached_blocks(stack)
        # With throw_on_cudamalloc_oom (PyTorch 2.12, pull request 179473) a request beyond the limit fails at
        # once.
        exceeds_limit = engine.reserved_bytes + segment_bytes > engine.limit_bytes
        is_rejected = exceeds_limit and engine.settings.throw_on_cudamalloc_oom
        found_block = None if is_rejected else self._find_memory(request)
        if found_block is None:
            raise self._out_of_memory(request, is_rejected=is_rejected)
        return found_block

    def _find_memory(self, request: Request) -> Block | None:
        """Try PyTorch's ways to find memory, in PyTorch's order; return None if all of them fail."""
        engine = self._engine
        block = engine.alloc_block(request) or engine.take_lent_block(request)
        if block is None and engine.release_available_cached_blocks(request):
            block = engine.alloc_block(request)
        if block is not None or self._captures.capture_count:
            return block  # Waiting for the device would invalidate the capture.
        self._empty_cache(request.stack)
        engine.stats.num_alloc_retries += 1
        block = engine.alloc_block(request)
        if block is None and self._search_again:
            block = engine.get_free_block(request.pool, request.size, request.stream)
            engine.stats.num_sync_rescues += block is not None
        return block

    def _out_of_memory(self, request: Request, *, is_rejected: bool) -> OutOfMemory:
        """Count and record a failed request, call the observers without the guard, and return the error."""
        engine, memory_info = self._engine, self._upstream.memory_info()
        if is_rejected:
            engine.stats.num_oom_rejections += 1
        else:
            engine.stats.num_ooms += 1
        if engine.history is not None:
            engine.history.record(
                OOM,
                memory_info.free_bytes,
                request.size,
                request.stream,
                request.stack,
                request.pool.id,
            )
        report = report_of(
            engine,
            request,
            self._device,
            memory_info,
            awaited_blocks=self._pending_frees.awaited_streams(),
            is_capturing=self._captures.capture_count > 0,
            is_rejected=is_rejected,
        )
        with self._guard.unlocked():
            if self._query_processes is not None:
                report = replace(report, processes=query_or_reason(self._query_processes))
            observers = list(self._rejection_observers if is_rejected else self._oom_observers)
            if self._snapshot_saver is not None and not is_rejected:
                observers.append(self._snapshot_saver)
            return out_of_memory_error(report, observers)

    # Methods for streams and cached memory.

    def record_use(self, ptr: int, stream: int) -> None:
        """Record that another stream uses an allocation: its free then waits for the work of that stream.

        PyTorch calls this operation record_stream. Raises InvalidPointer if nothing is allocated at ``ptr``.
        """
        with self._guard:
            self._pending_frees.add_use(self._live_block(ptr), stream_number(stream))

    def _live_block(self, ptr: int) -> Block:
        block = self._live_blocks.get(ptr)
        if block is None:
            raise InvalidPointer(
                f"nothing is allocated at {ptr:#x}: {self._describe_invalid_pointer(ptr)}"
            )
        return block

    def enable_caching(self, *, enabled: bool) -> None:
        """Turn caching on or off. Without caching, each alloc or free is a driver call, and is not counted.

        Without caching, a request in a capture raises UsageError.
        """
        self._set_slow("uncached", is_on=not enabled)

    # Methods that monitor and limit memory.

    def monitor(
        self,
        metric: MonitoredMetric,
        threshold: int | float,
        callback: Callback,
        *,
        direction: Direction = "up",
    ) -> Monitor:
        """Call a function when the reserved, allocated or active bytes cross a threshold.

        ``threshold`` is a number of bytes, or a float: a fraction of the device's memory. The direction is
        "up" when the value reaches the threshold, and "down" when the value falls below it. The function is
        called right after the allocator call that crossed the threshold, in the same thread. It may allocate
        and free; its exceptions go to ``sys.unraisablehook``. Raises UsageError for an unknown metric or
        direction, or an invalid threshold.
        """
        if not isinstance(threshold, int):
            threshold = int(threshold * self._upstream.memory_info().total_bytes)
        with self._guard:
            monitor = self._monitors.add(metric, threshold, direction, callback)
            self._watch(self._check_monitors, is_on=True)
            return monitor

    def _check_monitors(self) -> None:
        if self._monitors:
            self._monitors.call_crossed()
        elif self._guard.try_enter():
            try:
                # Another thread may have added a monitor meanwhile.
                self._watch(self._check_monitors, is_on=bool(self._monitors))
            finally:
                self._guard.leave()
                self._guard.drain_queue()

    def _watch(self, watcher: Callable[[], None], *, is_on: bool) -> None:
        """Call a function after every change, or stop that. The caller holds the guard."""
        watchers = self._guard.watchers
        if is_on and watcher not in watchers:
            watchers.append(watcher)
        elif not is_on and watcher in watchers:
            watchers.remove(watcher)
        self._set_slow("watched", is_on=bool(watchers))

    def set_cache_limit(self, limit_bytes: int | None) -> None:
        """Limit the cached bytes; None removes the limit.

        After a free that exceeds the limit, whole free segments are released: the smallest that suffices
        alone, else the largest ones. During captures nothing is released, and private pools and expandable
        segments are never released. A release waits for the device. Raises UsageError for a negative limit.
        """
        if limit_bytes is not None and limit_bytes < 0:
            raise UsageError(
                f"invalid cache limit: {limit_bytes} bytes", hint="0 is no cache, None is no limit"
            )
        with self._guard:
            self._cache_limit_bytes = limit_bytes
            self._watch(self._trim_cache, is_on=limit_bytes is not None)

    def _trim_cache(self) -> None:
        """Release segments beyond the cache limit; if another thread holds the guard, it does that later."""
        limit_bytes, engine = self._cache_limit_bytes, self._engine
        if limit_bytes is None or engine.cached_bytes <= limit_bytes:
            return
        if not self._captures.capture_count and self._guard.try_enter():
            try:
                with suppress(
                    CudaError
                ):  # The segment stays cached, and the next free tries again.
                    engine.trim_cache(limit_bytes)
            finally:
                self._guard.leave()
                self._guard.drain_queue()

    def set_reserve_class(self, stream: int, name: str) -> None:
        """Set the class of a stream, which determines the address range of its new expandable segments.

        The setting expandable_segments_reserve_by_class has a size for each class. For other classes, and for
        streams without a class (""), expandable_segments_reserve applies. Raises UsageError for an invalid
        name (setExpandableSegmentReserveClassForStream of PyTorch 2.15).
        """
        if name and not is_class_name(name):
            raise UsageError(
                f"{name!r} is not a valid name of a stream class",
                hint="a name has no ',', ':', '[', ']' and no space",
            )
        with self._guard:
            if name:
                self._engine.reserve_class_by_stream[stream_number(stream)] = name
            else:
                self._engine.reserve_class_by_stream.pop(stream_number(stream), None)

    def reserve_class(self, stream: int) -> str:
        """Return the class of a stream; "" for a stream without a class."""
        return self._engine.reserve_class_by_stream.get(stream_number(stream), "")

    def address_space(self) -> AddressSpace:
        """Return the number and the size of the address ranges that expandable segments reserve."""
        with self._guard:
            expandable_segments = self._engine.expandable_segments
            segments = expandable_segments.segments if expandable_segments else ()
            return AddressSpace(len(segments), sum(segment.size for segment in segments))

    # Methods that register functions for failed requests.

    def on_shortage(self, helper: Callable[[], bool]) -> None:
        """Call a function, which returns whether it freed memory, when no free block serves a request."""
        self._shortage_helpers.append(helper)

    def on_out_of_memory(self, observer: Observer) -> None:
        """Call a function with the report of each request that fails, before the error is raised.

        Exceptions of the function become notes on that error. For requests that are refused at once, the
        function of ``on_rejection`` is called instead.
        """
        self._oom_observers.append(observer)

    def on_rejection(self, observer: Observer) -> None:
        """Call a function with the report of each request that throw_on_cudamalloc_oom refuses.

        Such requests exceed the memory fraction; no memory is released for them, and no snapshot is saved.
        The report has the values of PyTorch's OomRejectionObserver: ``device``, ``segment_bytes``,
        ``reserved_bytes``, ``device_total_bytes``. Exceptions of the function become notes on the error.
        """
        self._rejection_observers.append(observer)

    def save_on_out_of_memory(self, path: str | os.PathLike[str] | None) -> None:
        """Write a snapshot to a file when a request fails, before the error is raised; None turns this off.

        The latest snapshot replaces earlier ones. If it cannot be written, the error gets a note. Requests
        that are refused at once (``on_rejection``) write none. Raises UsageError now if the path is not
        writable.
        """
        self._snapshot_saver = None
        if path is not None:
            snapshot_path = checked_path(path)

            def save_on_out_of_memory(_: object) -> None:
                save_snapshot(self.snapshot(), snapshot_path)

            # If the function fails, the note on the out-of-memory error contains this name.
            save_on_out_of_memory.__qualname__ = "save_on_out_of_memory"
            self._snapshot_saver = save_on_out_of_memory

    def ask_processes(self, query_processes: ProcessQuery | None) -> None:
        """Include the processes that a function returns in the reports of failed requests."""
        self._query_processes = query_processes

    # Methods for the history of events and for snapshots.

    def record_history(
        self,
        history: Recorded | None = "all",
        *,
        context: Context | None = "all",
        max_entries: int = sys.maxsize,
        skip_actions: Collection[str] = (),
        clear: bool = False,
    ) -> None:
        """Start or stop the recording of history, like torch.cuda.memory._record_memory_history.

        ``history`` is "all", "state" (live blocks only) or None to stop. Recorded events stay until
        ``clear``; PyTorch drops them when recording stops. ``context`` selects the events with call stacks:
        "state" (live blocks), "alloc" (also allocations in the trace), "all" (also frees) or None. Raises
        UsageError for an invalid setting.
        """
        with self._guard:
            self._history.configure(
                history,
                context=context,
                max_entries=max_entries,
                skip_actions=skip_actions,
                clear=clear,
            )
            self._engine.history = self._history if self._history.is_enabled else None
            if self._fast_path is not None:
                events = self._history.events if self._history.is_enabled else None
                self._fast_path.set_history(events, self._history.level, partial(gather_stack, 0))
            skips_actions = self._history.is_enabled and self._history.skipped_actions
            self._set_slow("history", is_on=bool(skips_actions))

    def set_metadata(self, text: str) -> None:
        """Set the text of the key ``user_metadata`` in all later entries of the trace."""
        with self._guard:
            self._history.metadata = text

    def annotate(self, ptr: int, text: str) -> None:
        """Add an entry to the trace with a text about a live allocation, such as its purpose.

        Raises InvalidPointer if no live allocation begins at ``ptr``.
        """
        stack = gather_stack() if self._history.level else None
        with self._guard:
            block = self._live_block(ptr)
            if self._history.is_enabled:
                self._history.annotate(block, stack, text)

    @contextmanager
    def annotated(self, name: str) -> Iterator[None]:
        """Record a named range of the program, such as a step, in ``external_annotations`` of snapshots."""
        self._mark(name, "START")
        try:
            yield
        finally:
            self._mark(name, "END")

    def _mark(self, name: str, stage: Stage) -> None:
        if self._history.is_enabled:
            with self._guard:
                self._history.mark(name, stage)

    def include_pinned(self, pool: HasSnapshot | None) -> None:
        """Include ``host_segments`` and ``host_traces`` of a pinned memory allocator in snapshots."""
        self._pinned_allocator = pool

    def snapshot(self) -> dict[str, Any]:
        """Return the segments and the trace in PyTorch's format, as builtin types."""
        limit_bytes = self._cache_limit_bytes
        with self._guard:
            snapshot = snapshot_of(
                self._engine,
                self._history,
                self._device,
                # The settings that PyTorch does not have.
                {
                    "cudakit_cache_limit": -1 if limit_bytes is None else limit_bytes,
                    "cudakit_search_again": self._search_again,
                },
            )
        return snapshot | (self._pinned_allocator.snapshot() if self._pinned_allocator else {})

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write a snapshot to a file that PyTorch's tools and `cudakit memviz` read.

        Raises UsageError if the file cannot be written; an existing file then stays.
        """
        snapshot_path = checked_path(path)
        save_snapshot(self.snapshot(), snapshot_path)

    # Methods for statistics.

    def statistics(self) -> dict[str, int]:
        """Return the 122 numbers of torch.cuda.memory_stats, and the reserved bytes of each private pool.

        The keys of the reserved bytes of the pool with the id (a, b) are
        ``reserved_bytes_by_private_pools.<a>_<b>.<pool>.<metric>``, as in PyTorch 2.15. Once a pool is
        dropped, its ``current`` is 0, and its other numbers stay.
        """
        with self._guard:
            return self._engine.stats.read()

    def counters(self) -> dict[str, int]:
        """Return the counters that PyTorch does not have."""
        names = ("num_invalid_frees", "num_oom_rejections", "num_sync_rescues")
        with self._guard:
            return {name: getattr(self._engine.stats, name) for name in names}

    def fragmentation(self) -> Fragmentation:
        """Return the fragmentation of the reserved memory, and the free memory that each stream can reuse."""
        with self._guard:
            return fragmentation_of(
                self._engine.segments.values(), self._pending_frees.awaited_streams()
            )

    def invalid_frees(self) -> tuple[InvalidFree, ...]:
        """Return the latest invalid frees, oldest first."""
        return tuple(self._invalid_frees)

    def reset_peaks(self) -> None:
        """Set the peak of every statistic to its current value."""
        with self._guard:
            self._engine.stats.reset_peaks()

    def reset_sums(self) -> None:
        """Set the sums of allocated and freed bytes and counts to 0."""
        with self._guard:
            self._engine.stats.reset_sums()


def checked_size(size_bytes: int) -> int:
    """Return the size of a request as an int. Raises InvalidSize, and TypeError for other types."""
    size_bytes = int(index(size_bytes))
    if size_bytes < 0:
        raise InvalidSize(f"cannot allocate {size_bytes} bytes", hint="a size is 0 or more bytes")
    return size_bytes
