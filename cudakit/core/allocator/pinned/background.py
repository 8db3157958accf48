"""A thread that looks after something for as long as there is something to look after."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from time import sleep

# PyTorch's thread looks every 0.1 ms, whether anything waits or not; each look of this one takes the
# interpreter from the others.
_PAUSE_S = 0.001


class Background:
    """Calls ``work`` again and again from when it is woken until that returns False.

    ``work`` is a method, whose object it does not keep alive.
    """

    def __init__(self, work: Callable[[], bool]) -> None:
        self._work = weakref.WeakMethod(work)
        self._awake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Begin to work, in a thread that is made when it is first needed."""
        if self._thread is None:
            name = "cudakit pinned memory"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        self._awake.set()

    def stop(self) -> None:
        """Let the thread end, and wait for it."""
        self._stopped = True
        self._awake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._awake.wait()
            if self._stopped or not self._look():
                return
            sleep(_PAUSE_S)

    def _look(self) -> bool:
        """Work once; return whether there is anybody to work for."""
        self._awake.clear()  # before the work, so that who wakes it during the work is not missed
        work = self._work()
        if work is None:
            return False
        if work():
            self._awake.set()
        return True
