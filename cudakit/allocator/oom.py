"""The slow path: alloc and free for every case, the attempts to find memory, and the error if all fail.

Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (DeviceCachingAllocator::malloc).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from cudakit.allocator.blocks import Block, BlockPool, RawStack, Request
from cudakit.allocator.fragmentation import report_of
from cudakit.allocator.history import OOM, Level, gather_stack
from cudakit.allocator.recording import checked_path, save_snapshot
from cudakit.allocator.state import AllocatorState, checked_size
from cudakit.allocator.upstream import OUT_OF_MEMORY, stream_number
from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import Ptr
from cudakit.gpu.api.facts import Process
from cudakit.torch_rules.oom_facts import OomReport
from cudakit.torch_rules.oom_message import details, message_of
from cudakit.torch_rules.oom_remedies import hint_of
from cudakit.torch_rules.sizes import MAX_SMALL_BYTES, TOO_MANY_BYTES, rounded, segment_size
from cudakit.units import Unavailable

Observer: TypeAlias = Callable[[OomReport], object]
ProcessQuery: TypeAlias = Callable[[], "tuple[Process, ...] | Unavailable"]


class OutOfMemory(CudaError, MemoryError):
    """No memory is left for a request. ``report`` is None if the request was refused at once.

    The error is also a MemoryError, which CuPy, Numba and RMM handle. ``message`` is one line that begins
    like PyTorch's message. The string of the error adds a table of the memory, and remedies.
    """

    def __init__(
        self, explanation: str, *, hint: str = "", report: OomReport | None = None
    ) -> None:
        super().__init__(OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", explanation, hint=hint)
        self.message = f"CUDA out of memory. {explanation}"
        self.args = (self.message,)
        self.report = report

    def __str__(self) -> str:
        return f"{self.message}\n{details(self.report)}" if self.report else self.message


class OomChain:
    """Finds a block for a request that no free block serves, or raises OutOfMemory.

    With ``search_again`` the pool is searched again after the wait for pending frees, unlike in PyTorch
    (PyTorch issue 189504).
    """

    def __init__(
        self,
        state: AllocatorState,
        take_snapshot: Callable[[], dict[str, Any]],
        *,
        search_again: bool,
    ) -> None:
        self._state = state
        self._take_snapshot = take_snapshot
        self.search_again = search_again
        self._shortage_helpers: list[Callable[[], bool]] = []
        self._observers: list[Observer] = []
        self._rejection_observers: list[Observer] = []
        self._snapshot_saver: Observer | None = None
        self._query_processes: ProcessQuery | None = None

    # Methods that register functions of the program.

    def on_shortage(self, helper: Callable[[], bool]) -> None:
        """Call a function, which returns whether it freed memory, when no free block serves a request."""
        self._shortage_helpers.append(helper)

    def on_out_of_memory(self, observer: Observer) -> None:
        """Call a function with the report of each request that fails, before the error is raised.

        Exceptions of the function become notes on that error. For requests that are refused at once, the
        function of ``on_rejection`` is called instead.
        """
        self._observers.append(observer)

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
        if path is None:
            self._snapshot_saver = None
            return
        snapshot_path = checked_path(path)

        def save_on_out_of_memory(report: OomReport) -> None:  # noqa: ARG001
            save_snapshot(self._take_snapshot(), snapshot_path)

        # If the function fails, the note on the out-of-memory error contains this name.
        save_on_out_of_memory.__qualname__ = "save_on_out_of_memory"
        self._snapshot_saver = save_on_out_of_memory

    def ask_processes(self, query_processes: ProcessQuery | None) -> None:
        """Include the processes that a function returns in the reports of failed requests."""
        self._query_processes = query_processes

    # Attempts to find memory. The caller holds the guard.

    def obtain_block(
        self, pool: BlockPool, size: int, requested_bytes: int, stream: int, stack: RawStack | None
    ) -> Block:
        """Find a block for a request that no free block serves; it is in no free list. Raises OutOfMemory."""
        engine = self._state.engine
        if self._call_helpers():
            uses_expandable = engine.uses_expandable_segments(pool)
            block = engine.get_free_block(pool, size, stream, uses_expandable=uses_expandable)
            if block is not None:
                return block
        segment_bytes = segment_size(size, engine.settings.large_segment_size_bytes)
        request = Request(size, requested_bytes, segment_bytes, stream, pool, stack)
        if engine.collects_garbage:
            self._state.cache.garbage_collect_cached_blocks(stack)
        # With throw_on_cudamalloc_oom (PyTorch 2.12, pull request 179473) a request beyond the limit fails at
        # once.
        exceeds_limit = engine.reserved_bytes + segment_bytes > engine.limit_bytes
        is_rejected = exceeds_limit and engine.settings.throw_on_cudamalloc_oom
        block = None if is_rejected else self._find_memory(request)
        if block is not None:
            return block
        raise self._out_of_memory_error(self._oom_report(request, is_rejected=is_rejected))

    def _find_memory(self, request: Request) -> Block | None:
        """Try PyTorch's ways to find memory, in PyTorch's order; return None if all of them fail."""
        state, engine = self._state, self._state.engine
        block = state.cache.alloc_block(request) or self._take_lent_block(request)
        if block is None and state.cache.release_available_cached_blocks(request):
            block = state.cache.alloc_block(request)
        if block is not None or state.captures.capture_count:
            return block  # Waiting for the device would invalidate the capture.
        state.empty_cache(request.stack)
        engine.stats.num_alloc_retries += 1
        block = state.cache.alloc_block(request)
        if block is None and self.search_again:
            pool, uses_expandable = request.pool, engine.uses_expandable_segments(request.pool)
            block = engine.get_free_block(
                pool, request.size, request.stream, uses_expandable=uses_expandable
            )
            engine.stats.num_sync_rescues += block is not None
        return block

    def _take_lent_block(self, request: Request) -> Block | None:
        """Take a free block of a private pool that lends its blocks (PyTorch's try_mempool_fallback).

        As in PyTorch, blocks of expandable segments are not lent, and the driver is not called.
        """
        engine = self._state.engine
        if request.pool.id != engine.default_pools.id:
            return None
        for pool in engine.private_pools.lending_pools():
            sized_pool = pool.small if request.pool.is_small else pool.large
            block = engine.get_free_block(
                sized_pool, request.size, request.stream, uses_expandable=False
            )
            if block is not None:
                return block
        return None

    def _call_helpers(self) -> bool:
        """Call the functions of ``on_shortage``; return whether any of them freed memory."""
        if not self._shortage_helpers:
            return False
        state = self._state
        with state.guard.unlocked():
            helper_results = [
                helper() for helper in self._shortage_helpers
            ]  # A list, so that every helper is called.
        state.guard.perform_queued()
        return any(helper_results)

    def _oom_report(self, request: Request, *, is_rejected: bool) -> OomReport:
        state, engine = self._state, self._state.engine
        memory_info = state.upstream.memory_info()
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
        return report_of(
            engine,
            request,
            state.device,
            memory_info,
            awaited_blocks=state.pending_frees.awaited_streams(),
            is_capturing=state.captures.capture_count > 0,
            is_rejected=is_rejected,
        )

    def _out_of_memory_error(self, report: OomReport) -> OutOfMemory:
        """Call the observers without the guard; return the error with a note for each failed observer."""
        with self._state.guard.unlocked():
            if self._query_processes is not None:
                report = replace(report, processes=_queried_processes(self._query_processes))
            savers = [self._snapshot_saver] if self._snapshot_saver else []
            observers = (
                self._rejection_observers if report.is_rejected else self._observers + savers
            )
            notes = [
                note for observer in list(observers) if (note := _call_observer(observer, report))
            ]
        error = OutOfMemory(message_of(report), hint=hint_of(report), report=report)
        for note in notes:
            error.add_note(note)
        return error


class SlowPath:
    """``alloc`` and ``free`` for every case: any settings, history, private pools and pending frees.

    ``owner`` is the allocator. The slow path refers to it, so that a reference to ``slow_alloc`` keeps it
    alive.
    """

    def __init__(self, owner: object, state: AllocatorState, oom_chain: OomChain) -> None:
        self._owner = owner
        self._state = state
        self._oom_chain = oom_chain

    def slow_alloc(self, size_bytes: int, stream: int = 0) -> Ptr:
        """Allocate memory; see the protocol Alloc."""
        state = self._state
        if state.new_refusal is not None:
            raise state.new_refusal()
        size_bytes = checked_size(size_bytes)
        if size_bytes == 0:
            return Ptr(0)
        if size_bytes >= TOO_MANY_BYTES:
            raise OutOfMemory("Tried to allocate more than 1EB memory.", hint="request less")
        stream = stream_number(stream)
        if state.is_slow("uncached"):
            return self._alloc_uncached(size_bytes, stream)
        level = state.history.level
        stack = gather_stack(1 + state.fast_path.python_frames) if level else None
        with state.guard.locked():
            if state.pending_frees:
                state.pending_frees.process_events(stack, stream)
            block = self._alloc_block(size_bytes, stream, stack)
            state.live_blocks[block.ptr] = block
        return block.ptr

    def _alloc_block(self, size_bytes: int, stream: int, stack: RawStack | None) -> Block:
        engine = self._state.engine
        block_bytes = rounded(size_bytes, engine.divisions)
        pools = engine.private_pools.pool_for_request(stream) or engine.default_pools
        pool = pools.small if block_bytes <= MAX_SMALL_BYTES else pools.large
        uses_expandable = engine.uses_expandable_segments(pool)
        block = engine.get_free_block(
            pool, block_bytes, stream, uses_expandable=uses_expandable
        ) or self._oom_chain.obtain_block(pool, block_bytes, size_bytes, stream, stack)
        # A lent block is split as if no segment were expandable, as in PyTorch.
        uses_expandable = engine.uses_expandable_segments(pool) and block.pool is pool
        should_split = engine.should_split(block, block_bytes, uses_expandable=uses_expandable)
        engine.alloc_found_block(block, block_bytes, size_bytes, stack, splits=should_split)
        return block

    def slow_free(self, ptr: int, stream: int | None = None) -> None:
        """Free memory; see the protocol Free."""
        state = self._state
        if state.is_slow("retired"):
            return
        stack = None
        block = state.live_blocks.pop(ptr, None)
        if block is None:
            self._free_without_block(ptr)
            return
        if state.history.level >= Level.ALL:
            stack = gather_stack(1 + state.fast_path.python_frames)
        if not state.guard.try_enter():
            state.guard.queue_free((block, stack, stream))
            return
        try:
            state.free_live_block(block, stack, stream)
        finally:
            state.guard.exit()

    def _free_without_block(self, ptr: int) -> None:
        """Free memory that was allocated without caching. Raises InvalidPointer for all other addresses."""
        state = self._state
        if ptr == 0:
            return
        if state.uncached_sizes.pop(ptr, None) is not None:
            state.upstream.free(ptr)
            return
        python_frames = state.fast_path.python_frames
        stack = gather_stack(2 + python_frames) if state.history.level else None
        raise state.refuse_free(ptr, stack)

    def _alloc_uncached(self, size_bytes: int, stream: int) -> Ptr:
        state = self._state
        with state.locked():
            pool = state.engine.private_pools.pool_for_request(stream)
            if state.captures.capture_count and pool is not None:
                raise UsageError(
                    f"caching is off, and the graph of stream {stream:#x} could not keep the memory",
                    hint="call enable_caching(enabled=True) before the capture",
                )
        try:
            ptr = state.upstream.malloc(size_bytes, stream)
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise OutOfMemory(f"Not cached: {error.message}", hint=error.hint) from error
        state.uncached_sizes[ptr] = size_bytes
        return Ptr(ptr)


def _queried_processes(query_processes: ProcessQuery) -> tuple[Process, ...] | Unavailable:
    try:
        return query_processes()
    except Exception as error:  # noqa: BLE001  # The report is useful without the processes.
        return Unavailable(str(error) or type(error).__name__)


def _call_observer(observer: Observer, report: OomReport) -> str:
    """Call an observer. If it fails, return a note, which must not hide the out-of-memory error."""
    try:
        observer(report)
    except Exception as error:  # noqa: BLE001
        observer_name = getattr(observer, "__qualname__", repr(observer))
        return f"the observer {observer_name} failed: {type(error).__name__}: {error}"
    return ""
