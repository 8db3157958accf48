"""The guard of an allocator: a lock that its holder cannot acquire a second time, with a queue of frees.

While a thread holds the lock, Python may run a finalizer in this thread, and the finalizer may free memory. A
plain lock would deadlock; a re-entrant lock would let the finalizer see half-updated blocks. So a free that
cannot acquire the lock is queued, and performed when the running call ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from cudakit.errors import CudaError, UsageError


class Reentered(UsageError):
    """A finalizer, signal handler or MemPool upstream called the allocator during another call of it."""

    def __init__(self) -> None:
        super().__init__(
            "the allocator was called while it was running in the same thread",
            hint="finalizers and signal handlers may only free memory",
        )


class Gate:
    """Two flags that stop the fast path from changing the allocator.

    ``busy`` is set while a call changes the allocator, ``slow`` while an option is on that the fast path does
    not implement.
    """

    __slots__ = ("busy", "slow")

    def __init__(self) -> None:
        self.busy = self.slow = False


class Guard:
    """A lock that its holder cannot acquire a second time, with a queue of frees that could not acquire it.

    ``perform_free`` is called with the arguments of each queued free. ``watchers`` are called, without the
    lock, after every change.
    """

    __slots__ = ("gate", "lock", "perform_free", "queued_frees", "watchers")

    def __init__(self, perform_free: Callable[..., None], gate: Gate | None = None) -> None:
        self.lock = threading.RLock()
        self.gate = gate or Gate()
        self.perform_free = perform_free
        self.queued_frees: deque[tuple[Any, ...]] = deque()
        self.watchers: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        """Hold the lock during a ``with`` block. Raises Reentered if this thread holds it already."""
        self.enter()
        if self.queued_frees:
            try:
                self.perform_queued()
            except BaseException:
                self.exit()
                raise

    def __exit__(self, *_: object) -> None:
        self.exit()

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        self.leave()
        try:
            yield
        finally:
            self.enter()

    def replace_lock(self) -> None:
        """Replace the lock: the thread that held it does not exist in a forked process."""
        self.lock = threading.RLock()
        self.gate.busy = False

    def enter(self) -> None:
        """Acquire the lock. Raises Reentered if this thread holds it already."""
        self.lock.acquire()
        if self.gate.busy:
            self.lock.release()
            raise Reentered
        self.gate.busy = True

    def try_enter(self) -> bool:
        """Acquire the lock and return True; return False if any thread holds it, including this one."""
        if self.gate.busy or not self.lock.acquire(blocking=False):
            return False
        self.gate.busy = True
        return True

    def leave(self) -> None:
        """Release the lock without performing queued frees or calling watchers."""
        self.gate.busy = False
        self.lock.release()

    def exit(self) -> None:
        """Release the lock, perform queued frees and call the watchers."""
        self.leave()
        if self.queued_frees:
            self.drain_queue()
        if self.watchers:
            for watcher in list(self.watchers):
                watcher()

    def queue_free(self, *free_arguments: Any) -> None:
        self.queued_frees.append(free_arguments)
        # The thread with the lock may have released the lock before the queue contained this free.
        self.drain_queue()

    def drain_queue(self) -> None:
        """Perform queued frees, unless a thread holds the lock: that thread performs the frees later."""
        while self.queued_frees and self.try_enter():
            try:
                self.perform_queued()
            finally:
                self.leave()

    def perform_queued(self) -> None:
        """Perform queued frees. The caller holds the lock."""
        while self.queued_frees:
            # If an event cannot be recorded, the block stays pending, and the event is recorded later.
            with suppress(CudaError):
                self.perform_free(*self.queued_frees.popleft())
