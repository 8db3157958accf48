"""Deliver Ctrl-C at safe points of long work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C until the block calls the yielded function; a second Ctrl-C is immediate.

    KeyboardInterrupt between any two instructions can leave an object half-initialized, which then fails to
    close. The handler is installed in the main thread only, because only it may call signal.signal, and only
    if the default handler is in place.
    """
    is_pending = False

    def hold(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 as signal calls it
        nonlocal is_pending
        if is_pending:
            raise KeyboardInterrupt
        is_pending = True

    def deliver() -> None:
        nonlocal is_pending
        if is_pending:
            is_pending = False
            raise KeyboardInterrupt

    if not _can_install_handler():
        yield deliver
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _can_install_handler() -> bool:
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
