"""Deliver Ctrl-C at safe points of long work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def held_interrupts(*, includes_sigterm: bool = False) -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C until the block calls the yielded function; a second Ctrl-C is immediate.

    With ``includes_sigterm``, SIGTERM has the same effect.

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

    default_handlers: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler}
    if includes_sigterm:
        default_handlers[signal.SIGTERM] = signal.SIG_DFL
    replaced_handlers = {
        signal_number: handler
        for signal_number, handler in default_handlers.items()
        if _can_replace(signal_number, handler)
    }
    for signal_number in replaced_handlers:
        signal.signal(signal_number, defer_interrupt)
    try:
        yield deliver_interrupt
    finally:
        for signal_number, handler in replaced_handlers.items():
            signal.signal(signal_number, handler)


def _can_replace(signal_number: signal.Signals, default_handler: object) -> bool:
    """Return whether this is the main thread, and a signal has its default handler."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    return is_main_thread and signal.getsignal(signal_number) is default_handler
