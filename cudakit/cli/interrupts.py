"""Deliver Ctrl-C and SIGTERM at safe points of long work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C and SIGTERM until the block calls the yielded function; a second signal is immediate.

    KeyboardInterrupt between any two instructions can leave an object half-initialized, which then fails to
    close. The handler is only installed if the default handler is in place, and only in the main thread,
    because no other thread may call signal.signal.
    """
    is_pending = False

    def defer_interrupt(signal_number: int, frame: FrameType | None) -> None:  # noqa: ARG001 as signal calls it
        nonlocal is_pending
        if is_pending:
            raise KeyboardInterrupt
        is_pending = True

    def deliver_interrupt() -> None:
        nonlocal is_pending
        if is_pending:
            is_pending = False
            raise KeyboardInterrupt

    with _handled_by(defer_interrupt, signal.SIGINT, signal.SIGTERM):
        yield deliver_interrupt


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt in the block, so that the block deletes its files."""
    with _handled_by(signal.default_int_handler, signal.SIGTERM):
        yield


@contextmanager
def _handled_by(handler: Callable[..., Any], *signal_numbers: signal.Signals) -> Iterator[None]:
    """Replace the default handlers of signals in the block, if this is the main thread."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    default_handlers = {
        signal_number: signal.getsignal(signal_number)
        for signal_number in signal_numbers
        if is_main_thread
        and signal.getsignal(signal_number) in (signal.default_int_handler, signal.SIG_DFL)
    }
    for signal_number in default_handlers:
        signal.signal(signal_number, handler)
    try:
        yield
    finally:
        for signal_number, default_handler in default_handlers.items():
            signal.signal(signal_number, default_handler)
