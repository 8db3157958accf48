"""The caching allocator of pinned (page-locked) host memory.

Source: PyTorch's aten/src/ATen/core/CachingHostAllocator.h.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from time import sleep
from typing import Any

from cudakit.allocator.blocks import Block, RawStack
from cudakit.allocator.guard import Guard
from cudakit.allocator.history import Context, History, Level, Recorded, gather_stack
from cudakit.allocator.pinned.memory import HostMemory
from cudakit.allocator.pinned.pools import Holders, NoHolders
from cudakit.allocator.pinned.upstream import HostUpstream
from cudakit.allocator.recording import host_snapshot
from cudakit.allocator.state import InvalidPointer, checked_size
from cudakit.allocator.upstream import stream_number
from cudakit.errors import CudaError
from cudakit.gpu.api import Ptr
from cudakit.torch_rules.settings import Settings

# Interval of the background thread. PyTorch's thread polls every 0.1 ms, but each poll in Python takes the
# interpreter's lock.
_POLL_INTERVAL_S = 0.001


class BackgroundThread:
    """A thread that, when woken, repeats ``work`` until ``work`` returns False.

    ``work`` is a method; the thread does not keep the object of the method alive.
    """

    def __init__(self, work: Callable[[], bool]) -> None:
        self._work = weakref.WeakMethod(work)
        self._wake_event = threading.Event()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Wake the thread; the first call starts it."""
        if self._thread is None:
            thread_name = "cudakit pinned memory"
            self._thread = threading.Thread(target=self._run_loop, name=thread_name, daemon=True)
            self._thread.start()
        self._wake_event.set()

    def stop(self) -> None:
        """Stop the thread, and wait for its end."""
        self._is_stopped = True
        self._wake_event.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run_loop(self) -> None:
        while True:
            self._wake_event.wait()
            if self._is_stopped or not self._work_once():
                return
            sleep(_POLL_INTERVAL_S)

    def _work_once(self) -> bool:
        """Call the method once; return False if its object was garbage-collected."""
        self._wake_event.clear()  # Cleared before the work, so that a wake-up during the work is not lost.
        work = self._work()
        if work is None:
            return False
        if work():
            self._wake_event.set()
        return True


class CachingHostAllocator:
    """Allocates pinned host memory, and caches freed memory.

    The same operations give the same blocks and statistics as in PyTorch's host allocator. Any thread may use
    it, and ``free`` may be called by finalizers.

    With ``splits``, blocks are split and merged instead of rounded to powers of two, which wastes less
    memory. With ``retries``, cached memory is released before a request fails, and the request is tried
    again. PyTorch does neither.

    ``holders`` are the private pools of the device's allocator. A request that the device's allocator would
    serve from a private pool is served from a private pool of pinned memory too. Its memory is
    kept while the device's pool has holders.
    """

    def __init__(
        self,
        upstream: HostUpstream,
        settings: Settings | None = None,
        *,
        holders: Holders | None = None,
        splits: bool = False,
        retries: bool = True,
    ) -> None:
        self._retries = retries
        self._guard: Guard[tuple[Block, RawStack | None]] = Guard(
            lambda queued: self._memory.free(*queued)
        )
        self._history = History()
        self._memory = HostMemory(upstream, holders or NoHolders(), splits=splits)
        self._background_thread = BackgroundThread(self._poll)
        self._stop_finalizer = weakref.finalize(self, self._background_thread.stop)
        self.configure(settings or Settings())

    # Methods that allocate and free memory.

    def alloc(self, size_bytes: int, stream: int | None = None) -> Ptr:
        """Allocate bytes. A request of 0 bytes returns the address 0.

        ``stream`` determines the private pool of the request, and whether the request belongs to a capture.
        Without a stream, the innermost pool and any capture of this thread apply.

        Raises OutOfPinnedMemory, InvalidSize for a negative size, CudaError for every other failure of the
        driver.
        """
        size_bytes = checked_size(size_bytes)
        if size_bytes == 0:
            return Ptr(0)
        stack = gather_stack() if self._history.level else None
        allocator_stream = None if stream is None else stream_number(stream)
        with self._guard.locked():
            block = self._memory.alloc(size_bytes, allocator_stream, stack, retries=self._retries)
            return block.ptr

    def free(self, ptr: int) -> None:
        """Free an allocation. Its memory is reused when the streams that used it finish their present work.

        If another call of the allocator is running, the free is queued and performed after that call. Raises
        InvalidPointer if no allocation begins at ``ptr``, CudaError if an event cannot be recorded (unless
        ``pinned_free_catch_all`` is set); the memory then stays pending until the streams are done.
        """
        block = self._memory.live_blocks.pop(ptr, None)
        if block is None:
            self._refuse_free(ptr)
            return
        stack = gather_stack() if self._history.level >= Level.ALL else None
        if not self._guard.try_enter():
            self._guard.queue_free((block, stack))
            return
        try:
            self._memory.free(block, stack)
        except CudaError:
            if not self.settings.pinned_free_catch_all:
                raise
        finally:
            self._guard.exit()
            self._wake_background_thread()

    def record_use(self, ptr: int, stream: int) -> None:
        """Record that a stream uses an allocation: after its free, its memory waits for the stream's work.

        Raises InvalidPointer if no allocation begins at ``ptr``.
        """
        with self._guard.locked():
            block = self._memory.live_blocks.get(ptr)
            if block is None:
                raise InvalidPointer(f"nothing pinned is allocated at {ptr:#x}")
            stream_uses = block.stream_uses = block.stream_uses or {}
            stream_uses[stream_number(stream)] = None

    def empty_cache(self) -> None:
        """Release all cached memory without waiting for any stream.

        Private pools are included if no graph, MemPool or context holds them. Does nothing during a capture.
        Raises CudaError if the driver refuses; the remaining memory stays cached.
        """
        stack = gather_stack() if self._history.level >= Level.ALL else None
        with self._guard.locked():
            if not self._memory.captures.capture_count:
                self._memory.default_pool.pending_frees.process_events()
                self._memory.release_cached(stack)

    def close(self) -> None:
        """Wait for pending frees, and release all memory that is neither allocated nor used by a graph."""
        self._stop_finalizer()
        with self._guard.locked():
            self._memory.close()

    # Methods for the settings and for captures.

    @property
    def settings(self) -> Settings:
        """The settings in effect."""
        return self._memory.settings

    def configure(self, settings: Settings) -> None:
        """Replace the settings. Raises Unsupported for a setting that the upstream does not support."""
        with self._guard.locked():
            self._memory.configure(settings)
        self._wake_background_thread()

    def begin_capture(self) -> None:
        """Begin a capture: until its end no event is queried and nothing is released.

        A graph may use memory that was allocated in its capture whenever it runs. If a stream used such
        memory, the memory is not reused after its free until its private pool has no holder any more, or
        ``forget_graphs`` is called.
        """
        with self._guard.locked():
            self._memory.captures.capture_count += 1

    def end_capture(self) -> None:
        """End a capture."""
        with self._guard.locked():
            self._memory.captures.capture_count -= 1

    def forget_graphs(self) -> None:
        """Free the memory that is kept for graphs, which must not run any more."""
        with self._guard.locked():
            self._memory.forget_graphs()

    # Methods for statistics, history and snapshots.

    def statistics(self) -> dict[str, int]:
        """Return the 28 numbers of torch.cuda.host_memory_stats; times are in microseconds."""
        with self._guard.locked():
            return self._memory.stats.read()

    def counters(self) -> dict[str, int]:
        """Return counters that PyTorch does not have.

        The key "waiting_bytes" has the size of the freed blocks that streams still use.
        """
        with self._guard.locked():
            return self._memory.counters()

    def waiting(self) -> dict[int, int]:
        """Return for each stream the bytes of freed blocks that wait for it."""
        with self._guard.locked():
            bytes_by_stream: dict[int, int] = {}
            for stream, block in self._memory.awaited_streams():
                bytes_by_stream[stream] = bytes_by_stream.get(stream, 0) + block.size
            return bytes_by_stream

    def reset_peaks(self) -> None:
        """Set every peak to the current value."""
        with self._guard.locked():
            self._memory.stats.reset_peaks()

    def reset_sums(self) -> None:
        """Set the sums of allocated and freed bytes and counts to 0."""
        with self._guard.locked():
            self._memory.stats.reset_sums()

    def record_history(
        self,
        history: Recorded | None = "all",
        *,
        context: Context | None = "all",
        max_entries: int = sys.maxsize,
        skip_actions: Collection[str] = (),
        clear: bool = False,
    ) -> None:
        """Start or stop the recording of history; see CachingAllocator.record_history.

        Raises UsageError for an invalid setting.
        """
        with self._guard.locked():
            self._history.configure(
                history,
                context=context,
                max_entries=max_entries,
                skip_actions=skip_actions,
                clear=clear,
            )
            self._memory.engine.history = self._history if self._history.is_enabled else None

    def snapshot(self) -> dict[str, Any]:
        """Return ``host_segments`` and ``host_traces`` in PyTorch's format, as builtin types."""
        with self._guard.locked():
            used_blocks = [
                *self._memory.live_blocks.values(),
                *(block for block, _ in list(self._guard.queued_frees)),
            ]
            blocks = {*used_blocks, *(block for pool in self._memory.pools for block in pool)}
            return host_snapshot(blocks, self._history)

    # Methods that are called without the guard.

    def _poll(self) -> bool:
        """Process pending frees in the background thread; return whether pending frees remain."""
        with suppress(CudaError), self._guard.locked():  # The next request raises the error again.
            if (
                self.settings.pinned_use_background_threads
                and not self._memory.captures.capture_count
            ):
                self._memory.default_pool.pending_frees.process_events()
        return self.settings.pinned_use_background_threads and bool(
            self._memory.default_pool.pending_frees
        )

    def _wake_background_thread(self) -> None:
        if self.settings.pinned_use_background_threads and self._memory.default_pool.pending_frees:
            self._background_thread.wake()

    def _refuse_free(self, ptr: int) -> None:
        if ptr == 0:
            return
        self._memory.stats.num_invalid_frees += 1
        if not self.settings.pinned_free_catch_all:
            raise InvalidPointer(
                f"nothing pinned is allocated at {ptr:#x}",
                hint="free each allocation once, by the address that alloc returned",
            )
