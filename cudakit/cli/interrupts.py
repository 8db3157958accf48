"""Ctrl-C where work says that it may be broken off, rather than amid whatever is being done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the block asks for it, by a call of what it is given; a second one is at once.

    An exception that comes between any two instructions leaves things half done, which then fail when they
    are closed. Where Ctrl-C is ignored, or somebody else's, it stays so; so it does outside of the main
    thread, which alone may set this up (signal.signal).
    """
    held = _Held()
    if not _is_ours():
        yield held.deliver
        return
    signal.signal(signal.SIGINT, held.hold)
    try:
        yield held.deliver
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_ours() -> bool:
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


class _Held:
    def __init__(self) -> None:
        self._pending = False

    def hold(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 as signal calls it
        if self._pending:
            raise KeyboardInterrupt
        self._pending = True

    def deliver(self) -> None:
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt
