"""Who may change the allocator: one thread at a time, and never a second time from within.

While the allocator works, Python may run a finalizer in the same thread, which may come back to it. A
plain lock would wait for ever then, a re-entrant one let it see what is half done.
"""

from __future__ import annotations

import threading
from typing import NoReturn

from cudakit.errors import CudakitError


class Reentered(CudakitError):
    """The allocator was asked for something from within itself, in a finalizer or a handler of signals."""

    def __init__(self) -> None:
        super().__init__(
            "the allocator was called from within itself",
            hint="finalizers and handlers of signals may free memory, and nothing else",
        )


class Guard:
    """A lock that the thread which holds it is refused.

    ``alloc`` and ``free`` use its two parts themselves, as ``enter``, ``try_enter`` and ``leave`` do: a call
    costs a tenth of what they do.
    """

    __slots__ = ("busy", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.busy = False

    def enter(self) -> None:
        """Wait for the lock. Raises Reentered where this thread has it."""
        self.lock.acquire()
        if self.busy:
            self.refuse()
        self.busy = True

    def refuse(self) -> NoReturn:
        """Undo the acquiring of the lock, and raise Reentered."""
        self.lock.release()
        raise Reentered

    def try_enter(self) -> bool:
        """Take the lock if nobody has it, this thread included."""
        if self.busy or not self.lock.acquire(blocking=False):
            return False
        self.busy = True
        return True

    def leave(self) -> None:
        """Let others in."""
        self.busy = False
        self.lock.release()
